"""The roofline: the seconds of each backend of an op, from shapes, ring size and chip.

    seconds = compute + exposed + overhead

*compute* is the time of all products: each takes that of its FLOPs, or of its bytes in HBM,
whichever is longer. *exposed* is the time of transfers that nothing hides. *overhead* is a little
for each product. A backend has two constants, its `Rates`; `RESIDENT`, `ALL_REDUCED` and `LOOPLESS`
say what XLA does, and `KEEPING_GAINS` when rows are kept. Those of the collective matmuls are
fitted to the played times of docs/plan.md. Everything else is a figure of the chip
(`flaxasync.hardware`), or says which bytes move.

An op and its gradients are *trips* around a ring (R devices, rows m of each):

```
gather    R - 1 hops of a block [m, k]; each of the R blocks is multiplied as it arrives
reduce    R - 1 hops of partial sums [m, n]; each of the R blocks is multiplied before they leave
dw        R - 1 hops of a block as in gather; its rows are contracted: the weight gradient x.T @ dy
local     one product; nothing travels
```

"none" hides no transfer. "xla" and "pallas" hide the hops of a trip behind half of its products:
one half runs beside each direction's half-block. "fused" hides them behind all products but that of
the last arrival. On GPUs of one host there are "none" and "xla", whose blocks come from every other
GPU, and hide behind all products but one. Sums over other mesh axes, such as those of gradients
over data, are not counted: every backend has them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from flaxasync.hardware import Chip, Gpu
from flaxasync.kernels.engine.operands import LANES
from flaxasync.kernels.weight_gradient_schedule import LARGEST_RING
from flaxasync.ops.quantization import Quantization, check_chip

type Shape = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The constants of one backend of one op."""

    share: float  # of the peak FLOP/s that large products reach
    step: float = 0.0  # seconds of each product beside its FLOPs or bytes


MATMUL = {
    "none": Rates(0.955, 3.2e-6),
    "xla": Rates(0.832, 2.2e-6),
    "pallas": Rates(0.85, 2.8e-6),
    "fused": Rates(0.94, 4.05e-6),
}
WHOLE = ("none", "fused")  # multiply all blocks at once, and hold all of them
RESIDENT = 0.5  # the share of vector memory that XLA gives to one operand
ALL_REDUCED = 11.5e-6
"""If a device's share of a block takes this many seconds on a link, XLA reduces all sums to all
devices and takes a part. That doubles the transfers."""
# The largest ring without a loop, where XLA sees that a block makes the same hops again.
LOOPLESS = 4
LARGEST_BLOCK = 80 * 2**20
"""The largest block of partial sums, in elements, for which the kernel has semaphores, whatever its
sides. Among 5149 random shapes of 20 to 140 Mi elements, it refused no block below 86 Mi. A larger
block takes several kernels, each for some of its batches."""
KEEPING_GAINS = 0.015
"""The op keeps what it gathers only if that is predicted to save this share of its time. Eleven of
the twelve layers of docs/plan.md are faster if they keep."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The seconds and bytes of one backend, on the slowest device."""

    compute: float  # seconds of work on the blocks
    exposed: float  # seconds during which a device waits for a transfer
    steps: int  # products of blocks
    step: float  # seconds of each of them beside its FLOPs or bytes
    held: int  # bytes that the backend keeps in memory beside operands and results
    # bytes that stay in memory from the forward to the backward pass beside the operands
    kept: int = 0

    @property
    def overhead(self) -> float:
        return self.steps * self.step

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of the time, by what a sentence calls it."""
        return {
            "products": self.compute,
            "waits for transfers": self.exposed,
            "steps": self.overhead,
        }

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.overhead


@dataclasses.dataclass(frozen=True)
class Trip:
    """One trip around the ring; m, k and n are those of the product of one block."""

    kind: Literal["gather", "reduce", "dw", "local"]
    sent: int  # the bytes of a block that travels
    m: int
    k: int
    n: int
    itemsize: int  # of results, and of operands without 8-bit type
    quantized: str | None = None  # the type of both operands of the product, if they have 8 bits
    batches: int = 1  # of which the rows are

    @property
    def operand_bytes(self) -> int:
        if self.quantized:
            return 1
        return self.itemsize

    @property
    def streamed(self) -> int:
        """The bytes of a block, and of what is made of it or multiplied with it."""
        if self.kind == "dw":
            return (self.m + self.n) * self.k * self.operand_bytes
        return self.m * (self.k * self.operand_bytes + self.n * self.itemsize)

    @property
    def shared(self) -> int:
        """The bytes of what all blocks have in common: w, or the sum of dw."""
        if self.kind == "dw":
            return self.m * self.n * self.itemsize
        return self.k * self.n * self.operand_bytes

    def seconds(self, chip: Chip | Gpu, rates: Rates, blocks: int, shared: int) -> float:
        """Returns the seconds of the product of some blocks at once, which moves `shared` bytes
        beside them.
        """
        reached = (chip.rate(self.quantized) or chip.flops) * rates.share
        flops = 2 * blocks * self.m * self.k * self.n
        return max(flops / reached, (blocks * self.streamed + shared) / hbm(chip))

    @property
    def kernels(self) -> int:
        """How many fused kernels make the trip. Those of sums pad the blocks to whole tiles."""
        if self.kind != "reduce":
            return 1
        unit = 32 // self.operand_bytes  # rows of a tile
        rows = -(-self.m // self.batches // unit) * unit
        columns = -(-self.n // LANES) * LANES
        return kernels_of_sums(self.batches, self.batches * rows * columns)


def kernels_of_sums(batches: int, block: int) -> int:
    """Returns how many kernels sum a block of so many elements, each for as many batches; 0 if no
    number of them divides the batches and has semaphores enough. The elements are those of whole
    tiles.
    """
    for count in range(1, batches + 1):
        if batches % count == 0 and block <= count * LARGEST_BLOCK:
            return count
    return 0


def directions(chip: Chip | Gpu, ring: int) -> int:
    """Returns the number of directions in which blocks travel around a ring."""
    if ring > 2 and isinstance(chip, Chip):
        return 2
    return 1


def hop_seconds(chip: Chip | Gpu, size: float, directions: int = 1) -> float:
    """Returns the seconds in which a device sends `size` bytes, as many in each direction."""
    return chip.hop_latency + size / (directions * chip.link_bandwidth * chip.link_share)


def hbm(chip: Chip | Gpu) -> float:
    """Returns the bytes a second that a program moves to and from HBM."""
    return chip.hbm_bandwidth * chip.hbm_efficiency


def all_gather_matmul_costs(
    chip: Chip | Gpu,
    ring: int,
    x: Shape,
    *ws: Shape,
    itemsize: int = 2,
    backward: bool = True,
    kernels: bool = True,
    gathered_bytes: int = 0,
    quantization: Quantization | None = None,
) -> dict[str, Cost]:
    """Returns the cost of each backend for x [..., m, k] and each w [k, n] of one device.

    Where `gathered_bytes` suffice for all_gather(x), a backend keeps it for dw if the chip has as
    much memory and that is predicted to gain. Then x makes one trip less.
    """
    *batch, k = x
    rows = math.prod(batch)
    batches = math.prod(batch[:-1])
    n = sum(w[1] for w in ws)
    forward, dx, dw = _kinds("all_gather_matmul", chip, quantization)
    sent = rows * k * (1 if forward else itemsize)
    trips = [Trip("gather", sent, rows, k, n, itemsize, forward, batches)]
    if not backward:
        return _costs(chip, ring, trips, kernels)
    trips.append(Trip("reduce", rows * k * itemsize, rows, n, k, itemsize, dx, batches))
    costs = _costs(chip, ring, [*trips, Trip("dw", sent, k, rows, n, itemsize, dw)], kernels)
    gathered = ring * sent
    if ring == 1 or gathered > gathered_bytes:
        return costs
    of_kept = Trip("local", 0, k, ring * rows, n, itemsize, dw)
    for name, keeping in _costs(chip, ring, [*trips, of_kept], kernels).items():
        # XLA dequantises 8-bit rows that a kernel kept, which takes longer than their trip.
        if name == "fused" and forward is not None and dw is None:
            continue
        held = max(keeping.held, gathered)
        gains = keeping.seconds <= (1 - KEEPING_GAINS) * costs[name].seconds
        if gains and held < chip.hbm_bytes:
            costs[name] = dataclasses.replace(keeping, held=held, kept=gathered)
    return costs


def sum_of_products_costs(
    op: Literal["matmul_reduce_scatter", "matmul_all_reduce"],
    chip: Chip | Gpu,
    ring: int,
    x: Shape,
    w: Shape,
    *,
    itemsize: int = 2,
    backward: bool = True,
    kernels: bool = True,
    quantization: Quantization | None = None,
) -> dict[str, Cost]:
    """Returns the cost of each backend for all rows x [..., r, k] and w [k, n] of one device.

    Where several products are summed, k is the sum of theirs. An all-reduce is a ring that scatters
    the sums and one collective operation that gathers them; "none" does both in one operation. Its
    gradients are local products.
    """
    rows = math.prod(x[:-1])
    share = -(-rows // ring)
    k, n = w
    scatters = op == "matmul_reduce_scatter"
    batches = math.prod(x[:-2])
    if not scatters and (x[-2] % ring or isinstance(chip, Gpu)):
        # they are merged, so that one of them is padded; on GPUs no row changes its place
        batches = 1
    forward, dx, dw = _kinds(op, chip, quantization)
    sent = share * n * itemsize
    trips = [Trip("reduce", sent, share, k, n, itemsize, forward, batches)]
    if backward and scatters:
        sent_back = share * n * (1 if dx else itemsize)
        trips.append(Trip("gather", sent_back, share, n, k, itemsize, dx, batches))
    elif backward:
        trips.append(Trip("local", 0, rows, n, k, itemsize, dx))
    if backward:
        trips.append(Trip("local", 0, k, rows, n, itemsize, dw))
    costs = _costs(chip, ring, trips, kernels)
    if scatters or ring == 1:
        return costs
    gather = hop_seconds(chip, (ring - 1) * sent, directions(chip, ring))
    for name, cost in costs.items():
        exposed = cost.exposed + gather
        if name == "none":
            exposed = hop_seconds(chip, 2 * (ring - 1) * sent, directions(chip, ring))
        costs[name] = dataclasses.replace(cost, exposed=exposed)
    return costs


def attention_on_gpus(gpu: Gpu, batch: int, rows: int, features: int, *, causal: bool) -> float:
    """Returns the seconds of attention by cuDNN, with its gradient, of whole sequences and heads of
    so many features together: two products of all scores forward, five backward.
    """
    flops = 7 * 2.0 * batch * rows * rows * features
    if causal:
        flops /= 2
    return flops / (gpu.flops * gpu.product_share * gpu.attention_share)


def _kinds(
    op: str, chip: Chip | Gpu, quantization: Quantization | None
) -> tuple[str | None, str | None, str | None]:
    """Returns the 8-bit types of the products of y, of dx and of dw; None for those that are not
    quantised.
    """
    if isinstance(chip, Chip):
        check_chip(op, quantization, chip)
    if quantization is None:
        return None, None, None
    return quantization.forward, quantization.backward, quantization.weights


def _costs(chip: Chip | Gpu, ring: int, trips: Sequence[Trip], kernels: bool) -> dict[str, Cost]:
    """Predicts every backend of a collective matmul that can serve a call.

    `plan` takes the first one of those that are equally fast.
    """
    backends = ["none"]
    if ring > 1:
        backends.append("xla")
    if ring > 1 and isinstance(chip, Chip):
        backends.append("pallas")
        if kernels and ring <= LARGEST_RING and all(trip.kernels for trip in trips):
            backends.append("fused")
    return {backend: _cost(chip, ring, trips, backend) for backend in backends}


def _cost(chip: Chip | Gpu, ring: int, trips: Sequence[Trip], backend: str) -> Cost:
    rates = _rates(chip, backend)
    is_resident, copy = _residence(chip, ring, trips[0], backend)
    compute = copy
    exposed = transfers = last_product = 0.0
    steps = held = 0
    for trip in trips:
        if trip.kind == "local":  # XLA does this
            compute += trip.seconds(chip, _rates(chip, "none"), 1, trip.shared)
            steps += 1
            continue
        shared = trip.shared
        if is_resident and trip.kind != "dw":
            shared = 0
        products = _products(chip, ring, trip, backend, shared)
        last_product = products / ring  # seconds
        moved = _transfers(chip, ring, trip, backend)
        compute += products
        exposed += max(0.0, moved - _hidden(chip, ring, backend, products, rates.step))
        transfers += moved
        if backend == "none":
            steps += 1
        elif backend == "fused":
            steps += ring * trip.kernels
        else:
            steps += ring
        slots = 4  # in each direction a block that is sent and one that arrives
        if backend in WHOLE:
            slots = ring
        if ring > 1:  # or the block is the operand itself
            held = max(held, slots * trip.sent)
    if backend == "xla" and ring == 2 and isinstance(chip, Chip):
        # Without a loop XLA hides every hop behind all products but the last one.
        exposed = max(0.0, transfers - (compute - last_product))
    return Cost(compute, exposed, steps, rates.step, held)


def _hidden(chip: Chip | Gpu, ring: int, backend: str, products: float, step: float) -> float:
    """Returns the seconds of transfers that the products of a trip hide; see the head of this
    file.
    """
    of_block = products / ring
    if backend == "none":
        return 0.0
    if backend == "fused":
        return products - of_block / directions(chip, ring) + ring * step
    if isinstance(chip, Chip):
        return (ring - 1) * of_block / 2
    return (ring - 1) * (of_block + step)


def _rates(chip: Chip | Gpu, backend: str) -> Rates:
    if isinstance(chip, Chip):
        return MATMUL[backend]
    step = chip.kernel_latency
    if backend == "xla":
        step *= 2  # a kernel multiplies a block, and one copies it
    return Rates(chip.product_share, step)


def _residence(chip: Chip | Gpu, ring: int, first: Trip, backend: str) -> tuple[bool, float]:
    """Says whether products find w in vector memory, and how long XLA copies it there beforehand.

    That is beside a gather that comes first. A fused kernel reads w by itself where HBM is faster
    than its products.
    """
    if isinstance(chip, Gpu) or first.shared > RESIDENT * chip.vmem_bytes:
        return False, 0.0
    copy = first.shared / hbm(chip)
    if backend == "none" and first.kind == "gather":
        copy -= _transfers(chip, ring, first, backend)
    if backend == "fused" and copy < first.seconds(chip, _rates(chip, backend), ring, 0):
        copy = 0.0
    return True, max(0.0, copy)


def _products(chip: Chip | Gpu, ring: int, trip: Trip, backend: str, shared: int) -> float:
    """Returns the seconds of all products of a trip, which move `shared` bytes beside blocks."""
    rates = _rates(chip, backend)
    if backend == "fused" and trip.kind == "dw" and isinstance(chip, Chip):
        # The rows that each direction brought are contracted in whole passes of matrix units.
        unit = directions(chip, ring) * chip.matrix_unit
        trip = dataclasses.replace(trip, k=-(-trip.k // unit) * unit)
    copied = 0.0
    if isinstance(chip, Gpu) and ring > 1 and (backend == "xla" or trip.batches > 1):
        # what does not travel is put in order, or sliced
        copied = 2 * ring * (trip.streamed - trip.sent) / hbm(chip)
    if backend in WHOLE:
        return copied + trip.seconds(chip, rates, ring, shared)
    if trip.kind == "dw" and isinstance(chip, Chip):
        # Each direction reads and writes sums in float32, unless they stay in vector memory.
        sums = directions(chip, ring) * 4 * trip.m * trip.n
        shared = 0 if sums <= RESIDENT * chip.vmem_bytes else 2 * sums
    return copied + ring * trip.seconds(chip, rates, 1, shared)


def _transfers(chip: Chip | Gpu, ring: int, trip: Trip, backend: str) -> float:
    """Returns the seconds in which blocks travel: hop by hop, or in one collective of XLA."""
    ways = directions(chip, ring)
    if backend != "none":
        if backend == "xla" and trip.kind == "dw" and isinstance(chip, Chip) and ring <= LOOPLESS:
            return 0.0
        return (ring - 1) * hop_seconds(chip, trip.sent, ways)
    if ring == 1 or trip.kind == "dw":  # XLA sees that x was gathered before
        return 0.0
    seconds = hop_seconds(chip, (ring - 1) * trip.sent, ways)
    share = trip.sent / ring / chip.link_bandwidth
    if trip.kind == "reduce" and ways == 2 and share >= ALL_REDUCED:
        seconds *= 2
    return seconds
