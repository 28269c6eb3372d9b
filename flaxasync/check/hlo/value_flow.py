"""Where a value goes: through tuples, loops, branches and aliased outputs to the instructions that
use it.

`trace` follows one array of one instruction's result forward. Each use is returned with the spans
of the schedule that run between the instruction that makes the value and that use. A value that a
loop carries into its next iteration is followed into that iteration. Nothing is assumed about what
the value is.
"""

import collections
import dataclasses
from collections.abc import Callable, Set

from flaxasync.check.hlo.module import Computation, Instruction

_SAME_VALUE = ("bitcast", "optimization-barrier", "domain")
_COPIES = ("copy", "copy-start", "copy-done")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The instructions [first, stop) of a computation, in schedule order."""

    computation: str
    first: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """One instruction that uses a value, and the path of the value to it."""

    instruction: Instruction
    operand: int  # the number of the operand that is the value
    spans: tuple[Span, ...]  # what runs between the instruction that makes the value and this use
    copies: tuple[Instruction, ...]  # those on the path
    # how the path crosses loops: "enters", "repeats" or "leaves", and the name of the loop
    crosses: tuple[str, ...]
    aliased: bool  # whether the instruction writes its result over the value


@dataclasses.dataclass(frozen=True, slots=True)
class _Holder:
    """One instruction whose result holds the value at an index path, and how the value came there.

    The value is alive from the position `opened` of its computation on. `spans` ran before that,
    in other computations or in earlier iterations. `loops` are those around this computation that
    the path has entered, the outermost first, each by its name and with what held the value before
    it.
    """

    instruction: Instruction
    path: tuple[int, ...]
    opened: int
    spans: tuple[Span, ...] = ()
    loops: tuple[tuple[str, "_Holder"], ...] = ()
    copies: tuple[Instruction, ...] = ()
    crosses: tuple[str, ...] = ()

    def passed_to(self, instruction: Instruction, path: tuple[int, ...]) -> "_Holder":
        """Returns the next holder in the same computation."""
        return dataclasses.replace(self, instruction=instruction, path=path)

    def spans_until(self, stop: int) -> tuple[Span, ...]:
        """Returns the spans up to a position of its computation."""
        if stop <= self.opened:
            return self.spans
        return (*self.spans, Span(self.instruction.computation.name, self.opened, stop))


def trace(
    instruction: Instruction,
    path: tuple[int, ...],
    *,
    stop: Callable[[Instruction], bool] = lambda _: False,
) -> list[Use]:
    """Follows the array at the index path of an instruction's result to its uses, and returns the
    nearest first.

    An instruction that only passes the value on is not a use. A copy is not a use either: it is
    passed through and listed in `copies`. An instruction that aliases the value to its result is a
    use and is also passed through, unless `stop` says that the path ends there, as it does at the
    done of an asynchronous operation.
    """
    uses: list[Use] = []
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    queue = collections.deque([_Holder(instruction, path, instruction.position + 1)])
    while queue:
        holder = queue.popleft()
        key = (holder.instruction.computation.name, holder.instruction.name, holder.path)
        if key in seen:
            continue
        seen.add(key)
        for user in holder.instruction.users:
            for number, operand in enumerate(user.operands):
                if operand == holder.instruction.name:
                    queue.extend(_through_user(holder, user, number, uses, stop))
        if holder.instruction.is_root:
            queue.extend(_through_root(holder))
    return uses


def nearest(
    step: Instruction,
    wanted: Callable[[Instruction], bool],
    passed: Set[str],
    forward: bool,
    *,
    passes: Callable[[Instruction], bool] = lambda one: False,
) -> list[Instruction]:
    """Returns the nearest wanted instructions that follow a step, or precede it, across opcodes
    that are passed, and across what `passes`, the nearest first.
    """
    found = []
    pending = collections.deque([step])
    seen = {step.name}
    while pending:
        here = pending.popleft()
        for one in here.users if forward else here.inputs:
            if one.name in seen:
                continue
            seen.add(one.name)
            if wanted(one):
                found.append(one)
            elif one.opcode in passed or passes(one):
                pending.append(one)
    return found


def _through_user(
    holder: _Holder,
    user: Instruction,
    number: int,
    uses: list[Use],
    stop: Callable[[Instruction], bool],
) -> list[_Holder]:
    """Returns what holds the value after one of its users, and adds the user to `uses` if it is
    one.
    """
    path = holder.path
    spans = holder.spans_until(user.position)
    if user.opcode == "get-tuple-element":
        if path and path[0] == user.tuple_index:
            return [holder.passed_to(user, path[1:])]
        return []
    if user.opcode == "tuple":
        return [holder.passed_to(user, (number, *path))]
    if user.opcode in _SAME_VALUE or (user.opcode == "add-dependency" and number == 0):
        return [holder.passed_to(user, path)]
    if user.opcode in _COPIES and not stop(user):
        if user.opcode == "copy-done":  # its start is noted already
            return [holder.passed_to(user, ())]
        # the first element of what a copy-start makes is the copy
        copied = holder.passed_to(user, (0,) if user.opcode == "copy-start" else path)
        return [dataclasses.replace(copied, copies=(*holder.copies, user))]
    if user.opcode == "while":
        body = user.computation.module.computations.get(user.loop_body)
        if body is None or 0 not in body.parameters:
            return []
        crosses = (*holder.crosses, f"enters {user.name}")
        loops = (*holder.loops, (user.name, holder))
        return [_Holder(body.parameters[0], path, 0, spans, loops, holder.copies, crosses)]
    if user.opcode == "call":
        return _in_called(holder, spans, user.called[:1], number)
    # The first operand of a conditional chooses the branch, which is a use. Each branch takes one
    # of the others.
    if user.opcode == "conditional" and number > 0:
        return _in_called(holder, spans, user.called[number - 1 : number], 0)
    onward = [
        holder.passed_to(user, (*alias.output, *path[len(alias.operand_index) :]))
        for alias in user.aliases
        if alias.operand == number and path[: len(alias.operand_index)] == alias.operand_index
    ]
    aliased = bool(onward) or (user.opcode == "dynamic-update-slice" and number == 0)
    uses.append(Use(user, number, spans, holder.copies, holder.crosses, aliased))
    if stop(user):
        return []
    return onward


def _in_called(
    holder: _Holder, spans: tuple[Span, ...], called: list[Computation], parameter: int
) -> list[_Holder]:
    """Returns the parameter of a called computation that holds the value; nothing if there is
    none.
    """
    return [
        dataclasses.replace(holder, instruction=one.parameters[parameter], opened=0, spans=spans)
        for one in called
        if parameter in one.parameters
    ]


def _through_root(holder: _Holder) -> list[_Holder]:
    """Returns what holds the value after its computation returned it: the callers, and the next
    iteration of a loop.
    """
    here = holder.instruction.computation
    spans = holder.spans_until(len(here.instructions))
    copies = holder.copies
    crosses = holder.crosses
    onward: list[_Holder] = []
    for call in here.callers:
        after = call.position + 1
        if call.opcode == "while" and call.loop_body == here.name:
            outer = holder.loops
            if outer and outer[-1][0] == call.name:  # the value entered the loop from outside
                before = outer[-1][1]
                outer = outer[:-1]
                if before.path == holder.path:
                    # The loop carries it through untouched, so it is alive during the whole loop.
                    onward.append(dataclasses.replace(before, instruction=call, copies=copies))
                    continue
            if 0 in here.parameters:
                again = (*crosses, f"repeats {call.name}")
                onward.append(
                    _Holder(here.parameters[0], holder.path, 0, spans, outer, copies, again)
                )
            left = (*crosses, f"leaves {call.name}")
            onward.append(_Holder(call, holder.path, after, spans, outer, copies, left))
        elif call.opcode in ("conditional", "call"):
            onward.append(_Holder(call, holder.path, after, spans, holder.loops, copies, crosses))
    return onward
