"""What one backend of an op is predicted to take on the slowest device, and the parts that all predictions share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flaxasync.hardware import Chip

type Shape = Sequence[int]

STEP_SECONDS = 5e-6
"""What one more product of attention blocks costs: kernels and permutes that begin and end. Assumed, not measured."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds and bytes of one backend.

    Attributes:
      compute: seconds of work on the blocks.
      exposed: seconds in which a device waits for a transfer.
      steps: how many products of blocks, each with its own overhead.
      held: bytes that stand in memory for it beside operands and results.
      step_seconds: the overhead of a step.
      settings: what the op would use: directions of the ring, rows that travel at once, tiles.
      fixed: seconds that it takes once: barriers, first fetches, last stores.
    """

    compute: float
    exposed: float
    steps: int
    held: int
    step_seconds: float = STEP_SECONDS
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.steps * self.step_seconds + self.fixed


def hop_seconds(chip: Chip, size: float, directions: int) -> float:
    """One hop of `size` bytes, a share of which goes each way."""
    return chip.hop_latency + size / (directions * chip.link_bandwidth)
