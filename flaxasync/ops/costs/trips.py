"""The trips that a collective matmul is made of, and what all of its backends take for a product and a collective.

An op and its gradients are a few trips around the ring, each of one kind (R devices, rows m of each):

```
gather     R - 1 hops of a block [m, k]; each of the R blocks is multiplied as it arrives
reduce     R - 1 hops of partial sums [m, n]; each of the R blocks is multiplied before its sums leave
dw         R - 1 hops of a block as in gather; its rows are contracted: the weight gradient x.T @ dy
gathered   a product of all blocks, which a trip before has gathered; nothing travels
local      a product that needs nothing from other devices; nothing travels
```

A product takes time for its FLOPs and for its bytes, and the longer of the two hides most of the other. Where a trip
has several w, as those of queries, keys and values, XLA multiplies with each of them. What does not stay in vector
memory moves again: a gathered x, or the float32 sum of the products. A kernel multiplies with all at once. Constants
without another source are fitted to played programs (benchmarks/plan.py); plays near the best of their case weigh most.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from flaxasync.hardware import Chip

EFFICIENCY = {"none": 0.973, "xla": 0.868, "pallas": 0.868, "fused": 0.942}
"""The share of the peak FLOP/s that large products reach."""
OVERLAP_EXPONENT = 2.76
"""How far the time of FLOPs and that of bytes hide each other in a product: the exponent p of (a**p + b**p)**(1/p).
With 1 they would add up; with infinity the longer would hide the other."""
RESIDENT = 0.5
"""The share of vector memory into which XLA copies an operand at once. The largest w played, 0.44 of it, was copied."""
WIDE = ("v6e", "tpu7x")
"""Chips whose matrix units are 256 x 256; those of the others are 128 x 128."""


@dataclasses.dataclass(frozen=True)
class Trip:
    """One trip around the ring, or a product that needs none.

    Attributes:
      kind: What travels; see the head of this file.
      sent: The bytes of a block that travels.
      m: The rows of the product of one block. Blocks follow each other along m.
      k: The contraction of the product of one block. Blocks of "dw" follow each other along k.
      n: The columns of the product of one block.
      behind: The seconds of one device's product before this trip, during which XLA can fetch w into vector memory.
      widths: Where the trip has several w, the part of each in n for "gather" and in k for "reduce".
    """

    kind: Literal["gather", "reduce", "dw", "gathered", "local"]
    sent: int
    m: int
    k: int
    n: int
    behind: float = 0.0
    widths: tuple[int, ...] = ()

    @property
    def travels(self) -> bool:
        """Whether anything travels."""
        return self.kind not in ("gathered", "local")


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

    It reads w `weights` times, and moves `result` bytes for its result, which by default is written once.
    """
    if backend != "fused" and _moves_again(chip, trip, blocks, itemsize):
        one = dataclasses.replace(trip, widths=())
        reduced = trip.kind == "reduce"
        parts = [dataclasses.replace(one, k=w) if reduced else dataclasses.replace(one, n=w) for w in trip.widths]
        each = (product(chip, part, blocks, itemsize, backend, weights=weights, result=result) for part in parts)
        summed = (len(parts) - 1) * 4 * blocks * trip.m * trip.n / hbm(chip) if reduced else 0.0
        return sum(each) + summed
    m, k, n = trip.m, trip.k, trip.n
    if trip.kind == "dw":
        k *= blocks
    else:
        m *= blocks
    moved = (m * k + weights * k * n) * itemsize + (m * n * itemsize if result is None else result)
    flops = 2 * m * k * n / (chip.flops * EFFICIENCY[backend])
    return (flops**OVERLAP_EXPONENT + (moved / hbm(chip)) ** OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT)


def _moves_again(chip: Chip, trip: Trip, blocks: int, itemsize: int) -> bool:
    """Says whether something leaves vector memory between several w: x, or the sums before and after an addition."""
    if len(trip.widths) < 2:
        return False
    side, held = (trip.n, 2 * 4) if trip.kind == "reduce" else (trip.k, itemsize)
    return blocks * trip.m * side * held > RESIDENT * chip.vmem_bytes


def first_operand(chip: Chip, ring: int, trips: Sequence[Trip], itemsize: int) -> tuple[float, float]:
    """Predicts what XLA copies into vector memory before the first product: w, or x if nothing else comes first.

    Returns:
      The seconds of the copy, and how many times each product reads w after it.
    """
    first = trips[0]
    w, x, most = first.k * first.n * itemsize, ring * first.m * first.k * itemsize, RESIDENT * chip.vmem_bytes
    if w > most:
        return 0.0, 1.0
    alone = first.kind == "reduce" and len(trips) == 1
    return (x if alone and w < x <= most else w) / hbm(chip), 0.0


def hbm(chip: Chip) -> float:
    """Returns the bytes a second that a program moves to and from HBM."""
    return chip.hbm_bandwidth * chip.hbm_efficiency


def directions(ring: int) -> int:
    """Returns the number of directions in which blocks travel around a ring."""
    return 2 if ring > 2 else 1
