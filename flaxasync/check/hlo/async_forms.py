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
from collections.abc import Mapping
from typing import NamedTuple

from flaxasync.check.hlo.async_operations import FIRST_CLASS, async_operations, step_of
from flaxasync.check.hlo.module import CONTROL_FLOW, Computation, HloModule, Instruction
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
# opcodes that may bring a future from another computation
CARRIERS = ("get-tuple-element", "parameter", *CONTROL_FLOW)
# older texts repeat these at the update and the done
_OLD = ("calls", "async_execution_thread", "async_group_id")
_LATER = ("update", "done")


class Chain(NamedTuple):
    """The steps of one asynchronous operation that follow one another in one computation."""

    futures: tuple[Instruction, ...]  # the start and its updates
    done: Instruction | None

    def bound(self, until: int | None = None) -> list[Shape]:
        """Returns the shapes of the operands that so many of the futures, or all, bind."""
        start, *updates = self.futures[:until]
        return [made.shape for made in (*start.inputs, *(m for u in updates for m in u.inputs[1:]))]


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
            stem, role = step_of(i.opcode)
            is_short = stem not in ("async", *FIRST_CLASS)
            if i.opcode == "async-start":
                wraps[i.name] = tuple(called.root.opcode for called in i.called)
            elif role == "start" and is_short:
                called = _called_by_short_call(i)
                if called is None:
                    called = _wrapped(i, chain(i), next(free))
                    # a computation is printed before its caller
                    computations[called.name] = called
                wraps[i.name] = (called.root.opcode,)
                changes[i.name] = _generic(i, called.name)
            elif role in _LATER:
                if i.operands and i.operands[0] in wraps:
                    wraps[i.name] = wraps[i.operands[0]]
                is_old = stem == "async" and not i.attributes.keys().isdisjoint(_OLD)
                if is_old or (is_short and _fits(i, stem, wraps.get(i.name))):
                    changes[i.name] = _without_old(i, f"async-{role}")
        if changes:
            computation = _changed(computation, changes)
        computations[computation.name] = computation
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
        short = _shortened(op.start)
        stem = "async"
        if short is not None:
            changes[op.computation][op.name] = short
            gone.update(op.start.called_computations)
            stem = step_of(short.opcode).stem
        for i in (*op.updates, *(window.done for window in op.windows)):
            stems.setdefault((i.computation.name, i.name), set()).add(stem)
    for (where, name), found in stems.items():
        i = module.computations[where].by_name[name]
        if len(found) == 1 and step_of(i.opcode).stem == "async":
            opcode = f"{found.pop()}-{step_of(i.opcode).role}"
            changes[where][name] = dataclasses.replace(i, opcode=opcode)
    kept = {
        name: _changed(c, changes[name])
        for name, c in module.computations.items()
        if name not in gone
    }
    return dataclasses.replace(module, computations=kept)


def chain(start: Instruction) -> Chain:
    """Returns the steps that follow a start of any form, each the first user that is one."""
    steps = [start]
    while step_of(steps[-1].opcode).role != "done":
        last = steps[-1]
        onward = [
            user
            for user in last.users
            if step_of(user.opcode).role in _LATER and user.operands[0] == last.name
        ]
        if not onward:
            return Chain(tuple(steps), None)
        steps.append(onward[0])
    return Chain(tuple(steps[:-1]), steps[-1])


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


def _called_by_short_call(start: Instruction) -> Computation | None:
    """Returns the computation that a call-start wraps itself; None if one must be made for it."""
    if start.opcode != "call-start" or "to_apply" not in start.attributes:
        return None
    name = start.attributes["to_apply"].lstrip("%")
    called = start.computation.module.computations[name]
    if only_instruction(called) is None:
        return None
    return called


def _generic(start: Instruction, called: str) -> Instruction:
    own = {key: value for key, value in start.attributes.items() if key in _OF_START}
    return dataclasses.replace(
        start, opcode="async-start", attributes=own | {"calls": f"%{called}"}
    )


def _wrapped(start: Instruction, steps: Chain, name: str) -> Computation:
    """Returns the computation that a short start stands for: its parameters and one instruction."""
    last = steps.futures[-1]
    if steps.done is not None:
        result = steps.done.shape
    else:
        result = last.shape.at((1,)) or Shape("tuple")
    opcode = step_of(start.opcode).stem
    parameters = tuple(
        Instruction(f"p{n}", shape, "parameter", literal=str(n), line=start.line)
        for n, shape in enumerate(_parameters(steps.bound(), last.shape.at((0,))))
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


def _fits(step: Instruction, stem: str, wrapped: tuple[str, ...] | None) -> bool:
    """Says whether an update or a done may belong to its start.

    It names what that wraps, or a call; or the start is in another computation.
    """
    if wrapped is None:
        before = [made.opcode for made in step.inputs[:1]]
        return any(opcode in CARRIERS or opcode.endswith("-update") for opcode in before)
    return stem in ("call", *wrapped)


def _shortened(start: Instruction) -> Instruction | None:
    """Returns the short form of an async-start; None if reading that would not give the same
    computation.
    """
    if len(start.called) != 1:
        return None
    (called,) = start.called
    root = only_instruction(called)
    if root is None or len(called.callers) > 1 or called.is_entry:
        return None
    if root.opcode in FIRST_CLASS or step_of(root.opcode).role:
        return None
    own = {key: value for key, value in start.attributes.items() if key != "calls"}
    of_root = {
        key: value for key, value in root.attributes.items() if key not in ("metadata", *own)
    }
    if "metadata" in root.attributes:
        own.setdefault("metadata", root.attributes["metadata"])
    short = dataclasses.replace(start, opcode=f"{root.opcode}-start", attributes=of_root | own)
    if _parts(_wrapped(short, chain(start), called.name)) == _parts(called):
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
    """Returns a copy of a computation with some of its instructions changed, by their names."""
    instructions = tuple(
        changes.get(i.name) or dataclasses.replace(i) for i in computation.instructions
    )
    return dataclasses.replace(computation, instructions=instructions)
