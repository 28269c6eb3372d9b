"""Programs that a process compiled, in memory or in a folder. Reading a folder needs no JAX.

A folder has two files for each program: `HOST-PID-NUMBER-NAME.txt` is its HLO text, and the file of the same name that
ends in `.json` has the seconds of the compilation, the memory, and so on. It is written after the text, and at once, so
that it never lacks its text. Several captures, processes and hosts can share a folder.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import platform
import re
import types
from collections.abc import Mapping
from typing import Any

from flaxasync.check.hlo.load import read_text
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import Shape

_numbers = itertools.count(1)  # of the programs that this process writes


@dataclasses.dataclass(frozen=True)
class CapturedProgram:
    """One compiled program. `audit`, `timeline` and `summarize` take it."""

    name: str  # of the module, such as "jit_step"
    platform: str  # "tpu", "gpu" or "cpu"
    chip: str | None  # its name, such as "v5e"; None if it is none that the package knows
    devices: int  # their number
    seconds: float  # in which JAX compiled the program, or loaded it from its cache of compiled programs
    memory: Mapping[str, int]  # the entries `*_in_bytes` of JAX's memory analysis for one device; {} if there is none
    axes: Mapping[str, int]  # the sizes of the mesh axes, by name; {} if they are not known
    text: str = dataclasses.field(repr=False)  # HLO, after optimization and scheduling
    file: pathlib.Path | None = None  # of the text; None if the program is in memory only

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> Any:
        return types.SimpleNamespace(**self.memory)

    @property
    def argument_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the arguments on one device."""
        parameters = parse(self.text).entry.parameters
        return tuple(parameters[n].shape for n in sorted(parameters))


def write_program(folder: pathlib.Path, program: CapturedProgram) -> CapturedProgram:
    host = re.sub(r"[^\w.]+", "_", platform.node()) or "host"
    while True:
        file = folder / f"{host}-{os.getpid()}-{next(_numbers):05}-{program.name[:100]}.txt"
        try:
            with file.open("x") as opened:
                opened.write(program.text)
            break
        except FileExistsError:  # of a process of equal PID, on a host of equal name, such as a container
            continue
    facts = {f.name: getattr(program, f.name) for f in dataclasses.fields(program) if f.name not in ("text", "file")}
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(facts))
    unfinished.replace(file.with_suffix(".json"))
    return dataclasses.replace(program, file=file)


def read_folder(path: str | os.PathLike) -> list[CapturedProgram]:
    """Returns the programs of a folder, process by process, in the order in which they were compiled.

    Raises:
      ValueError: The folder has no captured programs, or a file of facts is not one of this package.
      OSError: The folder cannot be read.
    """
    folder = pathlib.Path(path)
    programs = []
    for file in sorted(folder.glob("*.json")):
        text = file.with_suffix(".txt")
        try:
            programs.append(CapturedProgram(**json.loads(file.read_text()), text=read_text(text), file=text))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}: these are no facts of a captured program ({error})") from error
    if not programs:
        raise ValueError(
            f"{folder} has no captured programs: capture them with FLAXASYNC_CAPTURE={folder}, or "
            f"python -m flaxasync.check capture {folder} -- script.py"
        )
    return programs
