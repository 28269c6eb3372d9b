"""Backends "xla" and "pallas" of the collective matmuls: products of blocks, each beside a hop.

For each hop a ring takes the longer of the hop and of what the product hides of it. XLA's own rings of two are no
loops and cut no blocks: w is copied into vector memory first, and the hops of one pass hide behind the products of
another.
"""

import dataclasses
from collections.abc import Sequence

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, hop_seconds
from flaxasync.ops.costs.passes import RESIDENT, Pass, directions, first_operand, hbm, product


@dataclasses.dataclass(frozen=True)
class Overhead:
    """What a program takes beside products and hops.

    Attributes:
      program: once (s).
      step: for each block (s).
    """

    program: float
    step: float


OVERHEAD = {"xla": Overhead(9.3e-6, 0.5e-6), "pallas": Overhead(6.8e-6, 1.2e-6)}
READ_AGAIN = 0.65
"""Of w, for each block: some of it stays in vector memory, or comes during a hop."""
ADDED = 0.88
"""Blocks that the sum of what came moves, for each hop."""
SUMS_MOVED = 1.33
"""Float32 sums of dw that each product reads and writes, where they do not stay in vector memory."""
BESIDE = 0.55
"""Of the product of a block: what hides a hop, of which half goes each way, beside half of the product."""
LOOPLESS = 4
"""Devices: a ring of so many is written out, and XLA sees that a block makes the same hops again for dw."""
ACROSS = 0.79
"""Of all products of a ring of two and its gradients: what hides hops of any pass."""


def ring_of_blocks(chip: Chip, ring: int, passes: Sequence[Pass], itemsize: int, backend: str) -> Cost:
    """Predicts the passes of one op on a ring of two devices or more."""
    compute, exposed, steps, held, hops = 0.0, 0.0, 0, 0, 0.0
    pair, overhead = backend == "xla" and ring == 2, OVERHEAD[backend]
    copy, weights = first_operand(chip, ring, passes, itemsize) if pair else (0.0, READ_AGAIN)
    for one in passes:
        if not one.travels:
            compute += product(chip, one, 1, itemsize, backend)
            steps += 1
            continue
        block = product(chip, one, 1, itemsize, backend, weights=weights, result=_sums(chip, ring, one))
        compute += ring * block
        hop, beside = hop_seconds(chip, one.sent, directions(ring)), BESIDE * block
        if one.kind == "outer" and backend == "xla" and ring <= LOOPLESS:
            hop = 0.0
        if one.kind == "reduce":
            compute += (ring - 1) * ADDED * one.sent / hbm(chip)
        if pair:  # the second product of "reduce" is fused with the sum, which waits for the hop
            beside = 0.0 if one.kind == "reduce" else copy + block
        exposed += (ring - 1) * max(0.0, hop - beside)
        hops += (ring - 1) * hop
        steps += ring
        held = max(held, 4 * one.sent)
    compute += copy
    if pair and len(passes) > 1:
        exposed = min(exposed, max(0.0, hops - ACROSS * compute))
    program = 0.0 if pair else overhead.program
    return Cost(compute, exposed, steps, held, overhead.step, {"directions": directions(ring)}, program)


def _sums(chip: Chip, ring: int, one: Pass) -> float | None:
    """Bytes of float32 sums of dw, for each block; each half of a block that came has a product of its own.

    Of a ring of two, the sums of the first product stand until the second is added; of others, old and new ones.
    """
    if one.kind != "outer":
        return None
    sums, products = 4 * one.m * one.n, 1 + (ring - 1) * directions(ring)
    standing = sums if ring == 2 else 2 * sums
    return 0.0 if standing <= RESIDENT * chip.vmem_bytes else SUMS_MOVED * sums * products / ring
