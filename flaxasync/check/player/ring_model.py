"""Collectives of XLA whose bundles read tables that cannot be written again: timed as a ring on the chip's links.

The last device of a group to arrive starts the ring; all leave together. Marked as analytic in every result.
"""

import dataclasses

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.participants import collective_seconds, replica_groups
from flaxasync.check.player.addresses import shape_bytes
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.dump import SYNCHRONOUS


@dataclasses.dataclass
class Ring:
    """One collective of one group."""

    opcode: str
    bytes_in: int
    bytes_out: int
    groups: tuple[tuple[int, ...], ...]
    arrived: dict[int, float] = dataclasses.field(default_factory=dict)

    def fresh(self) -> "Ring":
        return dataclasses.replace(self, arrived={})

    def group_of(self, device: int) -> tuple[int, ...]:
        return next((g for g in self.groups if device in g), (device,))

    def volume(self, group: tuple[int, ...]) -> int:
        """Returns the bytes that each device of the group sends."""
        share = (len(group) - 1) / len(group)
        whole = {"all-gather": self.bytes_out, "all-reduce": 2 * self.bytes_in}.get(self.opcode, self.bytes_in)
        return int(whole * share)

    def cycles(self, group: tuple[int, ...], chip: PlayedChip) -> float:
        """Returns the time of the ring: bytes over links; a reduction also reads two operands and writes one."""
        links = dataclasses.replace(chip.sheet, link_bandwidth=chip.link)
        seconds = collective_seconds(self.opcode, self.bytes_in, self.bytes_out, len(group), links)
        if self.opcode in ("all-reduce", "reduce-scatter"):
            seconds += 1.5 * self.bytes_in / chip.hbm
        return chip.cycles(seconds)


def collective_of(instruction: Instruction | None, devices: int) -> Ring | None:
    """Returns the ring of a synchronous collective; None for any other instruction."""
    if instruction is None or instruction.opcode not in SYNCHRONOUS:
        return None
    size = shape_bytes(str(instruction.shape))
    groups = replica_groups(instruction, devices)
    count = max(len(g) for g in groups)
    bytes_in = {"all-gather": size // count, "reduce-scatter": size * count}.get(instruction.opcode, size)
    return Ring(instruction.opcode, bytes_in, size, groups)
