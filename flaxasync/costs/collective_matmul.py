"""The collective matmuls: one collective and one product, against rings of blocks, against one kernel.

An op and its gradients are a few passes, each of one kind (R devices, rows m of each):

```
gather    R - 1 hops of a block [m, k]; each of the R blocks is multiplied as it arrives
reduce    R - 1 hops of sums [m, n]; each of the R blocks is multiplied before its sums leave
outer     R - 1 hops of a block as of gather; its rows are contracted: dw = x.T @ dy
gathered  a product of all blocks, which a pass before has gathered
local     a product that waits for nobody
```

"none" moves first, or last, and multiplies at once. A ring takes, for each hop, the longer of the product and the hop.
A kernel takes the longer of all products and all hops, and the end of a block that nothing hides. A product takes its
FLOPs and its bytes, of which the longer hides most of the other. Sums over other mesh axes, of gradients say, are not
counted: every backend has them.
"""

import dataclasses
import math
from typing import Literal

from flaxasync.costs.cost import Cost, Shape, hop_seconds
from flaxasync.hardware import Chip


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What a backend's programs take beyond the data sheet, fitted to the plays of benchmarks/plan.py.

    Attributes:
      efficiency: share of the peak FLOP/s that large products reach.
      program: once (s).
      step: for each block (s).
    """

    efficiency: float
    program: float
    step: float


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a pass takes beside its products as one kernel on a v5e, fitted likewise.

    Attributes:
      entry: once: the barrier, the first fetch, the last store (s).
      step: for each block (s).
      tail: of a block's product, what remains when the last transfer is there.
    """

    entry: float
    step: float
    tail: float


FITTED = {
    "none": Fitted(0.87, 0.0, 0.0),
    "xla": Fitted(0.85, 12.7e-6, 0.7e-6),
    "pallas": Fitted(0.85, 11.3e-6, 1.2e-6),
    "fused": Fitted(0.977, 0.0, 0.0),
}
KERNELS = {
    "gather": Kernel(1.0e-6, 1.5e-6, 0.26),
    "reduce": Kernel(5.0e-6, 1.1e-6, 0.35),
    "outer": Kernel(4.3e-6, 6.0e-6, 1.2),
    "gathered": Kernel(22e-6, 0.0, 0.0),  # XLA's product of what a kernel kept
}
KERNELS_OF = 819e9  # bytes/s of v5e's HBM: what kernels take beside products goes with it
TOGETHER = 3.0  # exponent: 1 would add FLOPs and bytes of a product, a large one takes the longer
READ_AGAIN = 0.65  # of w, for each block of a ring: some stays in vector memory or comes during a hop
SUMS_READ = 1.9  # blocks that XLA's own reduce-scatter moves for each block
ADDED = 3.0  # blocks that a ring's sum of what came moves
DW_MOVED = 1.1  # float32 sums of dw that a ring moves for each block
LARGEST_BLOCK = 80 * 2**20
"""Elements of a block of sums that the fused kernel has semaphores for, whatever its sides: of 1500 random shapes the
smallest block that it refused had 85.7 Mi."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One trip around the ring, or a product that needs none.

    Attributes:
      kind: what travels.
      sent: bytes of a block that travels.
      m, k, n: sides of the product of one block; blocks follow each other along m, of "outer" along k.
    """

    kind: Literal["gather", "reduce", "outer", "gathered", "local"]
    sent: int
    m: int
    k: int
    n: int


def all_gather_matmul(
    chip: Chip, ring: int, x: Shape, *ws: Shape, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """x [..., m, k] and each w [k, n], of one device."""
    rows, k, n = math.prod(x[:-1]), x[-1], sum(w[1] for w in ws)
    passes = [Pass("gather", rows * k * itemsize, rows, k, n)]
    if backward:
        passes.append(Pass("reduce", rows * k * itemsize, rows, n, k))
        passes.append(Pass("outer", rows * k * itemsize, k, rows, n))
    return _costs(chip, ring, passes, itemsize, kernels)


def matmul_reduce_scatter(
    chip: Chip, ring: int, x: Shape, w: Shape, *, itemsize: int = 2, backward: bool = True, kernels: bool = True
) -> dict[str, Cost]:
    """x [..., R*m, k] and w [k, n], of one device; where several are summed, k is the sum of theirs."""
    rows, (k, n) = math.prod(x[:-1]) // ring, w
    passes = [Pass("reduce", rows * n * itemsize, rows, k, n)]
    if backward:
        passes.append(Pass("gather", rows * n * itemsize, rows, n, k))
        passes.append(Pass("gathered", 0, k, ring * rows, n))
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
    fitted, hbm = FITTED[backend], chip.hbm_bandwidth * chip.hbm_efficiency
    fixed = fitted.program
    for one in passes:
        hop = hop_seconds(chip, one.sent, directions)
        alone = one.kind in ("gathered", "local")
        if alone or backend == "none":
            compute += _product(chip, one, 1 if alone else ring, itemsize, backend)
            steps += 1
            if one.kind == "gathered" and backend == "fused":
                fixed += KERNELS["gathered"].entry * KERNELS_OF / chip.hbm_bandwidth
            if one.kind in ("gather", "reduce"):  # of "outer", XLA sees that x was gathered before
                exposed += (ring - 1) * hop
                held = max(held, ring * one.sent)
            if one.kind == "reduce" and ring > 1:
                exposed += SUMS_READ * ring * one.sent / hbm
            continue
        steps += ring
        if backend == "fused":
            kernel, whole = KERNELS[one.kind], _kernel_product(chip, one, ring, itemsize)
            step, entry = (seconds * KERNELS_OF / chip.hbm_bandwidth for seconds in (kernel.step, kernel.entry))
            busy = whole + ring * step
            if one.kind == "reduce":  # what came is fetched, added, and sent on
                hop += step
            compute += busy
            exposed += max(0.0, (ring - 1) * hop + kernel.tail * whole / ring - busy)
            fixed += entry
            held = max(held, ring * one.sent)
            continue
        block = _product(chip, one, 1, itemsize, backend, weights=READ_AGAIN)
        if one.kind == "outer" and backend == "xla" and ring == 2:
            hop = 0.0  # a ring of two is no loop: XLA sees that x made this one hop before
        compute += ring * block
        if one.kind == "reduce":  # what came is added in a pass of its own, after the hop
            compute += (ring - 1) * ADDED * one.sent / hbm
        exposed += (ring - 1) * max(0.0, hop - block)
        held = max(held, 4 * one.sent)
    return Cost(compute, exposed, steps, held, fitted.step, {"directions": directions}, fixed)


def _kernel_product(chip: Chip, one: Pass, ring: int, itemsize: int) -> float:
    """Seconds of all products of a pass as one kernel."""
    if one.kind == "outer":
        return _product(chip, one, ring, itemsize, "fused")
    if one.kind == "reduce":
        return ring * _product(chip, one, 1, itemsize, "fused")
    if ring * one.sent > chip.vmem_bytes / 2:  # x streams, and w with each block
        return _product(chip, one, ring, itemsize, "fused", weights=ring * READ_AGAIN)
    fits = ring * one.sent + one.k * one.n * itemsize <= 0.75 * chip.vmem_bytes
    return _product(chip, one, ring, itemsize, "fused", weights=1 if fits else 2)


def _product(chip: Chip, one: Pass, blocks: int, itemsize: int, backend: str, weights: float = 1.0) -> float:
    """Seconds of the product of so many blocks at once; w is read so many times."""
    m, k, n = one.m, one.k, one.n
    if one.kind == "outer":
        k *= blocks
    else:
        m *= blocks
    moved = (m * k + weights * k * n + m * n) * itemsize
    if one.kind == "outer" and backend in ("xla", "pallas"):
        moved = (m * k + k * n) * itemsize + DW_MOVED * 4 * m * n
    flops = 2 * m * k * n / (chip.flops * FITTED[backend].efficiency)
    bytes_ = moved / (chip.hbm_bandwidth * chip.hbm_efficiency)
    return (flops**TOGETHER + bytes_**TOGETHER) ** (1 / TOGETHER)


def _directions(ring: int) -> int:
    return 2 if ring > 2 else 1
