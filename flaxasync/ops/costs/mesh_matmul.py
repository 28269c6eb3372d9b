"""The cost of `mesh_matmul` on X x Y devices: w moves along x, sums move along y, and each backend hides a part of it.

Only the forward pass is counted: the gradients are those of XLA, whatever the backend.
"""

import functools

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, Shape, hbm, hop_seconds

EFFICIENCY = {"none": 0.95, "xla_gemm": 0.94, "serial": 0.94, "overlapped": 0.97}
"""The share of the peak FLOP/s that the product reaches, played on v5e (docs/kernels/mesh_matmul.md)."""
STEP_SECONDS = 3e-6
"""The seconds that a kernel or collective costs once, for its barrier, first fetch and last store. Assumed."""


def mesh_matmul_costs(
    chip: Chip, ring: tuple[int, int], lhs: Shape, rhs: Shape, *, itemsize: int = 2, kernels: bool = True
) -> dict[str, Cost]:
    """Returns the cost of each backend for lhs [m, k] and rhs [k', n] of one device; ring is (devices on x, on y)."""
    (x, y), (m, k), (rhs_rows, n) = ring, lhs, rhs
    whole, needed, result = x * rhs_rows * n * itemsize, k * n * itemsize, m * n * itemsize
    gathered = (x - 1) * hop_seconds(chip, rhs_rows * n * itemsize, 1)  # one kernel, or XLA: every block to everyone
    permuted = hop_seconds(chip, needed, 1) if x == y > 1 else (x - 1) * hop_seconds(chip, needed / x, 1)
    reduced = 2 * (y - 1) * hop_seconds(chip, result / y, 1) if y > 1 else 0.0
    summed = 3 * result / hbm(chip) if y > 1 else 0.0
    sliced = 2 * needed / hbm(chip) if x > 1 and y > 1 else 0.0

    def product(backend: str) -> float:
        moved, cores = (m * k + k * n + m * n) * itemsize, chip.cores if backend == "overlapped" else 1
        return max(2 * m * k * n * cores / (chip.flops * EFFICIENCY[backend]), moved / hbm(chip))

    cost = functools.partial(Cost, step_seconds=STEP_SECONDS)
    first = gathered + sliced if x != y else permuted
    costs = {"none": cost(product("none"), first + reduced + summed, 3, needed)}
    if kernels and x * y > 1:
        for backend in ("xla_gemm", "serial"):
            costs[backend] = cost(product(backend), gathered + sliced + reduced + summed, 3, whole + result)
        # The product of "fused" hides the transfers of w, and that of "overlapped" those of sums and results, too.
        hidden, after = product("overlapped"), reduced + summed
        exposed = max(0.0, max(permuted, reduced) - hidden) + 0.02 * hidden
        costs["overlapped"] = cost(hidden, exposed, 1, needed + result)
        exposed = max(0.0, permuted - hidden) + 0.02 * hidden + after
        costs["fused"] = cost(hidden, exposed, 2 if after else 1, needed + result)
    return costs
