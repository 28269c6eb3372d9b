"""What the backends of collective matmuls take for trips around a ring, of which an op and its
gradients are made.

Each trip is of one kind (R devices, rows m of each):

```
gather     R - 1 hops of a block [m, k]; each of the R blocks is multiplied as it arrives
reduce     R - 1 hops of partial sums [m, n]; each of the R blocks is multiplied before its sums leave
dw         R - 1 hops of a block as in gather; its rows are contracted: the weight gradient x.T @ dy
gathered   a product of all blocks, which a trip before has gathered; nothing travels
beside     the same, which the kernel of the trip before computes while it would wait for links
local      a product that needs nothing from other devices; nothing travels
```

A product takes time for its FLOPs and for its bytes, and the longer of the two hides most of the
other. What does not stay in vector memory moves again. "none" (`serial`) takes products and
collectives one after the other. "xla" and "pallas" (`ring_of_blocks`) take, for each hop, the
longer of the hop and of the part of a product that hides it. "fused" (`fused`) takes, for each
trip, the longer of all products and all hops, then the end of one block that nothing hides, and a
little for each block. Constants without another source are fitted to played programs
(benchmarks/plan.py); plays near the best of their case weigh most.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, hbm, hop_seconds

EFFICIENCY = {"none": 0.973, "xla": 0.868, "pallas": 0.868, "fused": 0.942}
"""The share of the peak FLOP/s that large products reach."""
OVERLAP_EXPONENT = 2.76
"""How far FLOPs and bytes of a product hide each other: p of (a**p + b**p)**(1/p), where 1 adds
them up.
"""
RESIDENT = 0.5
"""The share of vector memory into which XLA copies an operand at once. The largest w played, 0.44
of it, was copied.
"""
WIDE = ("v6e", "tpu7x")  # chips whose matrix units are 256 x 256; those of the others are 128 x 128

REDUCE_SCATTER_TRAFFIC = 1.5
"""How many blocks a reduce-scatter moves in HBM for each block that it reduces; `fa.check.play`
assumes the same.
"""
ALL_REDUCED = 11.5e-6
"""If a device's share of a block takes this many seconds on a link, XLA reduces all sums to all
devices and takes a part. That doubles the transfers: always on rings of four, on rings of eight in
some layouts."""

# the seconds that a ring takes once beside products and hops
ONCE = {"xla": 9.3e-6, "pallas": 6.8e-6}
# the seconds that it takes for each block beside them
EACH_BLOCK = {"xla": 0.5e-6, "pallas": 1.2e-6}
# how many times a block's product reads w: some of w stays in vector memory, or comes during a hop
WEIGHT_READS = 0.65
# how many blocks the addition of an arrived partial sum moves in HBM, for each hop
SUM_TRAFFIC = 0.88
ACCUMULATOR_TRAFFIC = 1.33
"""How many times the float32 accumulator of dw moves in HBM for each product, where it leaves
vector memory.
"""
RESIDENT_TOGETHER = 0.35
"""If accumulators of dw, x and dy together need less than this share of vector memory, the
accumulators stay there. In plays of gradients on rings of four and eight, those that need up to
0.31 stayed, and those from 0.37 on left."""
# the share of a block's product that hides a hop: half of the product runs beside each half-block
HIDING_SHARE = 0.55
LOOPLESS = 4
"""The largest ring that is written out without a loop. There XLA sees that a block makes the same
hops again for dw.
"""
HIDING_SHARE_OF_PAIR = 0.79
"""The share of all products of a ring of two, gradients included, that hides hops of any trip."""

AFTER_KERNEL = 5.3e-6
"""The seconds by which XLA's product of what a kernel gathered takes longer than any other product
(v5e).
"""
RELAYOUT_TRAFFIC = 1.93
"""How many times dw moves in HBM on chips of `WIDE`, where XLA transposes and copies the result of
that product.
"""
ONE_TILE_EACH_WAY = 2 * 256 * 256
"""The largest block of partial sums, in elements, whose two tiles, one for each direction, take
turns on the links.
"""
LARGEST_BLOCK = 80 * 2**20
"""The largest block of partial sums, in elements, for which the kernel has semaphores, whatever its
sides. Among 5149 random shapes of 20 to 140 Mi elements, it refused no block below 86 Mi."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a trip takes beside its products, as one kernel on a v5e; elsewhere it scales with the
    HBM bandwidth.
    """

    entry: float  # seconds that are taken once, for the barrier, the first fetch and the last store
    step: float  # seconds for each block
    tail: float  # the share of a block's product that remains when the last transfer has arrived


KERNELS = {
    "gather": Kernel(0.8e-6, 1.4e-6, 0.30),
    "reduce": Kernel(0.5e-6, 1.2e-6, 0.51),
    "dw": Kernel(6.0e-6, 4.7e-6, 2.0),
}
V5E_HBM = 819e9


@dataclasses.dataclass(frozen=True)
class Trip:
    """One trip around the ring, or a product that needs none; m, k and n are those of the product
    of one block.
    """

    # what travels; see the head of this file
    kind: Literal["gather", "reduce", "dw", "gathered", "beside", "local"]
    sent: int  # the bytes of a block that travels
    m: int  # blocks follow each other along m
    k: int  # blocks of "dw" follow each other along k
    n: int
    # the seconds of a device's product before this trip, when XLA can fetch w into vector memory
    behind: float = 0.0
    # of several w, the part of each in n for "gather" and in k for "reduce"
    widths: tuple[int, ...] = ()
    quantized: str | None = None  # "int8" or "fp8" if both operands of the product have 8 bits

    def operand_bytes(self, itemsize: int) -> int:
        """Returns the bytes of an element of the operands; its results have `itemsize`."""
        return itemsize if self.quantized is None else 1

    @property
    def travels(self) -> bool:
        return self.kind in ("gather", "reduce", "dw")


def directions(ring: int) -> int:
    """Returns the number of directions in which blocks travel around a ring."""
    return 2 if ring > 2 else 1


def product(
    chip: Chip,
    trip: Trip,
    blocks: int,
    itemsize: int,
    backend: str,
    *,
    weights: float = 1.0,
    result: float | None = None,
) -> float:
    """Returns the seconds of the product of `blocks` blocks at once.

    It reads w `weights` times, and moves `result` bytes for its result, which by default is written
    once.
    """
    m = trip.m
    k = trip.k
    n = trip.n
    reduces = trip.kind == "reduce"
    # XLA multiplies with each of several w. Between them x, or the sums before and after an
    # addition, may leave.
    between = blocks * m * (n * 2 * 4 if reduces else k * trip.operand_bytes(itemsize))
    if len(trip.widths) > 1 and backend != "fused" and between > RESIDENT * chip.vmem_bytes:
        one = dataclasses.replace(trip, widths=())
        parts = [
            dataclasses.replace(one, k=w) if reduces else dataclasses.replace(one, n=w)
            for w in trip.widths
        ]
        each = (
            product(chip, part, blocks, itemsize, backend, weights=weights, result=result)
            for part in parts
        )
        return sum(each) + (len(parts) - 1) * 4 * blocks * m * n / hbm(chip) * reduces
    if trip.kind == "dw":
        k *= blocks
    else:
        m *= blocks
    moved = (m * k + weights * k * n) * trip.operand_bytes(itemsize) + (
        m * n * itemsize if result is None else result
    )
    flops = 2 * m * k * n / ((chip.rate(trip.quantized) or chip.flops) * EFFICIENCY[backend])
    return (flops**OVERLAP_EXPONENT + (moved / hbm(chip)) ** OVERLAP_EXPONENT) ** (
        1 / OVERLAP_EXPONENT
    )


def serial(chip: Chip, ring: int, trips: Sequence[Trip], itemsize: int) -> Cost:
    """Predicts backend "none". A ring of one device has nothing to transfer.

    ```
    gather, ring of 3 or more   all-gather beside the copy of w, product
    gather, ring of 2           copy of w, all-gather, product           on a pair, XLA's collective waits for the copy
    reduce                      product, reduce-scatter                  after the copy of w or x, where it comes first
    ```
    """
    compute = 0.0
    exposed = 0.0
    held = 0
    copy, weights = _first_operand(chip, ring, trips, itemsize)
    for trip in trips:
        compute += product(
            chip, trip, ring if trip.travels else 1, itemsize, "none", weights=weights
        )
        # for "dw", XLA sees that x was gathered before
        if ring == 1 or trip.kind not in ("gather", "reduce"):
            continue
        # Blocks travel in both directions, and the farthest comes from half of the ring away.
        seconds = ring // 2 * chip.hop_latency + (ring - 1) * trip.sent / (
            directions(ring) * chip.link_bandwidth
        )
        if trip.kind == "reduce":
            if ring > 2 and trip.sent / ring / chip.link_bandwidth >= ALL_REDUCED:
                seconds *= 2
            seconds += REDUCE_SCATTER_TRAFFIC * ring * trip.sent / hbm(chip)
        elif ring > 2:
            copy -= seconds
        exposed += seconds
        held = max(held, ring * trip.sent)
    return Cost(compute, exposed + max(0.0, copy), len(trips), held, 0.0)


def ring_of_blocks(
    chip: Chip, ring: int, trips: Sequence[Trip], itemsize: int, backend: str
) -> Cost:
    """Predicts "xla" or "pallas" on a ring of two devices or more.

    On rings of two, those of XLA are no loops and do not halve blocks: XLA copies w into vector
    memory first, and hides the hops of one trip behind the products of another.
    """
    compute = 0.0
    exposed = 0.0
    steps = 0
    held = 0
    hops = 0.0
    pair = backend == "xla" and ring == 2
    copy, weights = _first_operand(chip, ring, trips, itemsize) if pair else (0.0, WEIGHT_READS)
    for trip in trips:
        if not trip.travels:
            compute += product(chip, trip, 1, itemsize, backend)
            steps += 1
            continue
        result = _accumulator_bytes(chip, ring, trip, backend) if trip.kind == "dw" else None
        block = product(chip, trip, 1, itemsize, backend, weights=weights, result=result)
        compute += ring * block
        hop = hop_seconds(chip, trip.sent, directions(ring))
        hiding = HIDING_SHARE * block
        if trip.kind == "dw" and backend == "xla" and ring <= LOOPLESS:
            hop = 0.0
        if trip.kind == "reduce":
            compute += (ring - 1) * SUM_TRAFFIC * trip.sent / hbm(chip)
        # the second product of "reduce" is fused with the addition, which waits for the hop
        if pair:
            hiding = 0.0 if trip.kind == "reduce" else copy + block
        exposed += (ring - 1) * max(0.0, hop - hiding)
        hops += (ring - 1) * hop
        steps += ring
        held = max(held, 4 * trip.sent)
    compute += copy
    if pair and len(trips) > 1:
        exposed = min(exposed, max(0.0, hops - HIDING_SHARE_OF_PAIR * compute))
    return Cost(compute, exposed, steps, held, EACH_BLOCK[backend], 0.0 if pair else ONCE[backend])


def fused(chip: Chip, ring: int, trips: Sequence[Trip], itemsize: int) -> Cost:
    """Predicts "fused" on a ring of two devices or more; a kernel multiplies on one core of a
    device.
    """
    compute = 0.0
    exposed = 0.0
    steps = 0
    held = 0
    fixed = 0.0
    slower = V5E_HBM / chip.hbm_bandwidth
    rates = {
        name: rate / chip.cores
        for name in ("flops", "int8", "fp8")
        if (rate := getattr(chip, name))
    }
    core = dataclasses.replace(chip, **rates)
    waiting = 0.0  # the seconds in which the trip before waits for links
    for trip in trips:
        if trip.kind == "beside":
            compute += (seconds := product(core, trip, 1, itemsize, "fused"))
            exposed = exposed - min(seconds, waiting)
            waiting = max(0.0, waiting - seconds)
            continue
        if not trip.travels:
            compute += product(chip, trip, 1, itemsize, "none")
            steps += 1
            if trip.kind == "gathered":
                fixed += AFTER_KERNEL * slower
                compute += (
                    RELAYOUT_TRAFFIC * trip.m * trip.n * itemsize / hbm(chip)
                    if chip.name in WIDE
                    else 0.0
                )
            continue
        kernel = KERNELS[trip.kind]
        whole = _products_of_kernel(core, ring, trip, itemsize)
        step = kernel.step * slower
        # What is multiplied in the dtype of the operands travels in it.
        sent = trip.m * trip.k * trip.operand_bytes(itemsize) if trip.kind == "dw" else trip.sent
        hop = hop_seconds(chip, sent, directions(ring))
        if trip.kind == "reduce":  # what arrived is fetched, added to, and sent on
            hop = step + (
                hop_seconds(chip, trip.sent, 1) if trip.m * trip.n <= ONE_TILE_EACH_WAY else hop
            )
        busy = whole + ring * step
        compute += busy
        waiting = max(0.0, (ring - 1) * hop + kernel.tail * whole / ring - busy)
        exposed += waiting
        fixed += kernel.entry * slower
        steps += ring
        held = max(held, ring * sent)
    return Cost(compute, exposed, steps, held, 0.0, fixed)


def _first_operand(
    chip: Chip, ring: int, trips: Sequence[Trip], itemsize: int
) -> tuple[float, float]:
    """Predicts what XLA copies into vector memory before the first product: w, or x if nothing else
    comes first.

    Returns the seconds of the copy, and how many times each product reads w after it.
    """
    first = trips[0]
    itemsize = first.operand_bytes(itemsize)
    most = RESIDENT * chip.vmem_bytes
    w = first.k * first.n * itemsize
    x = ring * first.m * first.k * itemsize
    if w > most:
        return 0.0, 1.0
    alone = first.kind == "reduce" and len(trips) == 1
    return (x if alone and w < x <= most else w) / hbm(chip), 0.0


def _accumulator_bytes(chip: Chip, ring: int, trip: Trip, backend: str) -> float:
    """Returns the bytes that move for the float32 accumulator of dw with each block.

    Each half-block that arrives has a product of its own. On a ring of two, the result of the first
    product stands in memory until the second is added to it; on larger rings the old and the new
    accumulator stand there together. With "xla" the gathered x and dy take vector memory beside
    them.
    """
    accumulator = 4 * trip.m * trip.n
    products = 1 + (ring - 1) * directions(ring)
    leaves = (accumulator if ring == 2 else 2 * accumulator) > RESIDENT * chip.vmem_bytes
    if ring > 2 and backend == "xla":
        beside = ring * trip.sent * (1 + trip.n / trip.m)
        leaves |= beside + 2 * accumulator > RESIDENT_TOGETHER * chip.vmem_bytes
    return ACCUMULATOR_TRAFFIC * accumulator * products / ring if leaves else 0.0


def _products_of_kernel(chip: Chip, ring: int, trip: Trip, itemsize: int) -> float:
    """Returns the seconds of all products of a trip; the file of a kernel tells what it does not
    fetch again.
    """
    w = trip.k * trip.n * trip.operand_bytes(itemsize)
    reads: float = 1
    # the rows that each direction brought are contracted in whole passes of the matrix units
    if trip.kind == "dw":
        unit = directions(ring) * (256 if chip.name in WIDE else 128)
        trip = dataclasses.replace(trip, k=-(-trip.k // unit) * unit)
    elif (
        trip.kind == "reduce"
    ):  # w is fetched again for each block, unless XLA has put it into vector memory
        fetched = w <= RESIDENT * chip.vmem_bytes and w / chip.hbm_bandwidth <= trip.behind
        reads = 1 if fetched else ring
    elif (
        ring * trip.sent > RESIDENT * chip.vmem_bytes
    ):  # x streams through vector memory, and w with each block of it
        reads = WEIGHT_READS * ring
    elif ring * trip.sent + w > 0.75 * chip.vmem_bytes:
        reads = 2
    return product(chip, trip, ring, itemsize, "fused", weights=reads)
