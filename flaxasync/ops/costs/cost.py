"""What one backend of an op is predicted to take on the slowest device, and the parts that all predictions share."""

import dataclasses
from collections.abc import Sequence

from flaxasync.hardware import Chip

type Shape = Sequence[int]

STEP_SECONDS = 5e-6
"""The cost of one more product of attention blocks: kernels and permutes that begin and end. Assumed, not measured."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The seconds and bytes of one backend."""

    compute: float  # seconds of work on the blocks
    exposed: float  # seconds during which a device waits for a transfer
    steps: int  # products of blocks, each with an overhead of `step_seconds`
    held: int  # bytes that the backend keeps in memory beside operands and results
    step_seconds: float = STEP_SECONDS
    fixed: float = 0.0  # seconds that are taken once: barriers, first fetches, last stores
    kept: int = 0  # bytes that stay in memory from the forward to the backward pass beside the operands

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.steps * self.step_seconds + self.fixed


def hop_seconds(chip: Chip, size: float, directions: int) -> float:
    """Returns the seconds of one hop of `size` bytes, of which each direction carries an equal share."""
    return chip.hop_latency + size / (directions * chip.link_bandwidth)


def hbm(chip: Chip) -> float:
    """Returns the bytes a second that a program moves to and from HBM."""
    return chip.hbm_bandwidth * chip.hbm_efficiency
