"""A dump folder -> Dump: the programs by name, the HLO module, and which libtpu and topology they were made for.

libtpu writes no version of its own. `play` leaves a note (player.json) beside the dumps that has it; a folder without
the note is read when its form is that of a tested version, and the result says that the version is unknown.
"""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Mapping

from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.reader import parse
from flaxasync.check.player.bundle_text import Program, read_program
from flaxasync.check.player.errors import DumpError

TESTED_LIBTPU = ("0.0.51", "0.0.52")
TOP = "TLP"  # the top level program: what the entry computation became
NOTE = "player.json"
SYNCHRONOUS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-broadcast")
SKIPPED = "<late-"  # runtime set-up and tear-down: no part of the program

_BUNDLES = re.compile(r"\d+-(.+)-(\d\d)-final_bundles\.txt")
_FRAME = re.compile(r"(\d+) \{file_location_id=(\d+)")
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+) .*?line=(\d+)")
_FILE = re.compile(r'(\d+) "(.*)"')
_STACK_FRAME = re.compile(r"stack_frame_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Note:
    """What only the process that compiled knew."""

    topology: str = ""
    libtpu: str = ""
    coords: tuple[tuple[int, ...], ...] = ()  # of each partition, in the mesh's order


@dataclasses.dataclass(eq=False)
class Dump:
    folder: pathlib.Path
    programs: dict[str, Program]
    module: HloModule
    note: Note
    instructions: dict[str, Instruction]
    _sources: Mapping[str, str]

    @property
    def top(self) -> Program:
        return self.programs[TOP]

    @property
    def devices(self) -> int:
        return max(self.module.num_partitions, 1)

    def top_name(self, mark: int) -> str:
        """Returns the HLO instruction that a trace mark stands for."""
        return self.top.marks.get(mark, f"instruction {mark}")

    def source(self, instruction: str) -> str:
        """Returns file:line of the Python that an HLO instruction comes from, or an empty string."""
        found = self.instructions.get(instruction)
        match = _STACK_FRAME.search(found.attributes.get("metadata", "")) if found else None
        return self._sources.get(match[1], "") if match else ""

    def collective(self, name: str) -> Instruction | None:
        """Returns the instruction of this name, or the collective in that fusion; None for other fusions."""
        found = self.instructions.get(name)
        if found is None or found.opcode != "fusion":
            return found
        for computation in found.called_computations:
            for i in self.module.computations[computation].instructions:
                if i.opcode in SYNCHRONOUS:
                    return i
        return None

    def is_half(self, name: str) -> bool:
        """Says whether an instruction is a fusion that only starts a collective, or only ends one."""
        found = self.instructions.get(name)
        return found is not None and any(
            i.custom_call_target.startswith("AsyncCollective")
            for computation in found.called_computations
            for i in self.module.computations[computation].instructions
        )

    @functools.cache  # noqa: B019  one dump a run
    def fingerprint(self, name: str) -> tuple:
        """Returns what two instructions must share for libtpu to have dumped only one of them."""
        i = self.instructions[name]
        shapes = tuple(str(self.instructions[operand].shape) for operand in i.operands if operand in self.instructions)
        kernel = i.attributes.get("backend_config", "") if i.opcode == "custom-call" else ""
        inner = tuple(
            (self.fingerprint(j.name), j.literal)
            for computation in (i.called_computations if i.opcode == "fusion" else ())
            for j in self.module.computations[computation].instructions
        )
        return i.opcode, str(i.shape), shapes, kernel, inner

    def program_of(self, instruction: str) -> tuple[Program, str]:
        """Returns the bundles of an HLO instruction, and the name of the one they were dumped under.

        libtpu dumps identical fusions once, and shortens long names.

        Raises:
          DumpError: there are none.
        """
        if instruction in self.programs:
            return self.programs[instruction], instruction
        for name in sorted(self.programs):
            if len(name) > 40 and instruction.startswith(name):
                return self.programs[name], name
            known = name in self.instructions and instruction in self.instructions
            if known and self.fingerprint(name) == self.fingerprint(instruction):
                return self.programs[name], name
        raise DumpError(
            f"{self.folder} has no bundles for {instruction}: it holds {', '.join(sorted(self.programs)[:8])} ...; "
            "compile again into an empty folder, with every final_bundles pass dumped"
        )


def read_dump(folder: str | pathlib.Path, *, any_version: bool = False) -> Dump:
    """Reads a folder of libtpu's bundle dumps.

    Args:
      folder: where `--xla_jf_dump_to` pointed.
      any_version: also read dumps of a libtpu that the player was not tested with.

    Raises:
      DumpError: there is no dump, more than one program, a part is missing or cut short, or the version is another one.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise DumpError(f"{folder} is no folder: give the one that --xla_jf_dump_to wrote to")
    note = _read_note(folder)
    if note.libtpu and note.libtpu not in TESTED_LIBTPU and not any_version:
        raise DumpError(
            f"{folder} was dumped by libtpu {note.libtpu}; the player was tested with {', '.join(TESTED_LIBTPU)}. "
            "Compile with one of these, or pass any_version=True (--any-version) and trust the figures less"
        )
    files = [(m[1], path) for path in sorted(folder.iterdir()) if (m := _BUNDLES.fullmatch(path.name))]
    if not files:
        raise DumpError(
            f"{folder} holds no *-final_bundles.txt: compile with --xla_jf_dump_to={folder} "
            "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=(final_bundles|original), or let "
            "play() do it"
        )
    names = [name for name, _ in files]
    if names.count(TOP) != 1:
        found = "no top level program" if TOP not in names else f"{names.count(TOP)} programs"
        raise DumpError(f"{folder} holds {found}: compile one jitted function into an empty folder")
    programs = {}
    for name, path in files:
        if name.startswith(SKIPPED):
            continue
        programs[name] = read_program(name, path, _original(path))
        _check_whole(programs[name])
    texts = list(folder.glob("*-TLP-hlo.txt"))
    if not texts:
        raise DumpError(f"{folder} lacks *-TLP-hlo.txt, the scheduled HLO: compile with --xla_jf_dump_hlo_text=true")
    text = texts[0].read_text()
    module = parse(text)
    instructions = {i.name: i for c in module.computations.values() for i in c.instructions}
    return Dump(folder, programs, module, note, instructions, _sources(text))


def write_note(folder: pathlib.Path, note: Note) -> None:
    """Leaves beside the dumps what the compiling process knew."""
    (folder / NOTE).write_text(json.dumps(dataclasses.asdict(note), indent=1) + "\n")


def _read_note(folder: pathlib.Path) -> Note:
    try:
        read = json.loads((folder / NOTE).read_text())
        return Note(read["topology"], read["libtpu"], tuple(tuple(c) for c in read["coords"]))
    except FileNotFoundError:
        return Note()
    except (ValueError, KeyError, TypeError) as error:
        raise DumpError(f"{folder / NOTE} is damaged ({error!r}): remove it, and name the topology yourself") from error


def _original(path: pathlib.Path) -> pathlib.Path:
    found = sorted(
        path.parent.glob(re.sub(r"([\[\]*?])", r"[\1]", path.name[: -len("03-final_bundles.txt")]) + "*-original.txt")
    )
    if not found:
        raise DumpError(
            f"{path.name} has no *-original.txt beside it, which declares its buffers: add 'original' to "
            "--xla_jf_dump_llo_pass_label_regex"
        )
    return found[0]


def _check_whole(program: Program) -> None:
    """Raises DumpError when the text ends before the program does."""
    last = program.bundles[-1]
    if program.name == TOP:
        whole = any(o.name == "inlined_call" and "late-finalization" in o.comment for o in last.operations)
    else:
        with program.path.open("rb") as stream:
            stream.seek(max(0, program.path.stat().st_size - 4096))
            whole = b"exit bundle" in stream.read()
    missing = [
        o.target for b in program.bundles for o in b.operations if o.target >= 0 and o.target not in program.regions
    ]
    if not whole or missing:
        what = f"region {missing[0]} is branched to but missing" if missing else "the exit bundle is missing"
        raise DumpError(f"{program.path.name} was cut short after bundle {last.address:#x}: {what}; compile again")


def _sources(text: str) -> dict[str, str]:
    """Maps stack frame numbers to file:line, from the tables before the first computation."""
    head = text[: text.find("\n%")] if "\n%" in text else text[:100_000]
    sections = dict(re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", head, re.M))
    files = dict(_FILE.findall(sections.get("FileNames", "")))
    locations = {m[0]: (m[1], m[2]) for m in _LOCATION.findall(sections.get("FileLocations", ""))}
    sources = {}
    for frame, location in _FRAME.findall(sections.get("StackFrames", "")):
        if location in locations:
            file, line = locations[location]
            sources[frame] = f"{files.get(file, '?')}:{line}"
    return sources
