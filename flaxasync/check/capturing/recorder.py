"""`capture`: records every program that JAX compiles in this process, without a change to the code that compiles it.

JAX 0.12 has a public hook, `jax.extend.xla.register_hlo_module_transformation`. It gives the module right after the
scheduler, which is too early here: on TPU that module has no memory spaces and no number of partitions, and a program
that JAX loads from its cache of compiled programs never comes. The recorder therefore wraps the one function through
which JAX gets every executable, ahead of time or not, and takes the final text, the memory and the time from there. The
function is private to JAX; a test notices if it moves.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from flaxasync.check.capturing.programs import CapturedProgram, Folder
from flaxasync.check.compile.program import CompiledProgram, listeners
from flaxasync.hardware import chip_of_device

VARIABLE = "FLAXASYNC_CAPTURE"

_NAME = re.compile(r"HloModule ([\w.\-]+)")
_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_lock = threading.Lock()
_recorders: list["Recorder"] = []  # those that record now; every one of them gets every program
_original: Any = None  # the function of JAX, while it is wrapped


class Recorder:
    """Collects programs, and writes them to a folder if there is one."""

    def __init__(self, folder: str | os.PathLike | None):
        self.programs: list[CapturedProgram] = []
        self._folder = None if folder is None else Folder(folder)

    def add(self, program: CapturedProgram) -> None:
        self.programs.append(program if self._folder is None else self._folder.write(program))

    def start(self) -> None:
        """Begins to record."""
        with _lock:
            if not _recorders:
                _wrap()
            _recorders.append(self)

    def stop(self) -> None:
        """Ends the recording."""
        with _lock:
            _recorders.remove(self)
            if not _recorders:
                _unwrap()
        if self._folder is not None:
            self._folder.close()


@contextlib.contextmanager
def capture(folder: str | os.PathLike | None = None) -> Iterator[list[CapturedProgram]]:
    """Records every program that JAX compiles in this process inside of a `with` block, in all of its threads.

        with fa.check.capture() as programs:
            train()
        print(fa.check.audit(programs[-1]))

    Programs that `compile_for` makes come, too. A function that was compiled before the block does not come again: JAX
    keeps its executable in memory.

    Args:
      folder: Where the programs are also written, for `python -m flaxasync.check FOLDER`.

    Yields:
      A list that grows with each program.

    Raises:
      OSError: The folder cannot be written to. Raised where the program is compiled.
      RuntimeError: This version of JAX has no place at which its programs can be recorded.
    """
    recorder = Recorder(folder)
    recorder.start()
    try:
        yield recorder.programs
    finally:
        recorder.stop()


def capture_from_environment() -> None:
    """Records until the process ends, if FLAXASYNC_CAPTURE names a folder. `import flaxasync` calls this."""
    if folder := os.environ.get(VARIABLE):
        Recorder(folder).start()


def _wrap() -> None:
    global _original
    from jax._src import compiler

    try:
        original = _original = compiler.compile_or_get_cached
    except AttributeError:
        from jax import __version__

        raise RuntimeError(f"flaxasync cannot record the programs of jax {__version__}: use jax 0.12") from None

    def record(backend: Any, computation: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        executable = original(backend, computation, devices, *args, **kwargs)
        seconds = time.perf_counter() - began
        _add(_programs(executable, computation, devices, seconds))
        return executable

    compiler.compile_or_get_cached = record
    listeners.append(_listen)


def _unwrap() -> None:
    from jax._src import compiler

    compiler.compile_or_get_cached = _original
    listeners.remove(_listen)


def _listen(program: CompiledProgram, seconds: float) -> None:
    """Records a program that `compile_for` made in another process."""
    name = _NAME.match(program.text)
    _add([
        CapturedProgram(
            name=name[1] if name else "unnamed",
            platform="tpu",
            chip=program.chip,
            devices=len(program.coords),
            seconds=seconds,
            memory=program.memory,
            axes=program.axes,
            file=None,
            read=program.as_text,
        )
    ])  # fmt: skip


def _add(programs: list[CapturedProgram]) -> None:
    with _lock:
        for recorder in _recorders:
            for program in programs:
                recorder.add(program)


def _programs(executable: Any, computation: Any, devices: Any, seconds: float) -> list[CapturedProgram]:
    """Returns the programs of an executable, which has one of them on every platform today."""
    device = devices.flat[0]
    chip = chip_of_device(device.device_kind)
    stats = executable.get_compiled_memory_stats()
    memory = {name: getattr(stats, name) for name in dir(stats) if name.endswith("_in_bytes")}
    return [
        CapturedProgram(
            name=module.name,
            platform=device.platform,
            chip=None if chip is None else chip.name,
            devices=devices.size,
            seconds=seconds,
            memory=memory,
            axes=_axes(computation),
            file=None,
            read=module.to_string,
        )
        for module in executable.hlo_modules()
    ]


def _axes(computation: Any) -> dict[str, int]:
    """Returns the axes of the first mesh that a lowered module names."""
    meshes = (str(o) for o in computation.body.operations if o.operation.name == "sdy.mesh")
    found = ({name: int(size) for name, size in _AXIS.findall(mesh.partition("{")[0])} for mesh in meshes)
    return next(filter(None, found), {})
