"""`check_async_compatible`: whether a call of a compiled function makes the host wait, why, and
what to do about it.

A call of a compiled function should return at once and leave the devices working. Two things can
prevent that: calls back into Python, and values that the host must read back before the program can
go on. Which of them do depends on the platform; docs/dispatch.md has the measurement or the source
behind each rule of this file.

The answer is based on public signals (signals.py). The private flags of JAX can turn the answer
True into False, and never the reverse.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax

from flaxasync.check.compile.program import CompiledProgram
from flaxasync.check.dispatch.command_buffers import (
    LoopKind,
    cuda_note,
    flags_for,
    may_capture,
)
from flaxasync.check.dispatch.signals import (
    Callback,
    DispatchedProgram,
    read_flags,
    read_path,
    read_program,
    read_traced,
)
from flaxasync.hardware import is_gpu

_GPU = ("gpu", "cuda", "rocm")
_MEASURE = "measure it on that device: flaxasync.check.measure_dispatch(fn, *args)"


@dataclasses.dataclass(frozen=True, eq=False)
class DispatchInfo(Mapping[str, Any]):
    """What `check_async_compatible` found. `print` shows it in words.

    It is also a mapping: `info["compatible"]` is `info.compatible`, and so on for every field.
    """

    # True if the call returns while the devices work, False if not, None if it is not known
    compatible: bool | None
    # effects in any order, like that of jax.debug.print; None if it is not known
    has_unordered_effects: bool | None
    issues: tuple[str, ...]  # those of `reasons` for which the answer is not True; empty if it is
    ordered_effects: tuple[str, ...]  # the names of the effects that must come in order
    has_host_callbacks: bool | None  # whether the program calls Python; None if it is not known
    # the calls into Python, each with its line if the program contains it
    callbacks: tuple[Callback, ...]
    dynamic_loops: tuple[str, ...]  # the loops without a known trip count, which matter on a GPU
    # the `lax.cond` and `lax.switch` that are left in the program, which matter on a GPU
    branches: tuple[str, ...]
    reasons: tuple[str, ...]  # the answer in words, and what else is worth knowing
    remedies: tuple[str, ...]  # what to do, if there is something to do
    signals: tuple[str, ...]  # the names of the signals that were read
    path: str  # the path of JAX on which calls go, "C++" or "Python"; "" if JAX does not say
    platform: str  # "cpu", "gpu" or "tpu"; "" if it is not known
    devices: int  # that the program runs on; 0 if it is not known

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)

    def __str__(self) -> str:
        answer = {True: "the host does not wait", False: "THE HOST WAITS", None: "cannot tell"}[
            self.compatible
        ]
        lines = [f"dispatch on {self.devices} {self.platform or 'unknown'} device(s): {answer}"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"  do {remedy}" for remedy in self.remedies]
        lines += [f"  calls go through JAX's {self.path} path"] if self.path else []
        return "\n".join([*lines, f"  read: {', '.join(self.signals) or 'nothing'}"])


def check_async_compatible(compiled: Any, *, traced: Any = None) -> DispatchInfo:
    """Says whether a call of a compiled function returns while the devices still work.

    The answer for `jitted.lower(...).compile()` also holds for calls of `jitted` itself: both were
    measured, and they behave alike.

    Args:
      compiled: What `jitted.lower(*args).compile()` or `compile_for` returned.
      traced: `jitted.trace(*args)`, a further public signal. It also shows callbacks that XLA has
        removed from the program and for which JAX waits nevertheless. It is lowered again for this.

    Raises:
      ValueError: `compiled` is not a compiled function, or `traced` was not traced.
    """
    if not isinstance(compiled, jax.stages.Compiled | CompiledProgram):
        raise ValueError(
            f"compiled must be a compiled function: got {type(compiled).__name__}; get one with "
            "jax.jit(fn).lower(*args).compile()"
        )
    if traced is not None and not isinstance(traced, jax.stages.Traced):
        raise ValueError(
            f"traced must be a jax.stages.Traced: got {type(traced).__name__}; pass "
            "jitted.trace(*args)"
        )
    platform, devices = _placement(compiled)
    program = read_program(compiled, platform)
    found = (program.signal, None if traced is None else read_traced(traced), read_flags(compiled))
    signals = [signal for signal in found if signal is not None]
    has_callbacks = any(signal.has_host_callbacks for signal in signals)
    if program.unread:
        judged = [_Judgement(None, program.unread, _MEASURE)]
    else:
        judged = []
    judged += _of_device(platform, devices)
    judged += [_of_callbacks(platform, devices, program)] if has_callbacks else []
    judged += _of_decisions(platform, program)
    judged = judged or [
        _Judgement(True, "nothing in it calls the host or needs a value from the devices to go on")
    ]
    answers = {judgement.compatible for judgement in judged}
    return DispatchInfo(
        compatible=_together(answers),
        has_unordered_effects=any(s.has_unordered_effects for s in signals) if signals else None,
        ordered_effects=next(
            (s.ordered_effects for s in reversed(signals) if s.ordered_effects), ()
        ),
        has_host_callbacks=has_callbacks if signals else None,
        callbacks=program.callbacks,
        dynamic_loops=program.dynamic_loops,
        branches=program.branches,
        issues=tuple(judgement.reason for judgement in judged if judgement.compatible is not True),
        reasons=tuple(judgement.reason for judgement in judged),
        remedies=tuple(dict.fromkeys(judgement.remedy for judgement in judged if judgement.remedy)),
        signals=tuple(s.name for s in signals),
        platform=platform,
        devices=devices,
        path=read_path(compiled),
    )


def make_async_aot_caller(compiled: Any) -> Any:
    """Returns a compiled function whose calls do not make the host wait, or raises an error.

    A loop that relies on steps being dispatched ahead calls this once, before the first iteration.
    The function is returned as it was given, because JAX's own call of it is the fastest one
    (docs/dispatch.md).

    Args:
      compiled: What `jitted.lower(*args).compile()` returned.

    Raises:
      ValueError: `compiled` is not a compiled function, or was compiled for devices that the
        machine does not have.
      NotImplementedError: The function has effects or callbacks, or makes the host wait for another
        reason.
    """
    info = check_async_compatible(compiled)
    if not callable(compiled):
        raise ValueError(
            f"compiled must be callable: got a program for {compiled.chip}, which is not here"
        )
    effects = info.callbacks or info.has_unordered_effects or info.ordered_effects
    if effects or info.compatible is False:
        raise NotImplementedError(
            "no way of calling it keeps the host from its effects or its waiting: "
            f"{'; '.join(info.reasons)}; "
            f"{'; '.join(info.remedies) or 'take the callback out of the function'}"
        )
    return compiled


@dataclasses.dataclass(frozen=True)
class _Judgement:
    """What one fact means for the answer: whether the call is compatible with it, why, and what to
    do about it.
    """

    compatible: bool | None
    reason: str
    remedy: str = ""


def _of_device(platform: str, devices: int) -> list[_Judgement]:
    if platform not in ("cpu", "tpu", *_GPU):
        reason = f"it was not measured how programs run on {platform or 'an unknown device'}"
        return [_Judgement(None, reason, _MEASURE)]
    if platform == "cpu" and devices == 1 and not jax.config.read("jax_cpu_enable_async_dispatch"):
        reason = (
            "the CPU runs every program within the call: jax_cpu_enable_async_dispatch is False"
        )
        remedy = 'jax.config.update("jax_cpu_enable_async_dispatch", True) before JAX is first used'
        return [_Judgement(False, reason, remedy)]
    return []


def _of_callbacks(platform: str, devices: int, program: DispatchedProgram) -> _Judgement:
    """Judges calls into Python, including those that XLA has removed from the program."""
    what = "JAX has a callback for it that is not in the program's text, as when XLA has removed it"
    if program.callbacks:
        what = f"{_listed(program.callbacks)} calls Python on the host"
    remedy = (
        "take it out of the function: return the value, and print it or pass it on after the call"
    )
    if platform == "cpu" and devices == 1:
        return _Judgement(
            False, f"{what}, and the CPU then runs the whole program within the call", remedy
        )
    if platform == "cpu":
        return _Judgement(True, f"{what}; on several CPU devices the call returns before that")
    if platform in _GPU and not program.callbacks and not program.unread:
        return _Judgement(
            True, f"{what}; a GPU does not wait for it (3 to 4 % of a call on an H100)"
        )
    if platform in _GPU:
        return _Judgement(
            False,
            f"{what}, which a GPU program waits for (84 to 99 % of a call on an H100)",
            remedy,
        )
    return _Judgement(
        None, f"{what}; it was not measured whether the call waits for that", _MEASURE
    )


def _of_decisions(platform: str, program: DispatchedProgram) -> list[_Judgement]:
    """Judges loops and branches for which a GPU must ask the host."""
    if platform == "tpu":
        reason = (
            "TPU text never notes a trip count, and needs none here: a TPU runs loops and branches "
            "by itself; dynamic_loops are those that could not be counted by hand"
        )
        return [_Judgement(True, reason)]
    if platform not in _GPU:
        return []
    judged = []
    at_once = [branch for branch in program.branches if branch not in program.late_branches]
    if at_once:
        reason = (
            f"a branch: {_listed(at_once)}; its index is there at once (2.7 % of a call on an H100)"
        )
        judged.append(_Judgement(True, reason))
    if program.dynamic_loops:
        what = f"no known trip count: {_listed(program.dynamic_loops)}"
        why = "the host reads its condition back every time (99 % of a call on an H100)"
        judged.append(_of_command("WHILE", what, why, program))
    if program.late_branches:
        what = f"a branch: {_listed(program.late_branches)}"
        why = "the host reads back which one to take, once that is computed (by XLA's source)"
        judged.append(_of_command("CONDITIONAL", what, why, program))
    return judged


def _of_command(command: str, what: str, why: str, program: DispatchedProgram) -> _Judgement:
    """Judges loops or branches that wait for the host, unless a GPU runs them as this command."""
    if may_capture(command, os.environ.get("XLA_FLAGS", "")):
        reason = f"{what}; XLA_FLAGS may put it into a command buffer, which no text says"
        return _Judgement(None, reason, _MEASURE)
    return _Judgement(False, f"{what}; {why}", _into_command_buffers(program))


def _into_command_buffers(program: DispatchedProgram) -> str:
    commands = ["WHILE"] * bool(program.dynamic_loops) + ["CONDITIONAL"] * bool(
        program.late_branches
    )
    kind: LoopKind = "nested" if program.has_nested_loops or program.late_branches else "dynamic"
    remedy = (
        f"add {flags_for(*commands)} to XLA_FLAGS, which "
        f"flaxasync.check.command_buffer_flags({kind!r}) tries ({cuda_note(kind)[1]})"
    )
    if not program.dynamic_loops:
        return remedy
    return (
        "give loops a trip count that is known when they are compiled (scan, or fori_loop with "
        f"Python bounds), or {remedy}"
    )


def _together(answers: Set[bool | None]) -> bool | None:
    """Returns the answer to several questions: False if one is, else None if one is not known."""
    if False in answers:
        return False
    if None in answers:
        return None
    return True


def _listed(things: Sequence[object]) -> str:
    if len(things) > 3:
        more = f" and {len(things) - 3} more"
    else:
        more = ""
    return ", ".join(map(str, things[:3])) + more


def _placement(compiled: Any) -> tuple[str, int]:
    """Returns the platform and the number of devices; ("", 0) for a function that has neither
    inputs nor outputs.
    """
    if isinstance(compiled, CompiledProgram):
        platform = "gpu" if is_gpu(compiled.chip) else "tpu"
        return platform, len(compiled.coords)
    for sharding in jax.tree.leaves((compiled.output_shardings, compiled.input_shardings)):
        for device in getattr(sharding, "device_set", ()):
            return device.platform, len(sharding.device_set)
    return "", 0
