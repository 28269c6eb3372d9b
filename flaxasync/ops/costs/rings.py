"""Backends "xla" and "pallas" of the collective matmuls: products of blocks, each beside a hop.

For each hop a ring takes the longer of the hop and of that part of the product which hides it. On rings of two, those
of XLA are no loops and do not halve blocks: XLA copies w into vector memory first, and hides the hops of one trip
behind the products of another.
"""

from collections.abc import Sequence

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, hop_seconds
from flaxasync.ops.costs.trips import RESIDENT, Trip, directions, first_operand, hbm, product

ONCE = {"xla": 9.3e-6, "pallas": 6.8e-6}
"""The seconds that a program takes once beside products and hops."""
EACH_BLOCK = {"xla": 0.5e-6, "pallas": 1.2e-6}
"""The seconds that it takes for each block beside them."""
WEIGHT_READS = 0.65
"""How many times a block's product reads w: some of w stays in vector memory, or comes during a hop."""
SUM_TRAFFIC = 0.88
"""How many blocks the addition of an arrived partial sum moves in HBM, for each hop."""
ACCUMULATOR_TRAFFIC = 1.33
"""How many times the float32 accumulator of dw moves in HBM for each product, where it does not stay in vector memory.
Reading all of it and writing all of it would be 2."""
RESIDENT_TOGETHER = 0.35
"""The share of vector memory in which the accumulators of dw stay with the gathered x and dy. Of gradients on rings of
four and eight, those that need up to 0.31 of it were played to move little, and those from 0.37 on to move."""
HIDING_SHARE = 0.55
"""The share of a block's product that hides a hop: half of the product runs beside each half-block."""
LOOPLESS = 4
"""The largest ring that is written out without a loop. There XLA sees that a block makes the same hops again for dw."""
HIDING_SHARE_OF_PAIR = 0.79
"""The share of all products of a ring of two, gradients included, that hides hops of any trip."""


def ring_of_blocks(chip: Chip, ring: int, trips: Sequence[Trip], itemsize: int, backend: str) -> Cost:
    """Predicts the trips of one op on a ring of two devices or more."""
    compute, exposed, steps, held, hops = 0.0, 0.0, 0, 0, 0.0
    pair = backend == "xla" and ring == 2
    copy, weights = first_operand(chip, ring, trips, itemsize) if pair else (0.0, WEIGHT_READS)
    for trip in trips:
        if not trip.travels:
            compute += product(chip, trip, 1, itemsize, backend)
            steps += 1
            continue
        result = _accumulator_bytes(chip, ring, trip, backend)
        block = product(chip, trip, 1, itemsize, backend, weights=weights, result=result)
        compute += ring * block
        hop, hiding = hop_seconds(chip, trip.sent, directions(ring)), HIDING_SHARE * block
        if trip.kind == "dw" and backend == "xla" and ring <= LOOPLESS:
            hop = 0.0
        if trip.kind == "reduce":
            compute += (ring - 1) * SUM_TRAFFIC * trip.sent / hbm(chip)
        if pair:  # the second product of "reduce" is fused with the addition, which waits for the hop
            hiding = 0.0 if trip.kind == "reduce" else copy + block
        exposed += (ring - 1) * max(0.0, hop - hiding)
        hops += (ring - 1) * hop
        steps += ring
        held = max(held, 4 * trip.sent)
    compute += copy
    if pair and len(trips) > 1:
        exposed = min(exposed, max(0.0, hops - HIDING_SHARE_OF_PAIR * compute))
    return Cost(compute, exposed, steps, held, EACH_BLOCK[backend], 0.0 if pair else ONCE[backend])


def _accumulator_bytes(chip: Chip, ring: int, trip: Trip, backend: str) -> float | None:
    """Returns the bytes that move for the float32 accumulator of dw with each block; None for other results.

    Each half-block that arrives has a product of its own. On a ring of two, the result of the first product stands in
    memory until the second is added to it; on larger rings the old and the new accumulator stand there together. With
    "xla" the gathered x and dy take vector memory beside them.
    """
    if trip.kind != "dw":
        return None
    accumulator, products = 4 * trip.m * trip.n, 1 + (ring - 1) * directions(ring)
    resident = RESIDENT * chip.vmem_bytes
    if ring == 2:
        leaves = accumulator > resident
    else:
        leaves = 2 * accumulator > resident
        if backend == "xla":
            beside = ring * trip.sent * (1 + trip.n / trip.m)
            leaves |= beside + 2 * accumulator > RESIDENT_TOGETHER * chip.vmem_bytes
    return ACCUMULATOR_TRAFFIC * accumulator * products / ring if leaves else 0.0
