"""What the passes of a collective matmul are, and what all of its backends take for a product and a collective.

An op and its gradients are a few passes, each of one kind (R devices, rows m of each):

```
gather    R - 1 hops of a block [m, k]; each of the R blocks is multiplied as it arrives
reduce    R - 1 hops of sums [m, n]; each of the R blocks is multiplied before its sums leave
outer     R - 1 hops of a block as of gather; its rows are contracted: dw = x.T @ dy
gathered  a product of all blocks, which a pass before has gathered
local     a product that waits for nobody
```

A product takes its FLOPs and its bytes, of which the longer hides most of the other. Constants are fitted to played
programs (benchmarks/plan.py) where they name no other source; plays near the best of their case weigh most.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from flaxasync.hardware import Chip

EFFICIENCY = {"none": 0.973, "xla": 0.868, "pallas": 0.868, "fused": 0.942}
"""Share of the peak FLOP/s that large products reach."""
TOGETHER = 2.76
"""Exponent of FLOPs and bytes of a product: 1 would add them, a large one takes the longer."""
RESIDENT = 0.5
"""Of vector memory: what XLA copies there at once. The largest w that was played, 0.44 of it, was copied."""
WIDE = ("v6e", "tpu7x")
"""Chips whose matrix units are 256 x 256; those of the others are 128 x 128."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One trip around the ring, or a product that needs none.

    Attributes:
      kind: what travels.
      sent: bytes of a block that travels.
      m, k, n: sides of the product of one block; blocks follow each other along m, of "outer" along k.
      behind: seconds of one device's product before this pass, during which XLA can fetch w into vector memory.
    """

    kind: Literal["gather", "reduce", "outer", "gathered", "local"]
    sent: int
    m: int
    k: int
    n: int
    behind: float = 0.0

    @property
    def travels(self) -> bool:
        return self.kind not in ("gathered", "local")


def product(
    chip: Chip,
    one: Pass,
    blocks: int,
    itemsize: int,
    backend: str,
    *,
    weights: float = 1.0,
    result: float | None = None,
) -> float:
    """Seconds of the product of so many blocks at once.

    Args:
      chip: whose rates.
      one: the pass.
      blocks: how many are multiplied at once.
      itemsize: bytes of an element.
      backend: whose share of the peak.
      weights: how many times w is read.
      result: bytes that move for the result; by default it is written once.
    """
    m, k, n = one.m, one.k, one.n
    if one.kind == "outer":
        k *= blocks
    else:
        m *= blocks
    moved = (m * k + weights * k * n) * itemsize + (m * n * itemsize if result is None else result)
    flops = 2 * m * k * n / (chip.flops * EFFICIENCY[backend])
    return (flops**TOGETHER + (moved / hbm(chip)) ** TOGETHER) ** (1 / TOGETHER)


def first_operand(chip: Chip, ring: int, passes: Sequence[Pass], itemsize: int) -> tuple[float, float]:
    """What XLA copies into vector memory before a program's first product: w, or x where nothing else comes first.

    Returns:
      Seconds of the copy, and how often each product reads w after it.
    """
    first = passes[0]
    w, x, most = first.k * first.n * itemsize, ring * first.m * first.k * itemsize, RESIDENT * chip.vmem_bytes
    if w > most:
        return 0.0, 1.0
    alone = first.kind == "reduce" and len(passes) == 1
    return (x if alone and w < x <= most else w) / hbm(chip), 0.0


def hbm(chip: Chip) -> float:
    """Bytes a second."""
    return chip.hbm_bandwidth * chip.hbm_efficiency


def directions(ring: int) -> int:
    return 2 if ring > 2 else 1
