"""`capture`: records every program that JAX compiles in this process, without a change to the code
that compiles it.

JAX tells the listeners of `jax.monitoring` that it has compiled a program, or has loaded it from
its cache of compiled programs. The program is then the newest one that its backend lists as alive,
with its final text and its memory. JAX's other hook,
`jax.extend.xla.register_hlo_module_transformation`, comes too early: on TPU its text has no memory
spaces, and a program from the cache never comes.

A folder has two files for each program: `HOST-PID-NUMBER-NAME.txt` is its HLO text, and the file of
the same name that ends in `.json` has the seconds of the compilation, the memory, and so on. It is
written after the text, and at once, so that it never lacks its text. Several captures, processes
and hosts can share a folder. Reading one needs no JAX.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import platform
import re
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from flaxasync.check.compile.program import CompiledProgram, listeners
from flaxasync.check.hlo.load import read_text
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import Shape
from flaxasync.hardware import chip_of_device

VARIABLE = "FLAXASYNC_CAPTURE"
EVENT = "/jax/core/compile/backend_compile_duration"

_NAME = re.compile(r"HloModule ([\w.\-]+)")
_DEVICES = re.compile(r"\b(num_partitions|replica_count)=(\d+)")
_lock = threading.Lock()
_recorders: list["_Recorder"] = []  # those that record now; every one of them gets every program
# the newest executable that was seen, by backend; it is kept, so that its place is known
_newest: dict[Any, Any] = {}
_numbers = itertools.count(1)  # of the programs that this process writes


@dataclasses.dataclass(frozen=True)
class CapturedProgram:
    """One compiled program. `audit`, `timeline` and `summarize` take it."""

    name: str  # of the module, such as "jit_step"
    platform: str  # "tpu", "gpu" or "cpu"
    chip: str | None  # its name, such as "v5e"; None if it is none that the package knows
    devices: int  # their number
    # in which JAX compiled the program, or loaded it from its cache of compiled programs
    seconds: float
    # the entries `*_in_bytes` of JAX's memory analysis for one device; {} if there is none
    memory: Mapping[str, int]
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
        except (
            FileExistsError
        ):  # of a process of equal PID, on a host of equal name, such as a container
            continue
    facts = {
        f.name: getattr(program, f.name)
        for f in dataclasses.fields(program)
        if f.name not in ("text", "file")
    }
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(facts))
    unfinished.replace(file.with_suffix(".json"))
    return dataclasses.replace(program, file=file)


def read_folder(path: str | os.PathLike) -> list[CapturedProgram]:
    """Returns the programs of a folder, process by process, in the order in which they were
    compiled.

    Raises:
      ValueError: The folder has no captured programs, or a file of facts is not one of this
        package.
      OSError: The folder cannot be read.
    """
    folder = pathlib.Path(path)
    programs = []
    for file in sorted(folder.glob("*.json")):
        text = file.with_suffix(".txt")
        try:
            programs.append(
                CapturedProgram(**json.loads(file.read_text()), text=read_text(text), file=text)
            )
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file}: these are no facts of a captured program ({error})"
            ) from error
    if not programs:
        raise ValueError(
            f"{folder} has no captured programs: capture them with FLAXASYNC_CAPTURE={folder}, or "
            f"python -m flaxasync.check capture {folder} -- script.py"
        )
    return programs


class _Recorder:
    """A list of programs, which are also written to a folder if there is one. It grows until `stop`
    is called.
    """

    def __init__(self, folder: str | os.PathLike | None):
        import jax  # here, because reading a folder of programs needs no JAX

        self.programs: list[CapturedProgram] = []
        self.folder = None if folder is None else pathlib.Path(folder).absolute()
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        with _lock:
            if not _recorders:
                jax.monitoring.register_event_duration_secs_listener(_compiled)
                listeners.append(_compiled_for)
            _recorders.append(self)

    def stop(self) -> None:
        import jax

        with _lock:
            _recorders.remove(self)
            if not _recorders:
                jax.monitoring.unregister_event_duration_listener(_compiled)
                listeners.remove(_compiled_for)
                _newest.clear()


@contextlib.contextmanager
def capture(folder: str | os.PathLike | None = None) -> Iterator[list[CapturedProgram]]:
    """Records every program that JAX compiles in this process inside of a `with` block, in all of
    its threads.

        with fa.check.capture() as programs:
            train()
        print(fa.check.audit(programs[-1]))

    Programs that `compile_for` makes come, too. A function that was compiled before the block does
    not come again: JAX keeps its executable in memory.

    Args:
      folder: Where the programs are also written, for `python -m flaxasync.check FOLDER`.

    Yields:
      A list that grows with each program.

    Raises:
      OSError: The folder cannot be written to. Raised where the program is compiled.
    """
    recorder = _Recorder(folder)
    try:
        yield recorder.programs
    finally:
        recorder.stop()


def capture_from_environment() -> None:
    """Records until the process ends, if FLAXASYNC_CAPTURE names a folder. `import flaxasync` calls
    this.
    """
    if folder := os.environ.get(VARIABLE):
        _Recorder(folder)


def _compiled(event: str, duration_secs: float, **facts: str | int) -> None:
    """Records the programs that were compiled since the last call. JAX calls this with each of its
    durations.
    """
    if event != EVENT:
        return
    import jax.extend.backend

    name = re.sub(r"[^\w.\-]", "_", str(facts.get("fun_name"))).rstrip("_")
    with _lock:
        for backend in set(jax.extend.backend.backends().values()):
            alive = backend.live_executables()  # the newest first
            if backend in _newest:
                known = next((n for n, one in enumerate(alive) if one is _newest[backend]), 0)
                new = alive[:known]
            else:  # nothing is known yet of this backend, which may have executables from before the recording
                new = [one for one in alive[:1] if one.hlo_modules()[0].name.rstrip("_") == name]
            for executable in reversed(new):
                _add(_program(executable, duration_secs))
            if alive:
                _newest[backend] = alive[0]


def _compiled_for(program: CompiledProgram, seconds: float) -> None:
    """Records a program that `compile_for` made in another process."""
    name = _NAME.match(program.text)
    with _lock:
        _add(
            CapturedProgram(
                name=name[1] if name else "unnamed",
                platform="tpu",
                chip=program.chip,
                devices=len(program.coords),
                seconds=seconds,
                memory=program.memory,
                axes=program.axes,
                text=program.text,
            )
        )


def _add(program: CapturedProgram) -> None:
    for recorder in _recorders:
        recorder.programs.append(
            program if recorder.folder is None else write_program(recorder.folder, program)
        )


def _program(executable: Any, seconds: float) -> CapturedProgram:
    """Returns the program of an executable, which does not know its mesh axes: they are those of
    `jax.set_mesh`.
    """
    import jax

    module = executable.hlo_modules()[0]  # an executable has one of them on every platform today
    text = module.to_string()
    device = (executable.local_devices() or executable.client.devices())[0]
    chip = chip_of_device(device.device_kind)
    stats = executable.get_compiled_memory_stats()
    return CapturedProgram(
        name=module.name,
        platform=device.platform,
        chip=None if chip is None else chip.name,
        devices=math.prod(map(int, dict(_DEVICES.findall(text.partition("\n")[0])).values())),
        seconds=seconds,
        memory={name: getattr(stats, name) for name in dir(stats) if name.endswith("_in_bytes")},
        axes=dict(jax.sharding.get_abstract_mesh().shape),
        text=text,
    )
