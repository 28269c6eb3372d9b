"""Programs that a process compiled, in memory or in a folder. Reading a folder needs no JAX.

A folder has one file of HLO text for each program, and for each capture one file `programs-HOST-PID-NUMBER.jsonl`,
which has one line of JSON for each of its programs: the name of the file, the seconds of the compilation, the memory,
and so on. Several captures, processes and hosts can share a folder.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import platform
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from flaxasync.check.hlo.files import read_text
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import Shape

_FACTS = "programs-{}.jsonl"


@dataclasses.dataclass(frozen=True)
class CapturedProgram:
    """One compiled program. `audit`, `timeline` and `summarize` take it.

    Attributes:
      name: The name of the module, such as "jit_step".
      platform: "tpu", "gpu" or "cpu".
      chip: The name of the chip, such as "v5e"; None if it is none that the package knows.
      devices: The number of devices.
      seconds: How long JAX took to compile the program, or to load it from its cache of compiled programs.
      memory: The entries `*_in_bytes` of JAX's memory analysis for one device. Empty if the platform gives none.
      axes: The sizes of the mesh axes, by name; empty if the program does not name them.
      file: The file of the text; None if the program is in memory only.
      read: Returns the HLO text, after optimization and scheduling.
    """

    name: str
    platform: str
    chip: str | None
    devices: int
    seconds: float
    memory: Mapping[str, int]
    axes: Mapping[str, int]
    file: pathlib.Path | None
    read: Callable[[], str] = dataclasses.field(repr=False, compare=False)

    def as_text(self) -> str:
        return self.read()

    def memory_analysis(self) -> Any:
        return types.SimpleNamespace(**self.memory)

    @property
    def argument_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the arguments on one device."""
        parameters = parse(self.as_text()).entry.parameters
        return tuple(parameters[n].shape for n in sorted(parameters))

    @property
    def result_shape(self) -> Shape:
        """The shape of the result on one device; a tuple if there are several."""
        root = parse(self.as_text()).entry.root
        assert root is not None  # `parse` gives every computation a root
        return root.shape


class Folder:
    """A folder to which one capture writes its programs.

    Args:
      path: The folder. It is made if it does not exist.

    Raises:
      OSError: The folder cannot be made or written to.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path).absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._count = 0
        self._claim()

    def write(self, program: CapturedProgram) -> CapturedProgram:
        """Writes a program, and returns it with its file. The facts follow the text, so that no fact lacks its text."""
        if os.getpid() != self._pid:  # this process is a fork of the one that began to record
            self._facts.close()  # of this process; the parent has its own
            self._claim()
        self._count += 1
        file = self.path / f"{self._name}-{self._count:04}-{program.name[:100]}.txt"
        file.write_text(program.as_text())
        facts = {f.name: getattr(program, f.name) for f in dataclasses.fields(program) if f.name != "read"}
        self._facts.write(json.dumps(facts | {"file": file.name}) + "\n")
        self._facts.flush()
        return dataclasses.replace(program, file=file, read=lambda: read_text(file))

    def close(self) -> None:
        self._facts.close()

    def _claim(self) -> None:
        """Makes a file of facts that is nobody else's, whose name begins the names of this capture's files.

        The number at the end tells captures of one process apart, and processes of equal PIDs on hosts of equal names,
        such as containers.
        """
        self._pid = os.getpid()
        host = re.sub(r"[^\w.]+", "_", platform.node()) or "host"
        for number in itertools.count(1):
            self._name = f"{host}-{self._pid}-{number:03}"
            try:
                self._facts: IO[str] = (self.path / _FACTS.format(self._name)).open("x")
                return
            except FileExistsError:
                continue


def read_folder(path: str | os.PathLike) -> list[CapturedProgram]:
    """Returns the programs of a folder, capture by capture, in the order in which they were compiled.

    Raises:
      ValueError: The folder has no captured programs, or a file of facts is not one of this package.
      OSError: The folder cannot be read.
    """
    folder = pathlib.Path(path)
    files = sorted(folder.glob(_FACTS.format("*")))
    if not files:
        raise ValueError(
            f"{folder} has no captured programs (no file {_FACTS.format('*')}): capture them with "
            f"FLAXASYNC_CAPTURE={folder}, or python -m flaxasync.check capture {folder} -- script.py"
        )
    return [program for file in files for program in _read_facts(file)]


def _read_facts(file: pathlib.Path) -> Iterator[CapturedProgram]:
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            facts = json.loads(line)
            text = file.parent / facts.pop("file")
            yield CapturedProgram(**facts, file=text, read=lambda text=text: read_text(text))  # type: ignore[misc]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and not line.endswith("}"):
                return  # the process was ended while it wrote this line
            raise ValueError(f"{file}:{number}: this is no line of a captured program ({error})") from error
