"""`check_async_compatible`: does calling this compiled function make the host wait, why, and what to do about it.

A call of a compiled function should return at once and leave the devices working. Two things can prevent that: calls
back into Python, and values that the host must read back to go on. Which of them do, depends on the platform;
docs/dispatch.md has the measurements behind each rule here. Public signals decide (`dispatch_signals.py`). The private
one can only take back a True.
"""

import dataclasses
import os
from typing import Any

import jax

from flaxasync.check.compile.compile_for import CompiledProgram
from flaxasync.check.dispatch import evidence as read
from flaxasync.check.dispatch.command_buffers import may_capture_loops
from flaxasync.check.dispatch.evidence import Callback, Decision, Program, listed
from flaxasync.check.hlo.module import HloError

_GPU = ("gpu", "cuda", "rocm")
_MEASURE = "measure it on that device: flaxasync.check.measure_dispatch(fn, *args)"


@dataclasses.dataclass(frozen=True)
class DispatchInfo:
    """What `check_async_compatible` found. `print` shows it in words.

    Attributes:
      compatible: True, the call returns while the devices work; False, it makes the host wait; None, cannot tell.
      has_unordered_effects: the program has effects that may come in any order (jax.debug.print); None, cannot tell.
      ordered_effects: effects that must come in order, by name.
      has_host_callbacks: the program calls Python; None, cannot tell.
      callbacks: those calls, with the line of Python where the program carries it.
      dynamic_loops: loops without a known trip count. They matter on a GPU.
      branches: `lax.cond` and `lax.switch` that are left in the program. They matter on a GPU.
      reasons: the verdict in words, and what else is worth knowing.
      remedies: what to do, where there is something.
      signals: what was read for it.
      platform: "cpu", "gpu", "tpu", or "" where nothing says it.
      devices: how many devices the program runs on; 0 where nothing says it.
    """

    compatible: bool | None
    has_unordered_effects: bool | None
    ordered_effects: tuple[str, ...]
    has_host_callbacks: bool | None
    callbacks: tuple[Callback, ...]
    dynamic_loops: tuple[Decision, ...]
    branches: tuple[Decision, ...]
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]
    signals: tuple[str, ...]
    platform: str
    devices: int

    def __str__(self) -> str:
        verdict = {True: "the host does not wait", False: "THE HOST WAITS", None: "cannot tell"}[self.compatible]
        lines = [f"dispatch on {self.devices} {self.platform or 'unknown'} device(s): {verdict}"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"  do {remedy}" for remedy in self.remedies]
        return "\n".join([*lines, f"  read: {', '.join(self.signals) or 'nothing'}"])


def check_async_compatible(compiled: Any, *, traced: Any = None) -> DispatchInfo:
    """Says whether a call of a compiled function returns while the devices still work.

    What holds for `jitted.lower(...).compile()` holds for calls of `jitted` itself: they were measured alike.

    Args:
      compiled: what `jitted.lower(*args).compile()` or `compile_for` returned.
      traced: `jitted.trace(*args)`, a further public signal: it also tells of callbacks that XLA removed from the
        program, for which JAX waits none the less. It is lowered again for that.

    Returns:
      The verdict, its reasons and its remedies.

    Raises:
      ValueError: `compiled` is no compiled function, or `traced` was not traced.
    """
    _need_compiled(compiled)
    if traced is not None and not isinstance(traced, jax.stages.Traced):
        raise ValueError(f"traced must be a jax.stages.Traced: got {type(traced).__name__}; pass jitted.trace(*args)")
    platform, devices = _placement(compiled)
    program, unread = _read_program(compiled, platform)
    verdict = _Verdict(platform, devices)
    if unread:
        verdict.unsure(unread, _MEASURE)
    signals = [] if unread else [program.signal]
    signals += [] if traced is None else [read.read_traced(traced)]
    flags = read.read_flags(compiled)
    signals += [] if flags is None else [flags]
    verdict.device()
    if any(signal.has_host_callbacks for signal in signals):
        verdict.callbacks(program.callbacks)
    verdict.decisions(program)
    if not verdict.reasons:
        verdict.note("nothing in it calls the host or needs a value from the devices to go on")
    return DispatchInfo(
        compatible=verdict.compatible,
        has_unordered_effects=any(s.has_unordered_effects for s in signals) if signals else None,
        ordered_effects=next((s.ordered_effects for s in reversed(signals) if s.ordered_effects), ()),
        has_host_callbacks=any(s.has_host_callbacks for s in signals) if signals else None,
        callbacks=program.callbacks,
        dynamic_loops=program.dynamic_loops,
        branches=program.branches,
        reasons=tuple(verdict.reasons),
        remedies=tuple(dict.fromkeys(verdict.remedies)),
        signals=tuple(s.name for s in signals),
        platform=platform,
        devices=devices,
    )


class _Verdict:
    """Collects what speaks for and against, by the rules of the platform."""

    def __init__(self, platform: str, devices: int):
        self.compatible: bool | None = True
        self.reasons: list[str] = []
        self.remedies: list[str] = []
        self._platform, self._devices = platform, devices

    def note(self, reason: str) -> None:
        self.reasons.append(reason)

    def blocks(self, reason: str, remedy: str) -> None:
        self.compatible = False
        self.reasons.append(reason)
        self.remedies.append(remedy)

    def unsure(self, reason: str, remedy: str) -> None:
        self.compatible = None if self.compatible else self.compatible
        self.reasons.append(reason)
        self.remedies.append(remedy)

    def device(self) -> None:
        """Judges the device itself."""
        if self._platform not in ("cpu", "tpu", *_GPU):
            self.unsure(f"it was not measured how programs run on {self._platform or 'an unknown device'}", _MEASURE)
        if self._platform == "cpu" and self._devices == 1 and not cpu_is_asynchronous():
            self.blocks(
                "the CPU runs every program within the call: jax_cpu_enable_async_dispatch is False",
                'jax.config.update("jax_cpu_enable_async_dispatch", True) before JAX is first used',
            )

    def callbacks(self, found: tuple[Callback, ...]) -> None:
        """Judges calls into Python, those that XLA removed included."""
        what = "JAX has a callback for it that is not in the program's text, as when XLA has removed it"
        what = f"{listed(found)} calls Python on the host" if found else what
        remedy = "take it out of the function: return the value, and print it or pass it on after the call"
        if self._platform == "cpu" and self._devices == 1:
            self.blocks(f"{what}, and the CPU then runs the whole program within the call", remedy)
        elif self._platform == "cpu":
            self.note(f"{what}; on several CPU devices the call returns before that")
        elif self._platform in _GPU:
            self.blocks(f"{what}, which a GPU program waits for (the study's measurement; not measured here)", remedy)
        else:
            self.unsure(f"{what}; it was not measured whether the call waits for that", _MEASURE)

    def decisions(self, program: Program) -> None:
        """Judges loops and branches that depend on values."""
        if self._platform == "tpu":
            self.note(
                "TPU text never notes a trip count, and needs none here: a TPU runs loops and branches by itself; "
                "dynamic_loops are those that could not be counted by hand"
            )
        if self._platform not in _GPU:
            return
        decisions = (
            ("no known trip count", "the host reads its condition back every time", program.dynamic_loops),
            ("a branch", "the host reads back which one to take", program.branches),
        )
        for kind, why, found in decisions:
            if found and may_capture_loops(os.environ.get("XLA_FLAGS", "")):
                self.unsure(f"{kind}: {listed(found)}; XLA_FLAGS may put it into a command buffer, which no text says",
                            _MEASURE)  # fmt: skip
            elif found:
                self.blocks(
                    f"{kind}: {listed(found)}; {why} (XLA's source; not measured here)",
                    "give loops a trip count that is known when they are compiled (scan, or fori_loop with Python "
                    "bounds), or add flaxasync.check.command_buffer_flags() to XLA_FLAGS",
                )


def cpu_is_asynchronous() -> bool:
    """Reads jax_cpu_enable_async_dispatch, which counts when JAX first opens the CPU; without it there is no switch."""
    try:
        return bool(jax.config.read("jax_cpu_enable_async_dispatch"))
    except AttributeError:
        return True


def _need_compiled(compiled: Any) -> None:
    if isinstance(compiled, jax.stages.Compiled | CompiledProgram):
        return
    how = "jax.jit(fn).lower(*args).compile()"
    if isinstance(compiled, jax.stages.Traced):
        how = "traced.lower().compile()"
    elif isinstance(compiled, jax.stages.Lowered):
        how = "lowered.compile()"
    elif hasattr(compiled, "lower") and callable(compiled):
        how = "fn.lower(*args).compile()"
    raise ValueError(f"compiled must be a compiled function: got {type(compiled).__name__}; get one with {how}")


def _placement(compiled: Any) -> tuple[str, int]:
    """Returns (platform, number of devices), or ("", 0) for a function that has neither inputs nor outputs."""
    if isinstance(compiled, CompiledProgram):
        return "tpu", len(compiled.coords)
    for sharding in jax.tree.leaves((compiled.output_shardings, compiled.input_shardings)):
        for device in getattr(sharding, "device_set", ()):
            return device.platform, len(sharding.device_set)
    return "", 0


def _read_program(compiled: Any, platform: str) -> tuple[Program, str]:
    """Returns what the text says, or nothing and why."""
    try:
        text = compiled.as_text()
    except NotImplementedError:
        text = None
    if not text:
        return Program(), "this platform gives no text of a compiled program"
    try:
        return read.read_text(text, platform), ""
    except HloError as error:
        return Program(), f"the program's text could not be read ({error})"
