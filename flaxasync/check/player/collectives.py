"""XLA's collectives: the tables that their bundles read, and a ring model of those whose tables are
not known.

The dump has the code that reads the tables, but not their contents. Some can be reconstructed from
the HLO. Their form was inferred from what the code does with the words:

| collective | the row of partition p |
|---|---|
| collective-permute | the source of p or -1, the target of p or -1 |
| all-gather, all-reduce, reduce-scatter of pairs | the index of p in its pair, its partner, its partner, 0 |
| all-reduce along one ring in vector memory | index of p, next chip, chip before, place on the ring |

If the code looks up chips in the device assignment, a partner is given as its partition, and
otherwise as its chip. XLA takes the ring for sums of up to a few MiB ("RotatedPincerShortEmitter"
in the compiled HLO). Its rows are those of chips, and its order is taken to be that of the group.
The code itself checks that the ring closes.

The tables of other collectives of larger groups have other forms. A synchronous collective that
reads such a table is timed as a ring on the links: it begins when the last device of a group
arrives, and all of its devices leave together. Every result marks the instructions that were timed
in this way. An asynchronous one is refused, because the model does not know what runs beside it.
Collectives without a table compute their partners and are simulated from their bundles.
"""

import dataclasses

from flaxasync.check.estimate.costs import collective_seconds, sent_on_ring
from flaxasync.check.estimate.torus import torus_of
from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.participants import permute_pairs, replica_groups
from flaxasync.check.player.bundle_text import Program
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.memory import padded_bytes
from flaxasync.hardware import DEVICES_PER_CHIP

SYNCHRONOUS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
# HBM traffic of the additions in a reduction, for each byte of the operands: an addition reads two
# operands and writes their sum, which is three bytes of traffic for two bytes of operands.
_HBM_BYTES_PER_REDUCED_BYTE = 1.5
_PAIRED = ("all-gather", "all-reduce", "reduce-scatter")
_NONE = 0xFFFFFFFF  # -1 as an unsigned word


def can_be_simulated(instruction: Instruction | None, program: Program, devices: int) -> bool:
    """Says whether a synchronous collective can be simulated: it reads no table, or one that can be
    reconstructed.
    """
    if not any(o.name == "dma.hbm_to_smem" for bundle in program.bundles for o in bundle):
        return True
    return instruction is not None and (
        _is_in_pairs(instruction, devices) or _is_short_ring(instruction, program)
    )


def table_of(
    instruction: Instruction | None, program: Program, chips: list[int]
) -> list[int] | None:
    """Returns the words of the table that a collective's code reads, for partitions on these chips;
    or None.
    """
    if instruction is None:
        return None
    if instruction.opcode.startswith("collective-permute"):
        pairs = permute_pairs(instruction)
        sources = {target: source for source, target in pairs}
        targets = dict(pairs)
        return [
            word
            for p in range(len(chips))
            for word in (sources.get(p, _NONE), targets.get(p, _NONE))
        ]
    groups = replica_groups(instruction, len(chips))
    if _is_short_ring(instruction, program):
        rows = {}
        for group in groups:
            for place, p in enumerate(group):
                following = chips[group[(place + 1) % len(group)]]
                rows[chips[p]] = [place, following, chips[group[place - 1]], place]
        return [word for chip in sorted(rows) for word in rows[chip]]
    if not _is_in_pairs(instruction, len(chips)):
        return None
    looks_chips_up = any("device assignment ptr" in d.tag for d in program.declarations.values())
    table: list[int] = []
    for p in range(len(chips)):
        pair = next((g for g in groups if p in g), (p, p))
        index = pair.index(p)
        partner = pair[1 - index]
        if looks_chips_up:
            named = partner
        else:
            named = chips[partner]
        table += [index, named, named, 0]
    return table


def refusal(instruction: Instruction | None, name: str, location: str) -> str:
    """Returns why an asynchronous collective whose table is not known cannot be simulated, and what
    to do.
    """
    if instruction:
        what = f"an asynchronous {instruction.opcode}"
    else:
        what = "an asynchronous collective"
    return (
        f"{name}: the start of {what} of XLA reads a table that the dump lacks, and the player "
        "knows those of pairs of devices, of permutes and of small all-reduces only; at "
        f"{location}. Compile with "
        'compiler_options={"xla_tpu_enable_async_collective_fusion": "false"}, which makes the '
        "collective synchronous: "
        "it is then simulated, or timed by a ring model"
    )


def _is_in_pairs(instruction: Instruction, devices: int) -> bool:
    return instruction.opcode in _PAIRED and all(
        len(g) == 2 for g in replica_groups(instruction, devices)
    )


def _is_short_ring(instruction: Instruction, program: Program) -> bool:
    """Says whether this is XLA's all-reduce of small arrays, which goes around one ring in vector
    memory.
    """
    comments = {o.comment.strip() for bundle in program.bundles for o in bundle}
    return instruction.opcode == "all-reduce" and "shard-cw-recv-wait" in comments


@dataclasses.dataclass
class ModelledCollective:
    """One collective that is timed by the ring model."""

    opcode: str
    bytes_in: int  # of one device's operand
    bytes_out: int  # of one device's result
    groups: tuple[tuple[int, ...], ...]  # of devices that exchange data
    notes: str  # the compiler's, about its algorithm
    devices: int  # of the program
    arrived: int = 0  # devices of one group

    def sent_bytes(self, group: tuple[int, ...]) -> int:
        """Returns the bytes that a device sends, by the ring model that times them."""
        if len(group) < 2:
            return 0
        return int(sent_on_ring(self.opcode, self.bytes_in, self.bytes_out, len(group)) or 0)

    def cycles(self, group: tuple[int, ...], chip: PlayedChip) -> float:
        """Returns the time of the ring: its bytes on the links, and for a reduction also those of
        the additions.
        """
        links = dataclasses.replace(chip.sheet, link_bandwidth=chip.link)
        chips = self.devices // DEVICES_PER_CHIP.get(chip.name, 1)
        torus = torus_of(self.notes, len(group), chips, links)
        seconds = collective_seconds(
            self.opcode, self.bytes_in, self.bytes_out, len(group), links, torus
        )
        if self.opcode in ("all-reduce", "reduce-scatter"):
            seconds += _HBM_BYTES_PER_REDUCED_BYTE * self.bytes_in / chip.hbm
        return chip.cycles(seconds)


def modelled_collective(instruction: Instruction | None, devices: int) -> ModelledCollective | None:
    """Returns the model of a synchronous collective; None for any other instruction."""
    if instruction is None or instruction.opcode not in SYNCHRONOUS:
        return None
    size = padded_bytes(instruction.shape)
    groups = replica_groups(instruction, devices)
    count = max(len(g) for g in groups)
    bytes_in = {"all-gather": size // count, "reduce-scatter": size * count}.get(
        instruction.opcode, size
    )
    notes = instruction.attributes.get("backend_config", "")
    return ModelledCollective(instruction.opcode, bytes_in, size, groups, notes, devices)
