"""Times XLA's collectives as a ring on the links, if their bundles read tables that cannot be reconstructed.

The ring begins when the last device of a group arrives, and all of its devices leave together. Every result marks the
instructions that were timed in this way.
"""

import dataclasses

from flaxasync.check.estimate.collective_time import collective_seconds
from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.participants import replica_groups
from flaxasync.check.player.addresses import padded_bytes
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.dump import SYNCHRONOUS

# HBM traffic of the additions in a reduction, for each byte of the operands: an addition reads two operands and writes
# their sum, which is three bytes of traffic for two bytes of operands.
HBM_BYTES_PER_REDUCED_BYTE = 1.5


@dataclasses.dataclass
class ModelledCollective:
    """One collective that is timed by the ring model."""

    opcode: str
    bytes_in: int  # of one device's operand
    bytes_out: int  # of one device's result
    groups: tuple[tuple[int, ...], ...]  # of devices that exchange data
    arrived: int = 0  # devices of one group

    def group_of(self, device: int) -> tuple[int, ...]:
        return next((g for g in self.groups if device in g), (device,))

    def sent_bytes(self, group: tuple[int, ...]) -> int:
        """Returns the bytes that each device of a group sends."""
        share = (len(group) - 1) / len(group)
        whole = {"all-gather": self.bytes_out, "all-reduce": 2 * self.bytes_in}.get(self.opcode, self.bytes_in)
        return int(whole * share)

    def cycles(self, group: tuple[int, ...], chip: PlayedChip) -> float:
        """Returns the time of the ring: its bytes on the links, and for a reduction also those of the additions."""
        links = dataclasses.replace(chip.sheet, link_bandwidth=chip.link)
        seconds = collective_seconds(self.opcode, self.bytes_in, self.bytes_out, len(group), links)
        if self.opcode in ("all-reduce", "reduce-scatter"):
            seconds += HBM_BYTES_PER_REDUCED_BYTE * self.bytes_in / chip.hbm
        return chip.cycles(seconds)


def modelled_collective(instruction: Instruction | None, devices: int) -> ModelledCollective | None:
    """Returns the model of a synchronous collective; None for any other instruction."""
    if instruction is None or instruction.opcode not in SYNCHRONOUS:
        return None
    size = padded_bytes(instruction.shape)
    groups = replica_groups(instruction, devices)
    count = max(len(g) for g in groups)
    bytes_in = {"all-gather": size // count, "reduce-scatter": size * count}.get(instruction.opcode, size)
    return ModelledCollective(instruction.opcode, bytes_in, size, groups)
