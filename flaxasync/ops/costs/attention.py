"""The cost of ring attention: a ring of k and v against one gather of both."""

from flaxasync.hardware import Chip
from flaxasync.ops.costs.cost import Cost, Shape, hop_seconds

KERNEL_EFFICIENCY = 0.9
"""The share of the peak FLOP/s that the attention kernels reach, played on v5e (benchmarks/attention.py)."""


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
    """Returns the cost of each backend, from the shapes of one device.

    A block has s x s scores: two matmuls forward, five backward. k and v cross the ring in their dtype, dk and dv in
    float32. In the zigzag layout a device multiplies half a block with the rows that each hop brings. In the contiguous
    layout the last device multiplies every block, and the others wait for it.
    """
    b, s, h, d = q
    n = k[2]
    kv_bytes, dkv_bytes = 2 * b * s * n * d * itemsize, 2 * b * s * n * d * 4
    carry_bytes = 2 * b * h * s * d * 4  # the accumulator of a product is read and written once
    reach = ring - 1 if window is None else min(ring - 1, -(-(window - 1) // s))
    hops = reach if causal and layout == "contiguous" else ring - 1
    used = (0.5 if layout == "zigzag" else 1.0) if causal else 1.0

    def block(matmuls: int, share: float) -> float:
        flops = 2 * matmuls * b * h * s * s * d * share
        return max(flops / (chip.flops * KERNEL_EFFICIENCY), carry_bytes / chip.hbm_bandwidth)

    def hop(sent: int) -> float:
        return hop_seconds(chip, sent, 2 if ring > 2 and hops == ring - 1 else 1)

    own, trips = (0.5 if causal else 1.0), [(2, 0)] + [(5, dkv_bytes)] * backward  # matmuls, and bytes beside k and v
    compute = sum(block(matmuls, own) + hops * block(matmuls, used) for matmuls, _ in trips)
    exposed = sum(hops * max(0.0, hop(kv_bytes + more) - block(matmuls, used)) for matmuls, more in trips)
    gathered = sum((ring - 1) * hop(kv_bytes + more) for _, more in trips)
    steps = len(trips) * (hops + 1)
    return {
        "xla": Cost(compute, exposed, 2 * steps, 2 * kv_bytes + 2 * dkv_bytes * backward),
        "none": Cost(compute, gathered, steps, ring * (kv_bytes + dkv_bytes * backward)),
    }
