"""What one backend of an op is predicted to take on the slowest device; that of ring attention and
of `mesh_matmul`.

The costs of the collective matmuls are in `collective_matmul`: they are made of `trips` around a
ring.
"""

import dataclasses
import functools
from collections.abc import Sequence

from flaxasync.hardware import Chip

type Shape = Sequence[int]

STEP_SECONDS = 5e-6
"""The cost of one more product of attention blocks: kernels and permutes that begin and end.
Assumed, not measured.
"""
ATTENTION_EFFICIENCY = 0.9
"""The share of the peak FLOP/s that the attention kernels reach, played on v5e
(benchmarks/attention.py).
"""
MESH_EFFICIENCY = {"none": 0.95, "xla_gemm": 0.94, "serial": 0.94, "overlapped": 0.97}
"""The share of the peak FLOP/s that the product of mesh_matmul reaches, played on v5e
(docs/kernels/mesh_matmul.md).
"""
MESH_STEP_SECONDS = 3e-6
"""The seconds that a kernel or collective costs once, for its barrier, first fetch and last store.
Assumed.
"""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The seconds and bytes of one backend."""

    compute: float  # seconds of work on the blocks
    exposed: float  # seconds during which a device waits for a transfer
    steps: int  # products of blocks, each with an overhead of `step_seconds`
    held: int  # bytes that the backend keeps in memory beside operands and results
    step_seconds: float = STEP_SECONDS
    fixed: float = 0.0  # seconds that are taken once: barriers, first fetches, last stores
    # bytes that stay in memory from the forward to the backward pass beside the operands
    kept: int = 0

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.steps * self.step_seconds + self.fixed


def hop_seconds(chip: Chip, size: float, directions: int) -> float:
    """Returns the seconds of one hop of `size` bytes, of which each direction carries an equal
    share.
    """
    return chip.hop_latency + size / (directions * chip.link_bandwidth)


def hbm(chip: Chip) -> float:
    """Returns the bytes a second that a program moves to and from HBM."""
    return chip.hbm_bandwidth * chip.hbm_efficiency


def ring_attention_costs(
    chip: Chip,
    ring: int,
    q: Shape,
    k: Shape,
    v: Shape | None = None,
    *,
    causal: bool = True,
    layout: str = "contiguous",
    window: int | None = None,
    itemsize: int = 2,
    backward: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend, from the shapes of one device: a ring of k and v, or one
    gather of both.

    A block has s x s scores: two matmuls forward, five backward. k and v cross the ring in their
    dtype, dk and dv in float32. In the zigzag layout a device multiplies half a block with the rows
    that each hop brings. In the contiguous layout the last device multiplies every block, and the
    others wait for it.
    """
    b, s, h, d = q
    n = k[2]
    kv_bytes = 2 * b * s * n * d * itemsize
    dkv_bytes = 2 * b * s * n * d * 4
    carry_bytes = 2 * b * h * s * d * 4  # the accumulator of a product is read and written once
    reach = ring - 1 if window is None else min(ring - 1, -(-(window - 1) // s))
    hops = reach if causal and layout == "contiguous" else ring - 1
    used = (0.5 if layout == "zigzag" else 1.0) if causal else 1.0

    def block(matmuls: int, share: float) -> float:
        flops = 2 * matmuls * b * h * s * s * d * share
        return max(flops / (chip.flops * ATTENTION_EFFICIENCY), carry_bytes / chip.hbm_bandwidth)

    def hop(sent: int) -> float:
        return hop_seconds(chip, sent, 2 if ring > 2 and hops == ring - 1 else 1)

    # matmuls, and bytes beside k and v
    own = 0.5 if causal else 1.0
    trips = [(2, 0)] + [(5, dkv_bytes)] * backward
    compute = sum(block(matmuls, own) + hops * block(matmuls, used) for matmuls, _ in trips)
    exposed = sum(
        hops * max(0.0, hop(kv_bytes + more) - block(matmuls, used)) for matmuls, more in trips
    )
    gathered = sum((ring - 1) * hop(kv_bytes + more) for _, more in trips)
    steps = len(trips) * (hops + 1)
    return {
        "xla": Cost(compute, exposed, 2 * steps, 2 * kv_bytes + 2 * dkv_bytes * backward),
        "none": Cost(compute, gathered, steps, ring * (kv_bytes + dkv_bytes * backward)),
    }


def mesh_matmul_costs(
    chip: Chip,
    ring: tuple[int, int],
    lhs: Shape,
    rhs: Shape,
    *,
    itemsize: int = 2,
    kernels: bool = True,
) -> dict[str, Cost]:
    """Returns the cost of each backend for lhs [m, k] and rhs [k', n] of one device; ring is
    (devices on x, on y).

    w moves along x, sums move along y, and each backend hides a part of it. Only the forward pass
    is counted: the gradients are the same, whatever the backend.
    """
    x, y = ring
    m, k = lhs
    rhs_rows, n = rhs
    whole = x * rhs_rows * n * itemsize
    needed = k * n * itemsize
    result = m * n * itemsize
    # one kernel, or XLA: every block to everyone
    gathered = (x - 1) * hop_seconds(chip, rhs_rows * n * itemsize, 1)
    permuted = (
        hop_seconds(chip, needed, 1) if x == y > 1 else (x - 1) * hop_seconds(chip, needed / x, 1)
    )
    reduced = 2 * (y - 1) * hop_seconds(chip, result / y, 1) if y > 1 else 0.0
    summed = 3 * result / hbm(chip) if y > 1 else 0.0
    sliced = 2 * needed / hbm(chip) if x > 1 and y > 1 else 0.0

    def product(backend: str) -> float:
        moved = (m * k + k * n + m * n) * itemsize
        cores = chip.cores if backend == "overlapped" else 1
        return max(
            2 * m * k * n * cores / (chip.flops * MESH_EFFICIENCY[backend]), moved / hbm(chip)
        )

    cost = functools.partial(Cost, step_seconds=MESH_STEP_SECONDS)
    first = gathered + sliced if x != y else permuted
    costs = {"none": cost(product("none"), first + reduced + summed, 3, needed)}
    if kernels and x * y > 1:
        for backend in ("xla_gemm", "serial"):
            costs[backend] = cost(
                product(backend), gathered + sliced + reduced + summed, 3, whole + result
            )
        # The product of "fused" hides the transfers of w, and that of "overlapped" those of sums
        # and results, too.
        hidden = product("overlapped")
        after = reduced + summed
        exposed = max(0.0, max(permuted, reduced) - hidden) + 0.02 * hidden
        costs["overlapped"] = cost(hidden, exposed, 1, needed + result)
        exposed = max(0.0, permuted - hidden) + 0.02 * hidden + after
        costs["fused"] = cost(hidden, exposed, 2 if after else 1, needed + result)
    return costs
