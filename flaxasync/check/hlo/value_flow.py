"""Where a value goes: through tuples, loops, branches and aliased outputs, to the instructions that use it.

`trace` follows one array of one instruction's result forward. Each use comes with the spans of the schedule that run
between the value's birth and that use, so that a value which a loop carries into its next iteration is seen to live
through the loop's back edge. Assumes nothing of what the value is.
"""

import collections
import dataclasses
from collections.abc import Callable

from flaxasync.check.hlo.module import Computation, HloModule, Instruction

_SAME_VALUE = ("bitcast", "optimization-barrier", "domain")
_COPIES = ("copy", "copy-start", "copy-done")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Instructions [first, stop) of a computation, in schedule order."""

    computation: str
    first: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """One instruction that uses a value, and how the value came there."""

    computation: str
    instruction: Instruction
    operand: int
    spans: tuple[Span, ...]  # what runs between the value's birth and this use
    copies: tuple[tuple[str, Instruction], ...]  # (computation, copy) on the way
    crosses: tuple[str, ...]  # "enters", "repeats" or "leaves", with the name of the loop
    aliased: bool  # the use writes its result over the value


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    loop: str
    path: tuple[int, ...]
    spans: tuple[Span, ...]
    opened: int
    crosses: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    computation: Computation
    instruction: Instruction
    path: tuple[int, ...]
    opened: int
    spans: tuple[Span, ...] = ()
    frames: tuple[_Frame, ...] = ()
    copies: tuple[tuple[str, Instruction], ...] = ()
    crosses: tuple[str, ...] = ()

    def to(self, instruction: Instruction, path: tuple[int, ...], **changes: object) -> "_Place":
        return dataclasses.replace(self, instruction=instruction, path=path, **changes)  # type: ignore[arg-type]


def trace(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    path: tuple[int, ...],
    *,
    stop: Callable[[Instruction], bool] = lambda _: False,
) -> list[Use]:
    """Follows the array at `path` of an instruction's result to its uses.

    Args:
      module, computation, instruction, path: which array.
      stop: instructions at which to stop following, though they alias the value (a done).

    Returns:
      The uses, nearest first. Instructions that only pass the value on are no uses, but a copy is both passed through
      (and noted in `copies`) and no use; an instruction that aliases the value to its result is a use and is passed
      through.
    """
    uses: list[Use] = []
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    queue = collections.deque([_Place(computation, instruction, path, computation.position[instruction.name] + 1)])
    while queue:
        place = queue.popleft()
        key = (place.computation.name, place.instruction.name, place.path)
        if key in seen:
            continue
        seen.add(key)
        for user in place.computation.users.get(place.instruction.name, ()):
            for number, operand in enumerate(user.operands):
                if operand == place.instruction.name:
                    queue.extend(_step(module, place, user, number, uses, stop))
        if place.instruction.is_root:
            queue.extend(_leave(module, place))
    return uses


def _step(
    module: HloModule,
    place: _Place,
    user: Instruction,
    number: int,
    uses: list[Use],
    stop: Callable[[Instruction], bool],
) -> list[_Place]:
    here, path = place.computation, place.path
    at = here.position[user.name]
    passed = _span(place, at)

    def use(aliased: bool) -> None:
        uses.append(Use(here.name, user, number, passed, place.copies, place.crosses, aliased))

    if user.opcode == "get-tuple-element":
        return [place.to(user, path[1:])] if path and path[0] == user.tuple_index else []
    if user.opcode == "tuple":
        return [place.to(user, (number, *path))]
    if user.opcode in _SAME_VALUE or (user.opcode == "add-dependency" and number == 0):
        return [place.to(user, path)]
    if user.opcode in _COPIES and not stop(user):
        noted = place.copies if user.opcode == "copy-done" else (*place.copies, (here.name, user))
        return [place.to(user, {"copy-start": (0,), "copy-done": ()}.get(user.opcode, path), copies=noted)]
    if user.opcode == "while":
        body = module.computations.get(user.attributes.get("body", "").lstrip("%"))
        if body is None or 0 not in body.parameters:
            return []
        frame = _Frame(user.name, path, place.spans, place.opened, place.crosses)
        crosses = (*place.crosses, f"enters {user.name}")
        return [_Place(body, body.parameters[0], path, 0, passed, (*place.frames, frame), place.copies, crosses)]
    if user.opcode in ("conditional", "call"):
        called = [module.computations.get(name) for name in user.called_computations]
        branch, parameter = (number - 1, 0) if user.opcode == "conditional" else (0, number)
        target = called[branch] if 0 <= branch < len(called) else None
        if target is not None and parameter in target.parameters:
            return [
                _Place(target, target.parameters[parameter], path, 0, passed, place.frames, place.copies, place.crosses)
            ]
        if not (user.opcode == "conditional" and number == 0):
            return []
    onward = [
        place.to(user, (*alias.output, *path[len(alias.operand_index) :]))
        for alias in user.aliases
        if alias.operand == number and path[: len(alias.operand_index)] == alias.operand_index
    ]
    use(aliased=bool(onward) or (user.opcode == "dynamic-update-slice" and number == 0))
    return [] if stop(user) else onward


def _leave(module: HloModule, place: _Place) -> list[_Place]:
    """From a computation's root to its callers, and around a loop."""
    here = place.computation
    passed = _span(place, len(here.instructions))
    onward: list[_Place] = []
    for caller, call in module.callers.get(here.name, ()):
        after = caller.position[call.name] + 1
        if call.opcode == "while" and call.attributes.get("body", "").lstrip("%") == here.name:
            frame = place.frames[-1] if place.frames and place.frames[-1].loop == call.name else None
            outer = place.frames[:-1] if frame else place.frames
            if frame and frame.path == place.path:  # carried through untouched: the whole loop lies in the window
                onward.append(
                    _Place(caller, call, place.path, frame.opened, frame.spans, outer, place.copies, frame.crosses)
                )
                continue
            if 0 in here.parameters:
                crosses = (*place.crosses, f"repeats {call.name}")
                onward.append(_Place(here, here.parameters[0], place.path, 0, passed, outer, place.copies, crosses))
            crosses = (*place.crosses, f"leaves {call.name}")
            onward.append(_Place(caller, call, place.path, after, passed, outer, place.copies, crosses))
        elif call.opcode in ("conditional", "call"):
            onward.append(_Place(caller, call, place.path, after, passed, place.frames, place.copies, place.crosses))
    return onward


def _span(place: _Place, stop: int) -> tuple[Span, ...]:
    return (*place.spans, Span(place.computation.name, place.opened, stop)) if stop > place.opened else place.spans
