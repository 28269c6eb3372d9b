"""Backend "fused" of the collective matmuls: a kernel for each pass that travels.

A kernel takes the longer of all its products and all its hops, the end of a block that nothing hides, and a little for
each block. What it does not fetch again is told by its file in `flaxasync.kernels`.
"""

import dataclasses
from collections.abc import Sequence

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, hop_seconds
from flaxasync.ops.costs.passes import RESIDENT, WIDE, Pass, directions, hbm, product


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a pass takes beside its products as one kernel on a v5e.

    Attributes:
      entry: once: the barrier, the first fetch, the last store (s).
      step: for each block (s).
      tail: of a block's product, what remains when the last transfer is there.
    """

    entry: float
    step: float
    tail: float


KERNELS = {
    "gather": Kernel(0.8e-6, 1.4e-6, 0.30),
    "reduce": Kernel(0.5e-6, 1.2e-6, 0.51),
    "outer": Kernel(6.0e-6, 4.7e-6, 2.0),
}
KERNELS_OF = 819e9
"""Bytes/s of v5e's HBM: what kernels take beside products goes with it."""
AFTER_KERNEL = 5.3e-6
"""Seconds that XLA's product of what a kernel gathered takes longer than any (v5e)."""
LAID_OUT = 1.93
"""Of that product on chips with wide matrix units: what is moved to lay dw out anew. XLA transposes it, and copies."""
STREAMED = 0.65
"""Of w, for each block of x where x is larger than half of vector memory. As of rings: in all such plays the products
took longer than the bytes."""
TILE_EACH_WAY = 2 * 256 * 256
"""Elements of a block of sums that has one tile for each way: they take turns on the links (kernels/reduce_walk.py)."""
LARGEST_BLOCK = 80 * 2**20
"""Elements of a block of sums that the kernel has semaphores for, whatever its sides: of 1500 random shapes the
smallest block that it refused had 85.7 Mi."""


def serves(passes: Sequence[Pass]) -> bool:
    """Whether the kernels can take these blocks."""
    return not any(one.kind == "reduce" and one.m * one.n > LARGEST_BLOCK for one in passes)


def kernels(chip: Chip, ring: int, passes: Sequence[Pass], itemsize: int) -> Cost:
    """Predicts the passes of one op on a ring of two devices or more."""
    compute, exposed, steps, held, fixed = 0.0, 0.0, 0, 0, 0.0
    slower = KERNELS_OF / chip.hbm_bandwidth
    for one in passes:
        if not one.travels:
            compute += product(chip, one, 1, itemsize, "none")
            steps += 1
            if one.kind == "gathered":
                fixed += AFTER_KERNEL * slower
                compute += LAID_OUT * one.m * one.n * itemsize / hbm(chip) if chip.name in WIDE else 0.0
            continue
        kernel, whole, step = KERNELS[one.kind], _products(chip, ring, one, itemsize), KERNELS[one.kind].step * slower
        hop = hop_seconds(chip, one.sent, directions(ring))
        if one.kind == "reduce":  # what came is fetched, added, and sent on
            hop = step + (hop_seconds(chip, one.sent, 1) if one.m * one.n <= TILE_EACH_WAY else hop)
        busy = whole + ring * step
        compute += busy
        exposed += max(0.0, (ring - 1) * hop + kernel.tail * whole / ring - busy)
        fixed += kernel.entry * slower
        steps += ring
        held = max(held, ring * one.sent)
    return Cost(compute, exposed, steps, held, 0.0, {"directions": directions(ring)}, fixed)


def _products(chip: Chip, ring: int, one: Pass, itemsize: int) -> float:
    """Seconds of all products of a pass."""
    w = one.k * one.n * itemsize
    if one.kind == "outer":  # rows that came one way are contracted, by whole matrix units
        ways, unit = directions(ring), 256 if chip.name in WIDE else 128
        rows = -(-one.k // (ways * unit)) * unit * ways
        return product(chip, dataclasses.replace(one, k=rows), ring, itemsize, "fused")
    if one.kind == "reduce":  # w is fetched again for each block, unless XLA has put it into vector memory
        fetched = w <= RESIDENT * chip.vmem_bytes and w / chip.hbm_bandwidth <= one.behind
        return product(chip, one, ring, itemsize, "fused", weights=1 if fetched else ring)
    if ring * one.sent > RESIDENT * chip.vmem_bytes:  # x streams, and w with each block
        return product(chip, one, ring, itemsize, "fused", weights=ring * STREAMED)
    return product(
        chip, one, ring, itemsize, "fused", weights=1 if ring * one.sent + w <= 0.75 * chip.vmem_bytes else 2
    )
