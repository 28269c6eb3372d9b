"""The study's matmul on a mesh of X x Y devices: w moves along x, sums along y, and what each backend hides of it.

Forward only: the gradients are XLA's, whatever the backend.
"""

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, Shape, hop_seconds

EFFICIENCY = {"none": 0.95, "xla_gemm": 0.94, "serial": 0.94, "fused": 0.94, "overlapped": 0.97}
"""Share of the peak FLOP/s of the product, played on v5e: docs/kernels.md."""
STEP_SECONDS = 3e-6
"""What a kernel or collective costs once: barrier, first fetch, last store. Assumed."""


def mesh_matmul(
    chip: Chip, ring: tuple[int, int], lhs: Shape, rhs: Shape, *, itemsize: int = 2, kernels: bool = True
) -> dict[str, Cost]:
    """lhs [m, k] and rhs [k', n], of one device; ring is (devices on x, devices on y)."""
    (x, y), (m, k), (held, n) = ring, lhs, rhs
    hbm = chip.hbm_bandwidth * chip.hbm_efficiency
    whole, needed, result = x * held * n * itemsize, k * n * itemsize, m * n * itemsize
    gathered = (x - 1) * hop_seconds(chip, held * n * itemsize, 1)  # one kernel, or XLA: every block to everyone
    permuted = hop_seconds(chip, needed, 1) if x == y > 1 else (x - 1) * hop_seconds(chip, needed / x, 1)
    reduced = 2 * (y - 1) * hop_seconds(chip, result / y, 1) if y > 1 else 0.0
    summed = 3 * result / hbm if y > 1 else 0.0
    sliced = 2 * needed / hbm if x > 1 and y > 1 else 0.0

    def product(backend: str) -> float:
        moved = (m * k + k * n + m * n) * itemsize
        return max(2 * m * k * n / (chip.flops * EFFICIENCY[backend]), moved / hbm)

    def cost(backend: str, compute: float, exposed: float, steps: int, held: int) -> Cost:
        return Cost(compute, exposed, steps, held, STEP_SECONDS)

    none = product("none")
    first = gathered + sliced if x != y else permuted
    costs = {"none": cost("none", none, first + reduced + summed, 3, needed)}
    if kernels and x * y > 1:
        around = gathered + sliced
        for backend in ("xla_gemm", "serial"):
            costs[backend] = cost(backend, product(backend), around + reduced + summed, 3, whole + result)
        costs["fused"] = cost(
            "fused", product("fused"), permuted + reduced + summed, 2, needed + result
        )  # devices that hold no piece that they need wait for all of it
        hidden = product("overlapped")
        last = max(permuted, reduced) - hidden
        costs["overlapped"] = cost("overlapped", hidden, max(0.0, last) + 0.02 * hidden, 1, needed + result)
    return costs
