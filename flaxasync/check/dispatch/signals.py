"""Reads what in a compiled function can make the host wait, from three sources.

The text of the program contains the callbacks, the loops and the branches that run. The lowered
text of a `Traced` contains the callbacks that JAX registers with the executable, even those that
XLA removes later, and its jaxpr contains the effects. The flags of the executable say how JAX chose
to call it. They are private to JAX, so they are read if they exist, and compatibility.py never
depends on them.
"""

import dataclasses
from typing import Any

import jax

from flaxasync.check.hlo.async_operations import COLLECTIVES
from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.origins import CALLBACK, HOST_TRANSFERS, callback_name, is_host_callback
from flaxasync.check.hlo.reader import parse
from flaxasync.check.hlo.shapes import HloError
from flaxasync.check.hlo.trip_count import trip_count

# beside matmuls
_WORK = frozenset({"call", "conditional", "custom-call", "sort", "while", *COLLECTIVES})


@dataclasses.dataclass(frozen=True)
class Callback:
    """A call from the program into Python."""

    name: str  # of what was called, in public: "jax.debug.print", "jax.pure_callback", ...
    source: str  # "file:line" of the call; "" if the text does not say
    has_effect: bool  # whether it runs for its effect
    ordered: bool  # whether its effect is ordered

    def __str__(self) -> str:
        if self.source:
            return f"{self.name} at {self.source}"
        return self.name


@dataclasses.dataclass(frozen=True)
class Signal:
    """What one of the three sources says about effects and callbacks."""

    name: str
    has_unordered_effects: bool
    ordered_effects: tuple[str, ...]
    has_host_callbacks: bool


@dataclasses.dataclass(frozen=True)
class DispatchedProgram:
    """What a text says: the calls into Python, and each loop and branch as "computation/instruction
    at file:line".
    """

    callbacks: tuple[Callback, ...] = ()
    dynamic_loops: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    # those of `branches` whose index is computed by work, or within a loop
    late_branches: tuple[str, ...] = ()
    has_nested_loops: bool = False  # whether one of its loops contains another one
    unread: str = ""  # why there is no text, or why it could not be read

    @property
    def signal(self) -> Signal | None:
        if self.unread:
            return None
        ordered = tuple(c.name for c in self.callbacks if c.ordered)
        unordered = any(c.has_effect and not c.ordered for c in self.callbacks)
        return Signal("the program's text", unordered, ordered, bool(self.callbacks))


def read_program(compiled: Any, platform: str) -> DispatchedProgram:
    """Reads the text of a compiled program.

    On CPU and GPU the text gives the trip counts that XLA's runtime uses. On TPU it never gives
    one, so counting loops are recognized from their instructions.
    """
    try:
        text = compiled.as_text()
    except NotImplementedError:
        text = None
    if not text:
        return DispatchedProgram(unread="this platform gives no text of a compiled program")
    try:
        module = parse(text)
    except HloError as error:
        return DispatchedProgram(unread=f"the program's text could not be read ({error})")
    callbacks = []
    loops = []
    branches = []
    late_branches = []
    has_nested_loops = False
    for i in module.instructions:
        place = f"{i.computation.name}/{i.name}" + (f" at {i.source}" if i.source else "")
        if is_host_callback(i):
            callbacks.append(_callback(i))
        elif i.opcode == "conditional":
            branches.append(place)
            if not i.computation.is_entry or _is_late(i):
                late_branches.append(place)
        elif i.opcode == "while":
            has_nested_loops |= any(one.opcode == "while" for one in i.nested() if one is not i)
            is_counted = "known_trip_count" in i.backend_config or (
                platform == "tpu" and trip_count(i) is not None
            )
            if not is_counted:
                loops.append(place)
    return DispatchedProgram(
        callbacks=tuple(dict.fromkeys(callbacks)),
        dynamic_loops=tuple(loops),
        branches=tuple(branches),
        late_branches=tuple(late_branches),
        has_nested_loops=has_nested_loops,
    )


def _is_late(branch: Instruction) -> bool:
    """Says whether the index of a branch needs more work of the program than a few elementwise
    operations.
    """
    index, *_ = branch.inputs
    pending = [index]
    seen = {index.name}
    while pending:
        one = pending.pop()
        if one.opcode in _WORK or one.contains_matmul:
            return True
        for operand in one.inputs:
            if operand.name not in seen:
                seen.add(operand.name)
                pending.append(operand)
    return False


def read_traced(traced: jax.stages.Traced) -> Signal:
    """Reads `jitted.trace(*args)`. It is lowered for this, because a pure_callback is not an effect
    of the jaxpr.
    """
    names = sorted(type(effect).__name__ for effect in traced.jaxpr.effects)
    ordered = tuple(name for name in names if name.startswith("Ordered"))
    has_callbacks = CALLBACK.search(traced.lower().as_text()) is not None
    return Signal(
        "the jaxpr's effects and the lowered program",
        len(ordered) < len(names),
        ordered,
        has_callbacks,
    )


def read_flags(compiled: Any) -> Signal | None:
    """Returns the flags by which JAX chooses how to call; None if this version of JAX has no such
    flags.
    """
    call: Any = getattr(getattr(compiled, "_executable", None), "unsafe_call", None)
    try:
        ordered = tuple(type(effect).__name__ for effect in call.ordered_effects)
        unordered = bool(call.has_unordered_effects)
        callbacks = bool(call.has_host_callbacks)
    except AttributeError:
        return None
    return Signal("the executable's private flags", unordered, ordered, callbacks)


def read_path(compiled: Any) -> str:
    """Returns the path of JAX on which calls of a compiled function go: "C++" or "Python"; "" if
    JAX does not say.

    A call asks the executable for a dispatcher in C++, as here, and runs in Python where it gets
    none.
    """
    executable: Any = getattr(compiled, "_executable", None)
    params: Any = getattr(compiled, "_params", None)
    if params is None or not hasattr(executable, "create_cpp_call"):
        return ""
    if executable.create_cpp_call(params) is None:
        return "Python"
    return "C++"


def _callback(i: Instruction) -> Callback:
    ordered = (
        "token[]" in i.attributes.get("operand_layout_constraints", "")
        or i.opcode in HOST_TRANSFERS
    )
    has_effect = (
        i.attributes.get("custom_call_has_side_effect") == "true" or i.opcode in HOST_TRANSFERS
    )
    return Callback(callback_name(i), i.source, has_effect, ordered)
