"""Ring attention: a ring of k and v against one gather of both."""

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, Shape, hop_seconds

KERNEL_EFFICIENCY = 0.9
"""Share of the peak FLOP/s that the attention kernels reach, played on v5e: benchmarks/attention.py."""


def ring_attention(
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
    """Blocks of s x s scores: two matmuls forward, five backward; k and v cross the ring, dk and dv in float32.

    Of another device's rows a zigzag device multiplies half a block every hop. In a contiguous layout the last device
    multiplies every block, and the others wait for it.
    """
    b, s, h, d = q
    n = k[2]
    kv_bytes, sum_bytes = 2 * b * s * n * d * itemsize, 2 * b * s * n * d * 4
    carry_bytes = 2 * b * h * s * d * 4  # read and written once a product
    reach = ring - 1 if window is None else min(ring - 1, -(-(window - 1) // s))
    hops = reach if causal and layout == "contiguous" else ring - 1
    used = (0.5 if layout == "zigzag" else 1.0) if causal else 1.0

    def block(matmuls: int, share: float) -> float:
        flops = 2 * matmuls * b * h * s * s * d * share
        return max(flops / (chip.flops * KERNEL_EFFICIENCY), carry_bytes / chip.hbm_bandwidth)

    def hop(sent: int) -> float:
        return hop_seconds(chip, sent, 2 if ring > 2 and hops == ring - 1 else 1)

    own, passes = (0.5 if causal else 1.0), [(2, 0)] + [(5, sum_bytes)] * backward
    compute = sum(block(m, own) + hops * block(m, used) for m, _ in passes)
    exposed = sum(hops * max(0.0, hop(kv_bytes + sums) - block(m, used)) for m, sums in passes)
    gathered = sum((ring - 1) * hop(kv_bytes + sums) for _, sums in passes)
    steps = len(passes) * (hops + 1)
    return {
        "xla": Cost(compute, exposed, 2 * steps, 2 * kv_bytes + 2 * sum_bytes * backward),
        "gather": Cost(compute, gathered, steps, ring * (kv_bytes + sum_bytes * backward)),
    }
