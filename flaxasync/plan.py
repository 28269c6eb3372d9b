"""Which backend an op should use for given shapes on a given chip: a roofline prediction, and the reason in words.

A prediction is made of data-sheet rates (`flaxasync.hardware`) and of two numbers read off compiled programs, below. It
ranks backends; it does not say how long a run will take.

An op has a function in `MODELS` that gives the `Cost` of each of its backends; everything else here is common to all.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flaxasync.hardware import Chip
from flaxasync.hardware import chip as chip_named

KERNEL_EFFICIENCY = 0.9
"""Share of the peak FLOP/s that the attention kernels reach, played on v5e: benchmarks/attention.py."""
STEP_SECONDS = 5e-6
"""What one more product of blocks costs: kernels and permutes that are begun and ended. Assumed, not measured."""

type Shape = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one backend is predicted to take on the slowest device.

    Attributes:
      compute: seconds of work on the blocks.
      exposed: seconds in which a device waits for a transfer.
      steps: how many products of blocks, each with its own overhead.
      held: bytes that stand in memory for it beside operands and results.
    """

    compute: float
    exposed: float
    steps: int
    held: int

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.steps * STEP_SECONDS


@dataclasses.dataclass(frozen=True)
class Plan:
    """A choice of backend.

    Attributes:
      op: the op's name.
      backend: the one to use.
      reason: why, in one sentence with figures.
      costs: of every backend that can serve.
    """

    op: str
    backend: str
    reason: str
    costs: Mapping[str, Cost]

    @property
    def seconds(self) -> dict[str, float]:
        """Predicted seconds of every backend."""
        return {backend: cost.seconds for backend, cost in self.costs.items()}

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend}, because {self.reason}"]
        for name, cost in sorted(self.costs.items(), key=lambda item: item[1].seconds):
            lines.append(
                f"  {name:8} {cost.seconds * 1e3:9.3f} ms predicted: compute {cost.compute * 1e3:.3f}, exposed "
                f"{cost.exposed * 1e3:.3f}, {cost.steps} steps; holds {cost.held / 2**20:.0f} MiB"
            )
        return "\n".join(lines)


def plan(op: str | Callable, *shapes: Shape, chip: str | Chip, ring: int, **options: Any) -> Plan:
    """Predicts how long each backend of an op takes, and chooses.

    ```python
    fa.plan(fa.ring_attention, (1, 4096, 32, 128), (1, 4096, 8, 128), chip="v5e", ring=8, layout="zigzag")
    ```

    Args:
      op: a function of this package, or its name: "ring_attention".
      *shapes: of its operands on one device, in its order.
      chip: "v5e", "v5e:2x4", or a `flaxasync.hardware.Chip`.
      ring: devices on the axis.
      **options: of the op that matter to its time, by its names; `itemsize`, the bytes of an element (2 by default);
        `backward`, whether the gradient is counted, too (True by default).

    Returns:
      The plan: `.backend`, `.reason`, `.seconds` and `.costs` by backend; str() is a table.

    Raises:
      ValueError: no such op or chip, a ring of no devices, an option that the op lacks, shapes that do not fit.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in MODELS:
        raise ValueError(f"plan knows {', '.join(sorted(MODELS))}: got {name!r}")
    if ring < 1:
        raise ValueError(f"plan needs a ring of 1 device or more: got ring={ring}")
    spec = chip if isinstance(chip, Chip) else chip_named(chip)
    try:
        costs = MODELS[name](spec, ring, *shapes, **options)
    except TypeError as error:
        raise ValueError(f"plan cannot take these shapes or options for {name}: {error}") from error
    fitting = {backend: cost for backend, cost in costs.items() if cost.held < spec.hbm_bytes} or costs
    first, *others = sorted(fitting, key=lambda backend: fitting[backend].seconds)
    return Plan(name, first, _reason(first, others, costs, fitting, ring, spec), costs)


def _reason(
    first: str, others: list[str], costs: Mapping[str, Cost], fitting: Mapping[str, Cost], ring: int, chip: Chip
) -> str:
    if too_large := [backend for backend in costs if backend not in fitting]:
        held = costs[too_large[0]].held / 2**30
        return f"{too_large[0]} would hold {held:.1f} GiB beside its operands, more than a {chip.name} has"
    if ring == 1:
        return "one device has every row: there is nothing to transfer"
    chosen, other = costs[first], costs[others[0]]
    ratio = other.seconds / chosen.seconds
    why = (
        f"it waits {chosen.exposed * 1e3:.2f} ms for transfers where {others[0]} waits {other.exposed * 1e3:.2f} ms"
        if chosen.exposed < other.exposed
        else f"it takes {chosen.steps} steps where {others[0]} takes {other.steps}"
    )
    return f"{why}: {others[0]} is predicted to take {ratio:.2f} times as long on a ring of {ring} {chip.name}"


def _ring_attention(
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
        directions = 2 if ring > 2 and hops == ring - 1 else 1
        return chip.hop_latency + sent / (directions * chip.link_bandwidth)

    own, passes = (0.5 if causal else 1.0), [(2, 0)] + [(5, sum_bytes)] * backward
    compute = sum(block(m, own) + hops * block(m, used) for m, _ in passes)
    exposed = sum(hops * max(0.0, hop(kv_bytes + sums) - block(m, used)) for m, sums in passes)
    gathered = sum((ring - 1) * hop(kv_bytes + sums) for _, sums in passes)
    steps = len(passes) * (hops + 1)
    return {
        "xla": Cost(compute, exposed, 2 * steps, 2 * kv_bytes + 2 * sum_bytes * backward),
        "gather": Cost(compute, gathered, steps, ring * (kv_bytes + sum_bytes * backward)),
    }


MODELS: dict[str, Callable[..., dict[str, Cost]]] = {"ring_attention": _ring_attention}
