"""Backend "fused" of the collective matmuls: one kernel for each trip around the ring.

A kernel takes the longer of all its products and all its hops, then the end of one block that nothing hides, and a
little for each block. Its file in `flaxasync.kernels` tells what it keeps in vector memory and does not fetch again.
Where a device has several cores, as on v5p, a kernel multiplies on one of them.
"""

import dataclasses
from collections.abc import Sequence

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, hop_seconds
from flaxasync.ops.costs.trips import RESIDENT, WIDE, Trip, directions, hbm, product


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a trip takes beside its products, as one kernel on a v5e.

    Attributes:
      entry: The seconds that are taken once, for the barrier, the first fetch and the last store.
      step: The seconds for each block.
      tail: The share of a block's product that remains when the last transfer has arrived.
    """

    entry: float
    step: float
    tail: float


KERNELS = {
    "gather": Kernel(0.8e-6, 1.4e-6, 0.30),
    "reduce": Kernel(0.5e-6, 1.2e-6, 0.51),
    "dw": Kernel(6.0e-6, 4.7e-6, 2.0),
}
KERNELS_MEASURED_AT = 819e9
"""The HBM bandwidth of v5e, in bytes a second. What kernels take beside products scales with it."""
AFTER_KERNEL = 5.3e-6
"""The seconds by which XLA's product of what a kernel gathered takes longer than any other product (v5e)."""
RELAYOUT_TRAFFIC = 1.93
"""How many times dw moves in HBM on chips with wide matrix units, where XLA transposes and copies the result of that
product."""
STREAMED_WEIGHT_READS = 0.65
"""How many times each block of x reads w, where x is larger than half of vector memory. Taken from the rings: in all
such plays the products took longer than the bytes."""
ONE_TILE_EACH_WAY = 2 * 256 * 256
"""The largest block of partial sums, in elements, that has a single tile for each direction. The two tiles then take
turns on the links."""
LARGEST_BLOCK = 80 * 2**20
"""The largest block of partial sums, in elements, for which the kernel has semaphores, whatever its sides. Among 1500
random shapes the smallest block that it refused had 85.7 Mi elements."""


def serves(trips: Sequence[Trip]) -> bool:
    """Says whether the kernels can take these blocks."""
    return not any(trip.kind == "reduce" and trip.m * trip.n > LARGEST_BLOCK for trip in trips)


def kernels(chip: Chip, ring: int, trips: Sequence[Trip], itemsize: int) -> Cost:
    """Predicts the trips of one op on a ring of two devices or more."""
    compute, exposed, steps, held, fixed = 0.0, 0.0, 0, 0, 0.0
    slower = KERNELS_MEASURED_AT / chip.hbm_bandwidth
    core = dataclasses.replace(chip, flops=chip.flops / chip.cores)
    for trip in trips:
        if not trip.travels:
            compute += product(chip, trip, 1, itemsize, "none")
            steps += 1
            if trip.kind == "gathered":
                fixed += AFTER_KERNEL * slower
                compute += RELAYOUT_TRAFFIC * trip.m * trip.n * itemsize / hbm(chip) if chip.name in WIDE else 0.0
            continue
        kernel, whole = KERNELS[trip.kind], _products(core, ring, trip, itemsize)
        step = kernel.step * slower
        hop = hop_seconds(chip, trip.sent, directions(ring))
        if trip.kind == "reduce":  # what arrived is fetched, added to, and sent on
            hop = step + (hop_seconds(chip, trip.sent, 1) if trip.m * trip.n <= ONE_TILE_EACH_WAY else hop)
        busy = whole + ring * step
        compute += busy
        exposed += max(0.0, (ring - 1) * hop + kernel.tail * whole / ring - busy)
        fixed += kernel.entry * slower
        steps += ring
        held = max(held, ring * trip.sent)
    return Cost(compute, exposed, steps, held, 0.0, fixed)


def _products(chip: Chip, ring: int, trip: Trip, itemsize: int) -> float:
    """Returns the seconds of all products of a trip."""
    w = trip.k * trip.n * itemsize
    if trip.kind == "dw":  # the rows that each direction brought are contracted in whole passes of the matrix units
        unit = directions(ring) * (256 if chip.name in WIDE else 128)
        rows = -(-trip.k // unit) * unit
        return product(chip, dataclasses.replace(trip, k=rows), ring, itemsize, "fused")
    if trip.kind == "reduce":  # w is fetched again for each block, unless XLA has put it into vector memory
        fetched = w <= RESIDENT * chip.vmem_bytes and w / chip.hbm_bandwidth <= trip.behind
        return product(chip, trip, ring, itemsize, "fused", weights=1 if fetched else ring)
    if ring * trip.sent > RESIDENT * chip.vmem_bytes:  # x streams through vector memory, and w with each block of it
        return product(chip, trip, ring, itemsize, "fused", weights=ring * STREAMED_WEIGHT_READS)
    reads = 1 if ring * trip.sent + w <= 0.75 * chip.vmem_bytes else 2
    return product(chip, trip, ring, itemsize, "fused", weights=reads)
