"""The roofline: the seconds of each backend of an op, from shapes, ring size and chip.

    seconds = compute + exposed + overhead        overhead = once for each trip + a little for each step

*compute* is the time of all products: each takes that of its FLOPs, or of its bytes in HBM,
whichever is longer. *exposed* is the time of transfers that nothing hides. A backend has at most
three constants, its `Rates`. Those of the collective matmuls are fitted to the played times of
docs/plan.md. Everything else is a figure of the chip (`flaxasync.hardware`), or says which bytes
move.

An op and its gradients are *trips* around a ring (R devices, rows m of each):

```
gather    R - 1 hops of a block [m, k]; each of the R blocks is multiplied as it arrives
reduce    R - 1 hops of partial sums [m, n]; each of the R blocks is multiplied before its sums leave
dw        R - 1 hops of a block as in gather; its rows are contracted: the weight gradient x.T @ dy
local     one product; nothing travels
```

"none" takes products and collectives one after the other. "xla" and "pallas" take, for each hop,
the longer one of the hop and of half a product: one half runs beside each direction's half-block.
"fused" takes, for each trip, the longer one of all products and of all hops with half a product
behind them. On GPUs of one host the share of the peak and the seconds of a step are figures of
`flaxasync.hardware.Gpu`, and there are "none" and "xla". Sums over other mesh axes, such as those
of gradients over data, are not counted: every backend has them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from flaxasync.hardware import Chip, Gpu
from flaxasync.kernels.attention_block import Mask
from flaxasync.kernels.engine.cores import best_cores
from flaxasync.kernels.engine.operands import LANES
from flaxasync.ops.attention import layouts
from flaxasync.ops.quantization import Quantization, check_chip, quantization_of

type Shape = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The constants of one backend of one op."""

    share: float  # of the peak FLOP/s that large products reach
    # seconds of each trip beside products and hops; of experts, of each step
    once: float = 0.0
    # seconds of each product beside its FLOPs or bytes; of experts, of each row
    step: float = 0.0


MATMUL = {
    "none": Rates(0.955, 1.4e-6, 1.5e-6),
    "xla": Rates(0.82, 0.0, 1.75e-6),
    "pallas": Rates(0.83, 0.0, 1.6e-6),
    "fused": Rates(0.93, 1.7e-6, 2.5e-6),
}
# Those of attention are played on v5e (benchmarks/attention.py), and their steps assumed.
ATTENTION = {"none": Rates(0.9, 0.0, 5e-6), "xla": Rates(0.9, 0.0, 10e-6)}
# Played on v5e (docs/kernels/mesh_matmul.md); a step is a kernel or a collective, assumed.
_MESH_SHARES = {"none": 0.95, "xla_gemm": 0.94, "serial": 0.94, "fused": 0.95, "overlapped": 0.95}
MESH = {name: Rates(share, 0.0, 3e-6) for name, share in _MESH_SHARES.items()}
# Of all backends of experts. A step is a row that is sorted, taken and added (docs/moe.md).
EXPERTS = Rates(0.9, 5e-6, 35e-9)

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
    held: int  # bytes that the backend keeps in memory beside operands and results
    overhead: float  # seconds of beginnings, ends and steps
    # bytes that stay in memory from the forward to the backward pass beside the operands
    kept: int = 0

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
    def travels(self) -> bool:
        return self.kind != "local"

    @property
    def operand_bytes(self) -> int:
        if self.quantized:
            return 1
        return self.itemsize

    @property
    def w_bytes(self) -> int:
        return self.k * self.n * self.operand_bytes


def directions(ring: int) -> int:
    """Returns the number of directions in which blocks travel around a ring."""
    if ring > 2:
        return 2
    return 1


def hop_seconds(chip: Chip, size: float, directions: int) -> float:
    """Returns the seconds of one hop of `size` bytes, of which each direction carries an equal
    share.
    """
    return chip.hop_latency + size / (directions * chip.link_bandwidth)


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
    quantization: Quantization | str | None = None,
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
    quantization: Quantization | str | None = None,
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
    if scatters:
        return costs
    if isinstance(chip, Gpu):
        return _with_gather_on_gpus(chip, ring, sent, costs)
    gather = (ring - 1) * hop_seconds(chip, sent, directions(ring))
    for name, cost in costs.items():
        costs[name] = dataclasses.replace(cost, exposed=cost.exposed + gather)
    reduced = 2 * _collective_seconds(chip, ring, sent)
    return costs | {"none": dataclasses.replace(costs["none"], exposed=reduced)}


def ring_attention_costs(
    chip: Chip,
    ring: int,
    q: Shape,
    k: Shape,
    v: Shape | None = None,
    *,
    causal: bool = True,
    layout: layouts.AttentionLayout = "contiguous",
    window: int | None = None,
    itemsize: int = 2,
    backward: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend, from the shapes of one device: a ring of k and v, or one
    gather of both.

    A block has s x s scores: two matmuls forward, five backward. k and v cross the ring in their
    dtype, dk and dv in float32. In the zigzag layout a device multiplies half a block with the rows
    that each hop brings. In the contiguous layout the last device multiplies every block, and the
    others wait for it.
    """
    b, s, h, d = q
    sequence = layouts.Sequence(layout, Mask(causal, window), s, ring)
    hops = sequence.hops
    ways = 1 if sequence.one_way else directions(ring)
    kv_elements = 2 * b * s * k[2] * d
    kv_bytes = kv_elements * itemsize
    dkv_bytes = 4 * kv_elements if backward else 0
    # the accumulator of a block is read and written once
    accumulator_bytes = 2 * 4 * b * h * s * d
    # the shares of a block's scores that are computed
    share_of_own = 0.5 if causal else 1.0
    share_of_arrived = 0.5 if causal and layout == "zigzag" else 1.0

    def block_seconds(matmuls: int, share: float) -> float:
        flops = 2 * matmuls * b * h * s * s * d * share
        reached = chip.flops * ATTENTION["xla"].share
        return max(flops / reached, accumulator_bytes / hbm(chip))

    passes = [(2, kv_bytes)]  # the matmuls of a block, and the bytes that travel
    if backward:
        passes.append((5, kv_bytes + dkv_bytes))
    compute = exposed = gathered = 0.0
    for matmuls, sent in passes:
        own = block_seconds(matmuls, share_of_own)
        arrived = block_seconds(matmuls, share_of_arrived)
        hop = hop_seconds(chip, sent, ways)
        compute += own + hops * arrived
        exposed += hops * max(0.0, hop - arrived)
        gathered += (ring - 1) * hop_seconds(chip, sent, directions(ring))
    steps = len(passes) * (hops + 1)
    held = {"xla": 2 * (kv_bytes + dkv_bytes), "none": ring * (kv_bytes + dkv_bytes)}
    waits = {"xla": exposed, "none": gathered}
    return {
        name: Cost(compute, waits[name], steps, held[name], steps * ATTENTION[name].step)
        for name in held
    }


def mesh_matmul_costs(
    chip: Chip,
    ring: tuple[int, int],
    lhs: Shape,
    rhs: Shape,
    *,
    itemsize: int = 2,
    kernels: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend for lhs [m, k] and rhs [k', n] of one device; ring is
    (devices on x, on y).

    w moves along x, sums move along y, and each backend hides a part of it. Only the forward pass
    is counted: the gradients are the same, whatever the backend.
    """
    x, y = ring
    m, k = lhs
    rhs_rows, n = rhs
    w_bytes = k * n * itemsize
    o_bytes = m * n * itemsize
    moved = m * k * itemsize + w_bytes + o_bytes
    # seconds: of a gather of all blocks of rhs, and of hops that bring w alone
    gathered = (x - 1) * hop_seconds(chip, rhs_rows * n * itemsize, 1)
    if x == y > 1:
        permuted = hop_seconds(chip, w_bytes, 1)
    else:
        permuted = (x - 1) * hop_seconds(chip, w_bytes / x, 1)
    reduced = 2 * (y - 1) * hop_seconds(chip, o_bytes / y, 1)
    summed = 3 * o_bytes / hbm(chip) if y > 1 else 0.0
    sliced = 2 * w_bytes / hbm(chip) if x > 1 and y > 1 else 0.0
    before = gathered + sliced
    after = reduced + summed

    def cost(backend: str, waits: float, steps: int, held: int, beside: float = 0.0) -> Cost:
        """`beside` are the seconds of transfers behind the product."""
        rates = MESH[backend]
        cores = chip.cores if backend in ("fused", "overlapped") else 1
        product = max(2 * m * k * n * cores / (chip.flops * rates.share), moved / hbm(chip))
        exposed = waits + max(0.0, beside - product)
        return Cost(product, exposed, steps, held, steps * rates.step)

    # "none" brings w by one permute on a square mesh, and gathers all blocks on another.
    whole_rhs = x * rhs_rows * n * itemsize
    first, brought = (permuted, w_bytes) if x == y else (before, whole_rhs)
    costs = {"none": cost("none", first + after, 3, brought)}
    if kernels and x * y > 1:
        for backend in ("xla_gemm", "serial"):
            costs[backend] = cost(backend, before + after, 3, whole_rhs + o_bytes)
        # The product of "fused" hides the transfers of w, and that of "overlapped" those of sums,
        # too.
        own = w_bytes + o_bytes
        costs["fused"] = cost("fused", after, 2 if after else 1, own, beside=permuted)
        beside = max(permuted, reduced)
        costs["overlapped"] = cost("overlapped", 0.0, 1, own, beside=beside)
    return costs


@dataclasses.dataclass(frozen=True)
class _ExpertWork:
    """The work of one device on blocks of rows, of which it multiplies those that chose its
    experts.
    """

    chip: Chip
    kernels: int  # weights of one expert
    elements: int  # of the weights of all its experts
    features: int
    hidden: int
    chosen: int  # rows of a block that chose its experts
    itemsize: int

    @property
    def row_bytes(self) -> int:
        return self.features * self.itemsize

    def products(self, count: int, streamed: float, blocks: int) -> float:
        """Returns the seconds of `count` products of some blocks, for which HBM streams bytes."""
        flops = 2 * count * self.chosen * self.features * self.hidden * blocks
        computed = flops / (self.chip.flops * EXPERTS.share)
        return max(computed, streamed / (hbm(self.chip) * EXPERTS.share))

    def moving(self, sent: int) -> float:
        """Returns the seconds in which rows of a block are taken, and added to as many as were
        sent.
        """
        moved = 4 * (self.chosen + sent) * self.row_bytes
        return moved / hbm(self.chip) + EXPERTS.step * self.chosen

    def of_pass(self, arrays: int, blocks: int, sent: int) -> float:
        """Returns the seconds of the pass in which so many arrays travel: two forward, three
        backward.
        """
        stored = self.elements * self.itemsize
        moved = blocks * self.moving(sent)
        if arrays == 2:
            return self.products(self.kernels, stored, blocks) + moved
        of_rows = self.products(2 * self.kernels - 1, 2 * stored, blocks)
        # The gradients of the weights are float32.
        return of_rows + self.products(self.kernels, 4 * self.elements, blocks) + 2 * moved


def expert_mlp_costs(
    chip: Chip,
    ring: int,
    x: Shape,
    ids: Shape,
    weights: Shape,
    *kernels: Shape,
    itemsize: int = 2,
    split: str = "experts",
    capacity: int | None = None,
    backward: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend for rows that are spread evenly over the experts, from the
    shapes of one device.

    A block is the rows of one device. Each device multiplies, for every block, the rows that chose
    its experts. Forward, these are three products; rows travel, and sums of the same size behind
    them. Backward, they are eight, because two are computed again; rows and cotangents travel, and
    one sum. An exchange is among the backends where a capacity bounds what a device sends to
    another one to less than all of its rows.
    """
    *batch, features = x
    rows = math.prod(batch)
    e, _, hidden = kernels[0]
    chosen = rows * ids[-1]
    if split == "experts":
        chosen //= ring
    elements = len(kernels) * e * features * hidden
    work = _ExpertWork(chip, len(kernels), elements, features, hidden, chosen, itemsize)
    block = rows * work.row_bytes
    passes = (2, 3) if backward else (2,)
    at_once = in_turns = gathered = exposed = 0.0
    for arrays in passes:
        hop = hop_seconds(chip, arrays * block, directions(ring))
        turn = work.of_pass(arrays, 1, rows)
        at_once += work.of_pass(arrays, ring, rows)
        in_turns += ring * turn
        gathered += (ring - 1) * hop
        exposed += (ring - 1) * max(0.0, hop - turn)
    held = 2 * block + 2 * elements * itemsize

    def cost(compute: float, waits: float, turns: int, beside: int) -> Cost:
        steps = len(passes) * turns
        return Cost(compute, waits, steps, held + beside, steps * EXPERTS.once)

    costs = {
        "none": cost(at_once, gathered, 1, ring * (2 + backward) * block),
        "xla": cost(in_turns, exposed, ring + 1, 4 * block),
    }
    if capacity is None or split == "hidden" or ring == 1:
        return costs
    sent = e * 2 * -(-capacity // 2)
    if sent < rows:
        turns = [1] + [2] * ((ring - 1) // 2) + [1] * (1 - ring % 2)  # blocks of each turn
        compute, waits = _exchanged_experts(work, ring, sent, passes, turns)
        costs["exchange"] = cost(compute, waits, len(turns), 2 * ring * sent * work.row_bytes)
    return costs


def _exchanged_experts(
    work: _ExpertWork, ring: int, sent: int, passes: Sequence[int], turns: Sequence[int]
) -> tuple[float, float]:
    """Returns the seconds of work and of waits where rows travel to their experts and home."""
    # A block goes by the shorter way, so min(s, R - s) blocks of each shift s cross a link.
    crossings = sum(min(shift, ring - shift) for shift in range(1, ring)) / directions(ring)
    home = sent * work.row_bytes / work.chip.link_bandwidth
    compute = waits = 0.0
    for arrays in passes:
        computed = sum(work.of_pass(arrays, blocks, sent) for blocks in turns)
        # Each device sorts rows once more before they leave, and when they come home.
        computed += 8 * (ring - 1) * (work.chosen + sent) * work.row_bytes / hbm(work.chip)
        compute += computed
        waits += home + max(0.0, arrays * crossings * home - computed)
    return compute, waits


MODELS: dict[str, Callable[..., dict[str, Cost]]] = {
    "all_gather_matmul": all_gather_matmul_costs,
    "expert_mlp": expert_mlp_costs,
    "matmul_all_reduce": functools.partial(sum_of_products_costs, "matmul_all_reduce"),
    "matmul_reduce_scatter": functools.partial(sum_of_products_costs, "matmul_reduce_scatter"),
    "mesh_matmul": mesh_matmul_costs,
    "ring_attention": ring_attention_costs,
}
"""For each op, what returns the cost of each backend that can serve a call."""
# the ops of which costs on GPUs are known, and the largest ring: that of one host
LARGEST_ON_GPUS = 8
ON_GPUS = ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter")


def _kinds(
    op: str, chip: Chip | Gpu, quantization: Quantization | str | None
) -> tuple[str | None, str | None, str | None]:
    """Returns the 8-bit types of the products of y, of dx and of dw; None for those that are not
    quantised.
    """
    quantization = quantization_of(op, quantization)
    if isinstance(chip, Chip):
        check_chip(op, quantization, chip)
    if quantization is None:
        return None, None, None
    return quantization.forward, quantization.backward, quantization.weights


def _costs(chip: Chip | Gpu, ring: int, trips: Sequence[Trip], kernels: bool) -> dict[str, Cost]:
    if isinstance(chip, Gpu):
        costs = {"none": _gpu_serial(chip, ring, trips)}
        if ring > 1:
            costs["xla"] = _gpu_blocks(chip, ring, trips)
        return costs
    costs = {"none": _serial(chip, ring, trips)}
    if ring == 1:
        return costs
    costs["xla"] = _ring_of_blocks(chip, ring, trips, "xla")
    costs["pallas"] = _ring_of_blocks(chip, ring, trips, "pallas")
    sums = [trip for trip in trips if trip.kind == "reduce"]
    if kernels and all(_kernels_of(trip) for trip in sums):
        costs["fused"] = _fused(chip, ring, trips)
    return costs


def kernels_of_sums(batches: int, block: int) -> int:
    """Returns how many kernels sum a block of so many elements, each for as many batches; 0 if no
    number of them divides the batches and has semaphores enough. The elements are those of whole
    tiles.
    """
    for count in range(1, batches + 1):
        if batches % count == 0 and block <= count * LARGEST_BLOCK:
            return count
    return 0


def _kernels_of(trip: Trip) -> int:
    """Returns how many kernels sum the blocks of a trip, padded to whole tiles."""
    unit = 32 // trip.operand_bytes  # rows of a tile
    rows = -(-trip.m // trip.batches // unit) * unit
    columns = -(-trip.n // LANES) * LANES
    return kernels_of_sums(trip.batches, trip.batches * rows * columns)


def _gpu_serial(gpu: Gpu, ring: int, trips: Sequence[Trip]) -> Cost:
    """Predicts "none" on GPUs of one host. For "dw", XLA sees that x was gathered before.

    Rows of several batches are put in order on the side of the product that does not travel.
    """
    compute = exposed = 0.0
    held = 0
    for trip in trips:
        blocks = ring if trip.travels else 1
        compute += _gpu_product(gpu, trip, blocks)
        if ring > 1 and trip.kind in ("gather", "reduce"):
            exposed += nccl_seconds(gpu, (ring - 1) * trip.sent)
            held = max(held, ring * trip.sent)
            if trip.batches > 1:
                features = trip.n if trip.kind == "gather" else trip.k
                compute += 2 * ring * trip.m * features * trip.itemsize / hbm(gpu)
    return Cost(compute, exposed, len(trips), held, len(trips) * gpu.kernel_latency)


def _gpu_blocks(gpu: Gpu, ring: int, trips: Sequence[Trip]) -> Cost:
    """Predicts "xla" on GPUs of one host (`flaxasync.ops.matmul.switch`): blocks are sliced from all
    rows, or put in order, and what arrives of a sum is added at once.
    """
    compute = exposed = 0.0
    kernels = held = 0
    for trip in trips:
        if not trip.travels:
            compute += _gpu_product(gpu, trip, 1)
            kernels += 1
            continue
        block = _gpu_product(gpu, trip, 1)
        results = trip.itemsize * trip.m * trip.n
        if trip.kind == "gather":
            copied = 2 * ring * results
        elif trip.kind == "reduce":
            copied = ring * (2 * trip.m * trip.k * trip.itemsize + results)
        else:
            copied = 2 * ring * trip.k * trip.n * trip.itemsize
        compute += ring * block + copied / hbm(gpu)
        turn = block + copied / ring / hbm(gpu) + 2 * gpu.kernel_latency
        exposed += (ring - 1) * max(0.0, nccl_seconds(gpu, trip.sent) - turn)
        kernels += 2 * ring
        held = max(held, 2 * trip.sent)
    return Cost(compute, exposed, kernels, held, kernels * gpu.kernel_latency)


def attention_on_gpus(gpu: Gpu, batch: int, rows: int, features: int, *, causal: bool) -> float:
    """Returns the seconds of attention by cuDNN, with its gradient, of whole sequences and heads of
    so many features together: two products of all scores forward, five backward.
    """
    flops = 7 * 2.0 * batch * rows * rows * features
    if causal:
        flops /= 2
    return flops / (gpu.flops * gpu.product_share * gpu.attention_share)


def _with_gather_on_gpus(
    gpu: Gpu, ring: int, sent: int, costs: Mapping[str, Cost]
) -> dict[str, Cost]:
    """Returns the costs of all-reduces, whose sums are gathered after they were scattered; "none"
    does both in one collective, which begins once.
    """
    if ring == 1:
        return dict(costs)
    gathered = nccl_seconds(gpu, (ring - 1) * sent)
    found = {}
    for name, cost in costs.items():
        waits = cost.exposed + gathered
        if name == "none":
            waits -= gpu.hop_latency
        found[name] = dataclasses.replace(cost, exposed=waits)
    return found


def _gpu_product(gpu: Gpu, trip: Trip, blocks: int) -> float:
    """Returns the seconds of the product of some blocks at once."""
    m = trip.m * (1 if trip.kind == "dw" else blocks)
    k = trip.k * (blocks if trip.kind == "dw" else 1)
    peak = gpu.rate(trip.quantized) or gpu.flops
    moved = (m * k + k * trip.n) * trip.operand_bytes + m * trip.n * trip.itemsize
    return max(2 * m * k * trip.n / (peak * gpu.product_share), moved / hbm(gpu))


def nccl_seconds(gpu: Gpu, sent: int) -> float:
    """Returns the seconds of a transfer in which each GPU of a host sends so many bytes."""
    return gpu.hop_latency + sent / (gpu.link_bandwidth * gpu.link_share)


def _serial(chip: Chip, ring: int, trips: Sequence[Trip]) -> Cost:
    """Predicts "none": XLA copies w into vector memory, beside an all-gather if that comes
    first.
    """
    rates = MATMUL["none"]
    copy = _copy_seconds(chip, trips[0])
    weights = 0 if copy else 1
    compute = exposed = 0.0
    held = 0
    for trip in trips:
        blocks = ring if trip.travels else 1
        compute += _product(chip, trip, rates, blocks=blocks, weights=weights)
        # For "dw", XLA sees that x was gathered before.
        if ring == 1 or trip.kind not in ("gather", "reduce"):
            continue
        seconds = _collective_seconds(chip, ring, trip.sent)
        if trip.kind == "gather" and ring > 2:
            copy -= seconds
        shared = trip.sent / ring / chip.link_bandwidth
        if trip.kind == "reduce" and ring > 2 and shared >= ALL_REDUCED:
            seconds *= 2
        exposed += seconds
        held = max(held, ring * trip.sent)
    return _with_overhead(rates, compute, exposed + max(0.0, copy), trips, len(trips), held)


def _ring_of_blocks(chip: Chip, ring: int, trips: Sequence[Trip], backend: str) -> Cost:
    """Predicts "xla" or "pallas".

    A ring of two is no loop of XLA: it copies w into vector memory first, and hides the hops of one
    trip behind the products of all.
    """
    rates = MATMUL[backend]
    is_pair = backend == "xla" and ring == 2
    copy = _copy_seconds(chip, trips[0]) if is_pair else 0.0
    weights = 0 if copy else 1
    compute = copy
    exposed = hops = 0.0
    steps = held = 0
    for trip in trips:
        if not trip.travels:
            compute += _product(chip, trip, rates)
            steps += 1
            continue
        result = _result_bytes(chip, ring, trip)
        block = _product(chip, trip, rates, weights=weights, result=result)
        hop = hop_seconds(chip, trip.sent, directions(ring))
        if trip.kind == "dw" and backend == "xla" and ring <= LOOPLESS:
            hop = 0.0
        compute += ring * block
        exposed += (ring - 1) * max(0.0, hop - block / 2)
        hops += (ring - 1) * hop
        steps += ring
        held = max(held, 4 * trip.sent)
    if is_pair and len(trips) > 1:
        exposed = max(0.0, hops - compute)
    return _with_overhead(rates, compute, exposed, trips, steps, held)


def _fused(chip: Chip, ring: int, trips: Sequence[Trip]) -> Cost:
    """Predicts "fused": a kernel for each trip, on the cores that suit it; XLA does what is
    local.
    """
    rates = MATMUL["fused"]
    resident = RESIDENT * chip.vmem_bytes
    compute = exposed = 0.0
    steps = held = 0
    for trip in trips:
        if not trip.travels:
            compute += _product(chip, trip, MATMUL["none"])
            steps += 1
            continue
        weights = 1
        if trip.kind == "gather" and ring * trip.sent > resident:
            weights = ring  # x streams through vector memory, and w with each block of it
        # XLA can put w into vector memory while another kernel runs, but not before the only one.
        if trip.kind == "reduce" and (trip.w_bytes > resident or len(trips) == 1):
            weights = ring
        sent = trip.sent
        if trip.kind == "dw":
            sent = trip.m * trip.k * trip.operand_bytes
            # The rows that each direction brought are contracted in whole passes of matrix units.
            unit = directions(ring) * chip.matrix_unit
            trip = dataclasses.replace(trip, k=-(-trip.k // unit) * unit)
        tile = 1  # rows, which batches share out as well
        if trip.kind == "dw":
            tile = LANES  # columns
        kernels = 1
        if trip.kind == "reduce":
            kernels = _kernels_of(trip)
        cores = best_cores(chip, trip.m // kernels, tile)
        readings = kernels * cores * weights  # each core reads all of w
        products = _product(chip, trip, rates, blocks=ring, weights=readings, cores=cores)
        if kernels > 1:  # what they return is joined
            products += 2 * sent / hbm(chip)
        busy = products + ring * kernels * rates.step
        hops = (ring - 1) * hop_seconds(chip, sent, directions(ring))
        compute += products
        exposed += max(0.0, hops + products / ring / 2 - busy)
        steps += ring * kernels
        held = max(held, ring * sent)
    return _with_overhead(rates, compute, exposed, trips, steps, held)


def _with_overhead(
    rates: Rates, compute: float, exposed: float, trips: Sequence[Trip], steps: int, held: int
) -> Cost:
    begun = sum(trip.travels for trip in trips)
    return Cost(compute, exposed, steps, held, begun * rates.once + steps * rates.step)


def _product(
    chip: Chip,
    trip: Trip,
    rates: Rates,
    *,
    blocks: int = 1,
    weights: int = 1,
    result: int | None = None,
    cores: int | None = None,
) -> float:
    """Returns the seconds of the product of some blocks at once, which reads w `weights` times.

    It moves `result` bytes for its result, which by default is written once. `cores` of a device
    multiply, by default all.
    """
    m = trip.m * (1 if trip.kind == "dw" else blocks)
    k = trip.k * (blocks if trip.kind == "dw" else 1)
    peak = chip.rate(trip.quantized) or chip.flops
    reached = peak * rates.share * (cores or chip.cores) / chip.cores
    flops = 2 * m * k * trip.n
    operands = (m * k + weights * k * trip.n) * trip.operand_bytes
    if result is None:
        result = m * trip.n * trip.itemsize
    return max(flops / reached, (operands + result) / hbm(chip))


def _collective_seconds(chip: Chip, ring: int, sent: int) -> float:
    """Returns the seconds of XLA's gather or reduce-scatter of blocks of `sent` bytes.

    Blocks travel in both directions, and the farthest comes from half of the ring away.
    """
    carried = (ring - 1) * sent / (directions(ring) * chip.link_bandwidth)
    return ring // 2 * chip.hop_latency + carried


def _copy_seconds(chip: Chip, first: Trip) -> float:
    """Returns the seconds in which XLA copies w into vector memory before the first product; 0 if
    it does not.
    """
    if first.w_bytes <= RESIDENT * chip.vmem_bytes:
        return first.w_bytes / hbm(chip)
    return 0.0


def _result_bytes(chip: Chip, ring: int, trip: Trip) -> int:
    """Returns the bytes of HBM that the results of a block's product move in a ring of blocks.

    Sums of dw are float32. They are read and written where they leave vector memory, in which the
    old and the new ones stand together on rings of three and more.
    """
    if trip.kind != "dw":
        return trip.m * trip.n * trip.itemsize
    sums = 4 * trip.m * trip.n
    stays = directions(ring) * sums <= RESIDENT * chip.vmem_bytes
    # Each direction's half-block has a product of its own.
    if stays:
        return 0
    return 2 * directions(ring) * sums
