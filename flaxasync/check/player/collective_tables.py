"""The tables that XLA's collectives read. The dump has the code that reads them, but not their contents.

Some tables can be reconstructed from the HLO. Their form was inferred from what the code does with the words:

| collective | the row of partition p |
|---|---|
| collective-permute | the source of p or -1, the target of p or -1 |
| all-gather, all-reduce, reduce-scatter of pairs | the index of p in its pair, its partner, its partner, 0 |
| all-reduce along one ring in vector memory | index of p, next chip, chip before, place on the ring |

If the code looks up chips in the device assignment, a partner is given as its partition, and otherwise as its chip. XLA
takes the ring for sums of up to a few MiB ("RotatedPincerShortEmitter" in the compiled HLO). Its rows are those of
chips, and its order is taken to be that of the group. The code itself checks that the ring closes.

The tables of other collectives of larger groups have other forms. A synchronous collective that reads such a table is
timed by a ring model (ring_model.py). An asynchronous one is refused, because the model does not know what runs beside
it. Collectives without a table compute their partners and are simulated from their bundles.
"""

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.participants import permute_pairs, replica_groups
from flaxasync.check.player.bundle_text import Program

SYNCHRONOUS_OPTIONS = 'compiler_options={"xla_tpu_enable_async_collective_fusion": "false"}'

_NONE = 0xFFFFFFFF  # -1 as an unsigned word
_PAIRED = ("all-gather", "all-reduce", "reduce-scatter")


def can_be_simulated(instruction: Instruction | None, program: Program, devices: int) -> bool:
    """Says whether a synchronous collective can be simulated: it reads no table, or one that can be reconstructed."""
    if not any(o.name == "dma.hbm_to_smem" for bundle in program.bundles for o in bundle):
        return True
    return instruction is not None and (_is_in_pairs(instruction, devices) or _is_short_ring(instruction, program))


def table_of(instruction: Instruction | None, program: Program, chips: list[int]) -> list[int] | None:
    """Returns the words of a collective's table; None if they are not known.

    `program` is the code that reads the table, and `chips` are the chips of the partitions.
    """
    if instruction is None:
        return None
    table: list[int] = []
    if instruction.opcode.startswith("collective-permute"):
        pairs = permute_pairs(instruction)
        sources = {target: source for source, target in pairs}
        targets = dict(pairs)
        for p in range(len(chips)):
            table += [sources.get(p, _NONE), targets.get(p, _NONE)]
        return table
    groups = replica_groups(instruction, len(chips))
    if _is_short_ring(instruction, program):
        rows = {
            chips[p]: [place, chips[group[(place + 1) % len(group)]], chips[group[place - 1]], place]
            for group in groups
            for place, p in enumerate(group)
        }
        return [word for chip in sorted(rows) for word in rows[chip]]
    if not _is_in_pairs(instruction, len(chips)):
        return None
    looks_chips_up = any("device assignment ptr" in d.tag for d in program.declarations.values())
    for p in range(len(chips)):
        pair = next((g for g in groups if p in g), (p, p))
        index = pair.index(p)
        partner = pair[1 - index]
        named = partner if looks_chips_up else chips[partner]
        table += [index, named, named, 0]
    return table


def refusal(instruction: Instruction | None, name: str, location: str) -> str:
    """Returns why an asynchronous collective whose table is not known cannot be simulated, and what to do."""
    what = f"an asynchronous {instruction.opcode}" if instruction else "an asynchronous collective"
    return (
        f"{name}: the start of {what} of XLA reads a table that the dump lacks, and the player knows those of pairs "
        f"of devices only; at {location}. Compile with {SYNCHRONOUS_OPTIONS}, which makes the collective synchronous: "
        "it is then simulated, or timed by a ring model"
    )


def _is_in_pairs(instruction: Instruction, devices: int) -> bool:
    return instruction.opcode in _PAIRED and all(len(g) == 2 for g in replica_groups(instruction, devices))


def _is_short_ring(instruction: Instruction, program: Program) -> bool:
    """Says whether this is XLA's all-reduce of small arrays, which goes around one ring in vector memory."""
    comments = {o.comment.strip() for bundle in program.bundles for o in bundle}
    return instruction.opcode == "all-reduce" and "shard-cw-recv-wait" in comments
