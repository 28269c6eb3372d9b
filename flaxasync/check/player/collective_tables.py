"""The tables that XLA's collectives read, written again from the HLO: the dump has their readers, not their contents.

| collective | row of partition p | known from |
|---|---|---|
| collective-permute | source of p or -1, target of p or -1 | what the code does with the two words |
| all-gather, all-reduce, reduce-scatter of pairs | place of p in its pair, the other one, again, 0 | likewise |

The other one is named by its partition where the code looks chips up in the device assignment, and by its chip where
it does not. Larger groups have tables of other forms: a collective that reads one is timed by a ring model
(analytic.py), and refused where it is asynchronous, as the model does not know what runs beside it. Collectives
without a table, whose partners the code computes, are played.
"""

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.participants import permute_pairs, replica_groups
from flaxasync.check.player.bundle_text import Program

NONE = 0xFFFFFFFF
SYNCHRONOUS_OPTIONS = 'compiler_options={"xla_tpu_enable_async_collective_fusion": "false"}'
_PAIRED = ("all-gather", "all-reduce", "reduce-scatter")


def playable(instruction: Instruction | None, program: Program, devices: int) -> bool:
    """Says whether a synchronous collective can be played: it reads no table, or one that can be written."""
    if not any(o.name == "dma.hbm_to_smem" for bundle in program.bundles for o in bundle.operations):
        return True
    return instruction is not None and _in_pairs(instruction, devices)


def contents(instruction: Instruction | None, program: Program, chips: list[int]) -> list[int] | None:
    """Returns the words of a collective's table, or None when they are not known.

    Args:
      instruction: the collective.
      program: the code that reads the table.
      chips: the chip of each partition.
    """
    if instruction is None:
        return None
    table: list[int] = []
    if instruction.opcode.startswith("collective-permute"):
        pairs = permute_pairs(instruction)
        sources = {target: source for source, target in pairs}
        targets = dict(pairs)
        for p in range(len(chips)):
            table += [sources.get(p, NONE), targets.get(p, NONE)]
        return table
    if not _in_pairs(instruction, len(chips)):
        return None
    looked_up = any("device assignment ptr" in d.tag for d in program.declarations.values())
    groups = replica_groups(instruction, len(chips))
    for p in range(len(chips)):
        group = next((g for g in groups if p in g), (p, p))
        place = group.index(p)
        other = group[1 - place]
        named = other if looked_up else chips[other]
        table += [place, named, named, 0]
    return table


def refusal(instruction: Instruction | None, name: str, place: str) -> str:
    """Says why an asynchronous collective whose table is not known cannot be played, and what to do."""
    what = f"an asynchronous {instruction.opcode}" if instruction else "an asynchronous collective"
    return (
        f"{name}: the start of {what} of XLA reads a table that the dump lacks, and the player knows those of pairs "
        f"of devices only; at {place}. Compile with {SYNCHRONOUS_OPTIONS}, which makes the collective synchronous: "
        "it is then played, or timed by a ring model"
    )


def _in_pairs(instruction: Instruction, devices: int) -> bool:
    return instruction.opcode in _PAIRED and all(len(g) == 2 for g in replica_groups(instruction, devices))
