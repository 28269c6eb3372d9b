"""The collective matmuls: one collective and one product, against rings of blocks, against one kernel.

An op and its gradients are a few passes, each of one kind (R devices, rows m of each):

```
gather    R - 1 hops of a block [m, k]; each of the R blocks is multiplied as it arrives
reduce    R - 1 hops of sums [m, n]; each of the R blocks is multiplied before its sums leave
local     a product that waits for nobody
```

A pass of a ring takes, for each hop, the longer of the product and the hop; one collective adds the two. What a product
takes is its FLOPs at the share of the peak that programs of the backend reach, or its bytes, whichever is longer. Sums
over other mesh axes, of gradients say, are not counted: every backend has them.
"""

import dataclasses
import math
from typing import Literal

from flaxasync.costs.cost import Cost, Shape, hop_seconds
from flaxasync.hardware import Chip

EFFICIENCY = {"none": 0.975, "xla": 0.91, "pallas": 0.88, "fused": 0.965}
"""Share of the peak FLOP/s that large products reach, played on v5e: benchmarks/plan.py."""
STEP_SECONDS = {"none": 1e-6, "xla": 2e-6, "pallas": 3e-6, "fused": 0.8e-6}
"""What one more block costs, likewise."""
ENTRY_SECONDS = {"none": 0.0, "xla": 0.0, "pallas": 0.0, "fused": 5e-6}
"""What a pass costs once: the barrier of a kernel, its first fetch and last store; likewise."""

READ_AGAIN = {"xla": 0.45, "pallas": 0.45, "fused": 0.6}
"""Share of reading w that each block of a ring waits for: some of w stays in vector memory or comes during a hop;
fitted to the plays of benchmarks/plan.py, as are the two above."""
LARGEST_BLOCK = 80 * 2**20
"""Elements of a block of sums that the fused kernel has semaphores for, whatever its sides: of 1500 random shapes the
smallest block that it refused had 85.7 Mi."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One trip around the ring, or a product that needs none.

    Attributes:
      kind: what travels.
      sent: bytes of a block that travels.
      m, k, n: sides of the product of one block.
      added: bytes of sums in memory that each block's product is added to; a ring reads and writes them every time.
    """

    kind: Literal["gather", "reduce", "local"]
    sent: int
    m: int
    k: int
    n: int
    added: int = 0


def all_gather_matmul(
    chip: Chip, ring: int, x: Shape, *ws: Shape, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """x [..., m, k] and each w [k, n], of one device."""
    rows, k, n = math.prod(x[:-1]), x[-1], sum(w[1] for w in ws)
    passes = [Pass("gather", rows * k * itemsize, rows, k, n)]
    if backward:
        passes.append(Pass("reduce", rows * k * itemsize, rows, n, k))
        passes.append(Pass("gather", rows * k * itemsize, k, rows, n, added=4 * k * n))
    return _costs(chip, ring, passes, itemsize, kernels)


def matmul_reduce_scatter(
    chip: Chip, ring: int, x: Shape, w: Shape, *, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """x [..., R*m, k] and w [k, n], of one device; where several are summed, k is the sum of theirs."""
    rows, (k, n) = math.prod(x[:-1]) // ring, w
    passes = [Pass("reduce", rows * n * itemsize, rows, k, n)]
    if backward:
        passes.append(Pass("gather", rows * n * itemsize, rows, n, k))
        passes.append(Pass("local", 0, k, ring * rows, n))
    return _costs(chip, ring, passes, itemsize, kernels)


def matmul_all_reduce(
    chip: Chip, ring: int, x: Shape, w: Shape, *, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """x [..., m, k] and w [k, n], of one device: the sums are scattered, then gathered; the gradients are local."""
    rows, (k, n) = math.prod(x[:-1]), w
    share = -(-rows // ring)
    passes = [Pass("reduce", share * n * itemsize, share, k, n)]
    if backward:
        passes += [Pass("local", 0, rows, n, k), Pass("local", 0, k, rows, n)]
    again = (ring - 1) * hop_seconds(chip, share * n * itemsize, _directions(ring))
    costs = _costs(chip, ring, passes, itemsize, kernels)
    return {name: dataclasses.replace(cost, exposed=cost.exposed + again) for name, cost in costs.items()}


def _costs(chip: Chip, ring: int, passes: list[Pass], itemsize: int, kernels: bool) -> dict[str, Cost]:
    kernels = kernels and not any(one.kind == "reduce" and one.m * one.n > LARGEST_BLOCK for one in passes)
    names = ("none",) if ring == 1 else ("none", "xla", "pallas", "fused") if kernels else ("none", "xla", "pallas")
    return {name: _cost(chip, ring, passes, itemsize, name) for name in names}


def _cost(chip: Chip, ring: int, passes: list[Pass], itemsize: int, backend: str) -> Cost:
    compute, exposed, steps, held, directions = 0.0, 0.0, 0, 0, _directions(ring)
    for one in passes:
        blocks = 1 if one.kind == "local" else ring
        hop = hop_seconds(chip, one.sent, directions)
        if backend == "none" or one.kind == "local":
            compute += _product(chip, one, blocks, itemsize, backend)
            exposed += 0.0 if one.added else (blocks - 1) * hop  # dw: XLA sees that x was gathered before
            if one.kind == "reduce" and ring > 1:  # XLA's own reads two blocks and writes one, every hop
                exposed += 1.5 * ring * one.sent / (chip.hbm_bandwidth * chip.hbm_efficiency)
            held = max(held, blocks * one.sent)
            steps += 1
        else:
            block = _product(chip, one, 1, itemsize, backend, weights=READ_AGAIN[backend])
            if backend == "fused" and one.kind == "gather" and ring * one.sent <= chip.vmem_bytes / 2:
                # x stays in vector memory, and so does w, where it fits; if not it comes twice
                fits = ring * one.sent + one.k * one.n * itemsize <= 0.75 * chip.vmem_bytes
                block = _product(chip, one, ring, itemsize, backend, weights=1 if fits else 2) / ring
            compute += ring * block
            if one.kind == "reduce" and backend != "fused":  # what came is added in a pass of its own, after the hop
                compute += (ring - 1) * 3 * one.sent / (chip.hbm_bandwidth * chip.hbm_efficiency)
            if one.added and backend == "xla" and ring == 2:
                hop = 0.0  # a ring of two is no loop: XLA sees that x made this one hop before
            exposed += (ring - 1) * max(0.0, hop - block) + ENTRY_SECONDS[backend]
            held = max(held, ring * one.sent if backend == "fused" else 4 * one.sent)
            steps += ring
    return Cost(compute, exposed, steps, held, STEP_SECONDS[backend], {"directions": directions})


def _product(chip: Chip, one: Pass, blocks: int, itemsize: int, backend: str, weights: float = 1.0) -> float:
    """Seconds of the product of so many blocks at once; w is read so many times."""
    m, k, n = one.m, one.k, one.n
    if one.added:  # x.T @ dy: blocks follow each other along the contraction
        k *= blocks
    else:
        m *= blocks
    moved = (m * k + weights * k * n + m * n) * itemsize
    if one.added and backend in ("xla", "pallas"):
        moved += 2 * one.added
    flops = 2 * m * k * n / (chip.flops * EFFICIENCY[backend])
    return max(flops, moved / (chip.hbm_bandwidth * chip.hbm_efficiency))


def _directions(ring: int) -> int:
    return 2 if ring > 2 else 1
