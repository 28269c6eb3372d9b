"""`capture`: records every program that JAX compiles in this process, without a change to the code that compiles it.

JAX tells the listeners of `jax.monitoring` that it has compiled a program, or has loaded it from its cache of compiled
programs. The program is then the newest one that its backend lists as alive, with its final text and its memory. JAX's
other hook, `jax.extend.xla.register_hlo_module_transformation`, comes too early: on TPU its text has no memory spaces,
and a program from the cache never comes.
"""

import contextlib
import math
import os
import pathlib
import re
import threading
from collections.abc import Iterator
from typing import Any

from flaxasync.check.capturing.programs import CapturedProgram, write_program
from flaxasync.check.compile.program import CompiledProgram, listeners
from flaxasync.hardware import chip_of_device

VARIABLE = "FLAXASYNC_CAPTURE"
EVENT = "/jax/core/compile/backend_compile_duration"

_NAME = re.compile(r"HloModule ([\w.\-]+)")
_DEVICES = re.compile(r"\b(num_partitions|replica_count)=(\d+)")
_lock = threading.Lock()
_recorders: list["_Recorder"] = []  # those that record now; every one of them gets every program
_newest: dict[Any, Any] = {}  # the newest executable that was seen, by backend; it is kept, so that its place is known


class _Recorder:
    """A list of programs, which are also written to a folder if there is one. It grows until `stop` is called."""

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
    """
    recorder = _Recorder(folder)
    try:
        yield recorder.programs
    finally:
        recorder.stop()


def capture_from_environment() -> None:
    """Records until the process ends, if FLAXASYNC_CAPTURE names a folder. `import flaxasync` calls this."""
    if folder := os.environ.get(VARIABLE):
        _Recorder(folder)


def _compiled(event: str, duration_secs: float, **facts: str | int) -> None:
    """Records the programs that were compiled since the last call. JAX calls this with each of its durations."""
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
        _add(CapturedProgram(
            name=name[1] if name else "unnamed", platform="tpu", chip=program.chip, devices=len(program.coords),
            seconds=seconds, memory=program.memory, axes=program.axes, text=program.text,
        ))  # fmt: skip


def _add(program: CapturedProgram) -> None:
    for recorder in _recorders:
        recorder.programs.append(program if recorder.folder is None else write_program(recorder.folder, program))


def _program(executable: Any, seconds: float) -> CapturedProgram:
    """Returns the program of an executable, which does not know its mesh axes: they are those of `jax.set_mesh`."""
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
