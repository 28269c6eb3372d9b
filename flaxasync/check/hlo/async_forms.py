"""The two forms of a generic asynchronous operation, and what turns a module from one into the
other.

The generic form is `async-start(...), calls=%wrapped`, whose computation has parameters and one
instruction. The short form, called sugar, is `op-start(...)` with the attributes of that
instruction, and no computation in the text:

```
%s = ((f32[64]), f32[32], s32[]) custom-call-start(%x), custom_call_target="foo"
%d = f32[32] custom-call-done(%s)
```

`parse` reads both as the generic form, and `format_module` writes either. An operation whose opcode
has a start and a done of its own (`FIRST_CLASS`) has no short form, because `copy-start` already
means something else. `call-start(...), to_apply=%f` calls a computation of any length: if %f has
one instruction, that is what is wrapped, and the call if not.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping

from flaxasync.check.hlo.async_operations import FIRST_CLASS, async_operations, step_of_opcode
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape

# The attributes that belong to the start itself. Every other attribute belongs to the instruction
# that it wraps.
_OF_START = (
    "async_execution_thread",
    "control-predecessors",
    "output_to_operand_aliasing",
    "metadata",
    "backend_config",
    "frontend_attributes",
    "sharding",
    "statistics",
    "origin",
)
# older texts repeat these at the update and the done
_OLD = ("calls", "async_execution_thread", "async_group_id")
_STEP = re.compile(r"([\w\-]+)-(start|update|done)")


def to_generic(module: HloModule) -> HloModule:
    """Returns the module with every short form as async-start, async-update and async-done."""
    computations: dict[str, Computation] = {}
    numbered = (f"async_computation.{n}" for n in itertools.count(1))
    free = (
        name
        for name in itertools.chain(["async_computation"], numbered)
        if name not in module.computations
    )
    for computation in module.computations.values():
        changes: dict[str, Instruction] = {}
        # What the start of each step wraps, by the name of the step, as far as it is in this
        # computation.
        wraps: dict[str, tuple[str, ...]] = {}
        for i in computation.instructions:
            stem, step = short_step(i.opcode)
            if i.opcode == "async-start":
                wraps[i.name] = tuple(called.root.opcode for called in module.called(i))
            elif step_of_opcode(i.opcode) and i.operands and i.operands[0] in wraps:
                wraps[i.name] = wraps[i.operands[0]]
            if step == "start":
                called = _called_by_short_call(module, i)
                wraps[i.name] = (module.computations[called].root.opcode if called else stem,)
                if not called:
                    wrapped = _wrapped(computation, i, next(free))
                    # a computation is printed before its caller
                    computations[wrapped.name] = wrapped
                    called = wrapped.name
                changes[i.name] = _generic(i, called)
            elif step and _fits(computation, i, stem, wraps.get(i.name)):
                changes[i.name] = _without_old(i, f"async-{step}")
            elif i.opcode in ("async-update", "async-done") and any(
                key in i.attributes for key in _OLD
            ):
                changes[i.name] = _without_old(i, i.opcode)
        computations[computation.name] = _changed(computation, changes)
    return dataclasses.replace(module, computations=computations)


def to_short(module: HloModule) -> HloModule:
    """Returns the module with the short form of every operation that has one. The rest stays in the
    generic form.
    """
    changes: dict[str, dict[str, Instruction]] = {name: {} for name in module.computations}
    # of each update and done, by the operations that it may belong to
    stems: dict[tuple[str, str], set[str]] = {}
    gone: set[str] = set()
    for op in async_operations(module):
        if op.start.opcode != "async-start":
            continue
        computation = module.computations[op.computation]
        short = _shortened(module, computation, op.start)
        if short is not None:
            changes[op.computation][op.name] = short
            gone.update(op.start.called_computations)
        if short is None:
            stem = "async"
        else:
            stem = short.opcode.removesuffix("-start")
        steps = [(module.computations[op.computation], i) for i in op.updates]
        steps += [(module.computations[window.computation], window.done) for window in op.windows]
        for at, i in steps:
            stems.setdefault((at.name, i.name), set()).add(stem)
    for computation in module.computations.values():
        for i in computation.instructions:
            found = stems.get((computation.name, i.name), set())
            if i.opcode in ("async-update", "async-done") and len(found) == 1:
                opcode = f"{next(iter(found))}-{step_of_opcode(i.opcode)}"
                changes[computation.name][i.name] = dataclasses.replace(i, opcode=opcode)
    kept = {
        name: _changed(c, changes[name])
        for name, c in module.computations.items()
        if name not in gone
    }
    return dataclasses.replace(module, computations=kept)


def short_step(opcode: str) -> tuple[str, str]:
    """Returns ("custom-call", "start") for the short form "custom-call-start"; ("", "") for any
    other opcode.
    """
    match = _STEP.fullmatch(opcode)
    if match is None or match[1] in ("async", *FIRST_CLASS):
        return "", ""
    return match[1], match[2]


def chain(computation: Computation, start: Instruction) -> list[Instruction]:
    """Returns the start, the updates and the done that follow one another in one computation, of
    any form.
    """
    steps = [start]
    while step_of_opcode(steps[-1].opcode) != "done":
        users = computation.users.get(steps[-1].name, ())
        onward = [
            user
            for user in users
            if step_of_opcode(user.opcode) and user.operands[0] == steps[-1].name
        ]
        if not onward:
            break
        steps.append(onward[0])
    return steps


def operands_of(computation: Computation, steps: Iterable[Instruction]) -> list[Shape]:
    """Returns the shapes of the operands that a start and its updates bind, without the futures."""
    names: list[str] = []
    for step in steps:
        role = step_of_opcode(step.opcode)
        names += () if role == "done" else step.operands[1:] if role == "update" else step.operands
    return [computation.by_name[name].shape for name in names]


def only_instruction(wrapped: Computation) -> Instruction | None:
    """Returns the only instruction beside the parameters, if it takes all of them in order; None
    otherwise.
    """
    if sorted(wrapped.parameters) != list(range(len(wrapped.parameters))):
        return None
    parameters = tuple(wrapped.parameters[n].name for n in range(len(wrapped.parameters)))
    is_only = (
        len(wrapped.instructions) == len(parameters) + 1 and wrapped.root.operands == parameters
    )
    if is_only:
        return wrapped.root
    return None


def _without_old(step: Instruction, opcode: str) -> Instruction:
    kept = {key: value for key, value in step.attributes.items() if key not in _OLD}
    return dataclasses.replace(step, opcode=opcode, attributes=kept)


def _called_by_short_call(module: HloModule, start: Instruction) -> str:
    """Returns the name of the computation that a call-start wraps itself; "" if a computation must
    be made for it.
    """
    name = start.attributes.get("to_apply", "").lstrip("%")
    if start.opcode != "call-start" or name not in module.computations:
        return ""
    if only_instruction(module.computations[name]) is not None:
        return name
    return ""


def _generic(start: Instruction, called: str) -> Instruction:
    own = {key: value for key, value in start.attributes.items() if key in _OF_START}
    return dataclasses.replace(
        start, opcode="async-start", attributes=own | {"calls": f"%{called}"}
    )


def _wrapped(computation: Computation, start: Instruction, name: str) -> Computation:
    """Returns the computation that a short form stands for: its parameters and one instruction."""
    steps = chain(computation, start)
    is_done = step_of_opcode(steps[-1].opcode) == "done"
    if is_done and len(steps) > 1:
        last = steps[-2]
    else:
        last = steps[-1]
    if is_done:
        result = steps[-1].shape
    else:
        result = last.shape.at((1,)) or Shape("tuple")
    opcode = start.opcode.removesuffix("-start")
    parameters = tuple(
        Instruction(f"p{n}", shape, "parameter", literal=str(n), line=start.line)
        for n, shape in enumerate(_parameters(operands_of(computation, steps), last.shape.at((0,))))
    )
    attributes = {key: value for key, value in start.attributes.items() if key not in _OF_START}
    if "metadata" in start.attributes:
        attributes["metadata"] = start.attributes["metadata"]
    operands = tuple(p.name for p in parameters)
    root = Instruction(opcode, result, opcode, operands, attributes, is_root=True, line=start.line)
    thread = start.attributes.get("async_execution_thread", "").strip('"') or "main"
    return Computation(name, (*parameters, root), execution_thread=thread)


def _parameters(bound: list[Shape], declared: Shape | None) -> list[Shape]:
    """Returns the shapes of parameters: those that the future declares, unless they contradict the
    operands.

    An update may bind the buffers of results, too, which are operands that the future does not
    declare.
    """
    if declared is not None and declared.is_tuple:
        shapes = list(declared.elements)
    else:
        shapes = []
    fit = len(shapes) <= len(bound) and all(
        a.is_like(b) for a, b in zip(shapes, bound, strict=False)
    )
    if fit and (shapes or not bound):
        return shapes
    return bound


def _fits(
    computation: Computation, step: Instruction, stem: str, wrapped: tuple[str, ...] | None
) -> bool:
    """Says whether an update or a done may belong to its start.

    It names what that wraps, or a call; or the start is in another computation.
    """
    if wrapped is None:
        carriers = ("get-tuple-element", "parameter", "while", "conditional", "call")
        before = [computation.by_name[name].opcode for name in step.operands[:1]]
        return any(opcode in carriers or opcode.endswith("-update") for opcode in before)
    return stem in ("call", *wrapped)


def _shortened(
    module: HloModule, computation: Computation, start: Instruction
) -> Instruction | None:
    """Returns the short form of an async-start; None if reading that would not give the same
    computation.
    """
    called = module.called(start)
    if len(called) == 1:
        root = only_instruction(called[0])
    else:
        root = None
    if root is None or root.opcode in FIRST_CLASS or len(module.callers[called[0].name]) > 1:
        return None
    if _STEP.fullmatch(root.opcode) or called[0].is_entry:
        return None
    own = {key: value for key, value in start.attributes.items() if key != "calls"}
    of_root = {
        key: value for key, value in root.attributes.items() if key not in ("metadata", *own)
    }
    if "metadata" in root.attributes:
        own.setdefault("metadata", root.attributes["metadata"])
    short = dataclasses.replace(start, opcode=f"{root.opcode}-start", attributes=of_root | own)
    again = _wrapped(computation, short, called[0].name)
    if _parts(again) == _parts(called[0]):
        return short
    return None


def _parts(wrapped: Computation) -> list[object]:
    """Returns what must be the same in two wrapped computations: all but names and metadata."""
    found: list[object] = [wrapped.execution_thread]
    for i in wrapped.instructions:
        attributes = {key: value for key, value in i.attributes.items() if key != "metadata"}
        found.append((i.shape, i.opcode, i.literal, attributes))
    return found


def _changed(computation: Computation, changes: Mapping[str, Instruction]) -> Computation:
    """Returns a computation with some of its instructions changed, by their names."""
    if not changes:
        return computation
    instructions = tuple(changes.get(i.name, i) for i in computation.instructions)
    return dataclasses.replace(computation, instructions=instructions)
