"""Reads a folder of libtpu's dumps: the programs, the HLO module, and the topology that they were
made for.

libtpu does not write its version. `play` writes a note (player.json) with the version beside the
dumps.
"""

import dataclasses
import functools
import json
import pathlib
import re

from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import HloError
from flaxasync.check.player.bundle_text import Program, read_program
from flaxasync.check.player.collectives import SYNCHRONOUS
from flaxasync.check.player.errors import DumpError
from flaxasync.check.player.memory import integer_elements, words

TOP = "TLP"  # the name of the top level program, which is the compiled entry computation
_NOTE = "player.json"
# the beginning of the names of the runtime's set-up and tear-down, which are not simulated
_SET_UP = "<late-"
# A file of the final bundles, or of the declarations, of a program: its beginning, the program, and
# the pass's number.
_BUNDLES = re.compile(r"(\d+-(.+))-\d+-final_bundles\.txt")
_ORIGINAL = re.compile(r"(\d+-(.+))-\d+-original\.txt")


@dataclasses.dataclass(frozen=True)
class Note:
    """What only the process that compiled the program knows."""

    topology: str = ""
    libtpu: str = ""  # its version
    coords: tuple[tuple[int, ...], ...] = ()  # of each partition, as `CompiledProgram.coords`


@dataclasses.dataclass(eq=False)
class Dump:
    """What a folder of dumps contains."""

    folder: pathlib.Path
    programs: dict[str, Program]  # each fusion and kernel, and the top level program, by name
    module: HloModule  # scheduled
    note: Note
    instructions: dict[str, Instruction]  # of all computations, by name

    def source(self, instruction: str) -> str:
        """Returns "file:line" of the Python that made an HLO instruction; "" if the dump does not
        say.
        """
        if instruction not in self.instructions:
            return ""
        return self.instructions[instruction].source

    def words_of(self, name: str) -> list[int] | None:
        """Returns the words in memory of an integer constant, or of a copy of one; None for
        anything else.
        """
        elements = integer_elements(self.instructions, name)
        if elements is None:
            return None
        return words(self.instructions[name].shape, elements)

    def collective(self, name: str) -> Instruction | None:
        """Returns the instruction of this name, or what is in it if it is a fusion: its collective,
        or None.
        """
        found = self.instructions.get(name)
        if found is None or found.opcode != "fusion":
            return found
        return next((i for i in found.inside if i.opcode in SYNCHRONOUS), None)

    def is_half_of_collective(self, name: str) -> bool:
        """Says whether an instruction is a fusion that only starts a collective, or only ends
        one.
        """
        found = self.instructions.get(name)
        return found is not None and any(
            i.custom_call_target.startswith("AsyncCollective") for i in found.inside
        )

    def program_of(self, instruction: str) -> Program:
        """Returns the bundles of an HLO instruction. libtpu dumps identical ones only once, and
        shortens long names.
        """
        if instruction in self.programs:
            return self.programs[instruction]
        for name in sorted(self.programs):
            shortened = len(name) > 40 and instruction.startswith(name)
            known = name in self.instructions and instruction in self.instructions
            if shortened or (known and self._fingerprints[name] == self._fingerprints[instruction]):
                return self.programs[name]
        raise DumpError(
            f"{self.folder} has no bundles for {instruction}: it holds "
            f"{', '.join(sorted(self.programs)[:8])} ...; compile again into an empty folder, with "
            "every final_bundles pass dumped"
        )

    @functools.cached_property
    def _fingerprints(self) -> dict[str, tuple]:
        """What instructions must have in common if libtpu dumped only one of them, by name."""
        return {name: self._fingerprint(i) for name, i in self.instructions.items()}

    def _fingerprint(self, i: Instruction) -> tuple:
        shapes = tuple(
            str(self.instructions[operand].shape)
            for operand in i.operands
            if operand in self.instructions
        )
        if i.opcode == "custom-call":
            kernel = i.attributes.get("backend_config", "")
        else:
            kernel = ""
        inside = i.inside if i.opcode == "fusion" else ()
        return (
            i.opcode,
            str(i.shape),
            shapes,
            kernel,
            tuple((self._fingerprint(j), j.literal) for j in inside),
        )


def read_dump(folder: pathlib.Path) -> Dump:
    """Reads the folder that `--xla_jf_dump_to` named. DumpError says why it is no dump of one
    program.
    """
    if not folder.is_dir():
        raise DumpError(f"{folder} is no folder: give the one that --xla_jf_dump_to wrote to")
    paths = sorted(folder.iterdir())
    files = [(m[2], m[1], path) for path in paths if (m := _BUNDLES.fullmatch(path.name))]
    originals = {m[1]: path for path in reversed(paths) if (m := _ORIGINAL.fullmatch(path.name))}
    if (tops := sum(name == TOP for name, _, _ in files)) != 1:
        raise DumpError(
            f"{folder} holds the final bundles of {tops} programs, and must hold those of one: "
            f"compile one jitted function with --xla_jf_dump_to={folder} "
            "--xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=(final_bundles|original) into an empty folder, or "
            "let play() do it"
        )
    module = read_scheduled(folder)
    programs = {
        name: _read_complete(name, path, originals.get(beginning))
        for name, beginning, path in files
        if not name.startswith(_SET_UP)
    }
    instructions = {i.name: i for i in module.instructions}
    return Dump(folder, programs, module, read_note(folder), instructions)


def read_scheduled(folder: pathlib.Path) -> HloModule:
    """Reads the scheduled HLO of a dump. DumpError says that the folder has none."""
    texts = list(folder.glob(f"*-{TOP}-hlo.txt"))
    if not texts:
        raise DumpError(
            f"{folder} lacks *-TLP-hlo.txt, the scheduled HLO: compile with "
            "--xla_jf_dump_hlo_text=true"
        )
    try:
        return parse(texts[0].read_text())
    except HloError as error:
        raise DumpError(f"{texts[0]} cannot be read: {error}; compile again") from error


def write_note(folder: pathlib.Path, note: Note) -> None:
    (folder / _NOTE).write_text(json.dumps(dataclasses.asdict(note), indent=1) + "\n")


def read_note(folder: pathlib.Path) -> Note:
    try:
        read = json.loads((folder / _NOTE).read_text())
        return Note(read["topology"], read["libtpu"], tuple(tuple(c) for c in read["coords"]))
    except FileNotFoundError:
        return Note()
    except (ValueError, KeyError, TypeError) as error:
        raise DumpError(
            f"{folder / _NOTE} is damaged ({error!r}): remove it, and name the topology"
        ) from error


def _read_complete(name: str, bundles: pathlib.Path, original: pathlib.Path | None) -> Program:
    """Reads a program from a *-final_bundles.txt and the *-original.txt beside it, and checks that
    it has its end.
    """
    if original is None:
        raise DumpError(
            f"{bundles.name} has no *-original.txt beside it, which declares its buffers: add "
            "'original' to --xla_jf_dump_llo_pass_label_regex"
        )
    program = read_program(name, bundles, original)
    if name == TOP:
        complete = any(
            o.name == "inlined_call" and "late-finalization" in o.comment
            for o in program.bundles[-1]
        )
    else:
        with bundles.open("rb") as stream:
            stream.seek(max(0, bundles.stat().st_size - 4096))
            complete = b"exit bundle" in stream.read()
    missing = [
        o.target
        for b in program.bundles
        for o in b
        if o.target >= 0 and o.target not in program.regions
    ]
    if not complete or missing:
        what = "the exit bundle is missing"
        if missing:
            what = f"region {missing[0]} is branched to but missing"
        raise DumpError(
            f"{bundles.name} was cut short after bundle {len(program.bundles) - 1:#x}: {what}; "
            "compile again"
        )
    return program
