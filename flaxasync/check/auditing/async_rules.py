"""The rules of XLA's "Async HLO Instructions" (openxla.org/xla/async_ops), each with a code of its
own.

An asynchronous operation of any opcode is a start, updates and a done. The start and each update
have one user, the next step. The start makes a tuple of its operands, its results and a context;
the first part aliases the operands, and the second has the shapes of the done. It calls a
computation of parameters and one instruction, whose opcode has no start and done of its own.
Operands and results may be bound late, by an update.

XLA itself goes beyond the rules in three ways, which are no findings: it wraps several collectives
as one operation, it wraps such opcodes for another thread (a SparseCore, the host), and a custom
call "control_dep" may use any step, because it only orders instructions.
"""

from collections.abc import Iterator, Sequence

from flaxasync.check.auditing.findings import Finding, finding
from flaxasync.check.hlo.async_forms import CARRIERS, Chain, chain
from flaxasync.check.hlo.async_operations import (
    COLLECTIVES,
    FIRST_CLASS,
    AsyncOperation,
    async_operations,
    step_of,
)
from flaxasync.check.hlo.module import CONTROL_FLOW, HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape

# they only name and regroup values
_REGROUPING = ("parameter", "tuple", "get-tuple-element", "bitcast")
_NOTHING = Shape("tuple")  # results that are bound late
_LONG = 300  # characters of a message

# a code, a message, and the instruction that is at fault
type Broken = tuple[str, str, Instruction]


def check_async_rules(
    module: HloModule, operations: Sequence[AsyncOperation] | None = None
) -> tuple[Finding, ...]:
    """Returns a finding for every rule that an asynchronous operation of the module breaks.

    `operations` are all of the module, from a caller that has found them already.
    """
    known = operations
    if known is None:
        known = async_operations(module)
    found = [finding(*broken) for i in module.instructions for broken in _broken_by(i)]
    for op in known:
        if _leaves_the_program(op):
            message = f"{op.name} has no done: its future leaves the program"
            found.append(finding("async-unfinished", message, op.start))
    return tuple(found)


def _broken_by(i: Instruction) -> Iterator[Broken]:
    role = step_of(i.opcode).role
    if role in ("start", "update"):
        yield from _users(i)
    if role in ("update", "done"):
        yield from _beginning(i)
    if i.opcode == "async-start":
        steps = chain(i)
        yield from _tuples(steps)
        yield from _called(steps)


def _users(step: Instruction) -> Iterator[Broken]:
    users = _users_in_order(step)
    right = [u for u in users if _continues(step, u) or u.opcode in ("tuple", *CONTROL_FLOW)]
    # the caller of this computation finishes what its root starts
    if not users and not step.is_root:
        yield "async-unfinished", f"{step.name} has no done", step
    if len(users) > 1 or len(right) < len(users):
        yield "async-one-user", f"{step.name} is used by {', '.join(u.name for u in users)}", step


def _beginning(step: Instruction) -> Iterator[Broken]:
    before = next(iter(step.inputs), None)
    is_carried = before is not None and before.shape.is_tuple and before.opcode in CARRIERS
    if before is None or not (is_carried or _continues(before, step)):
        yield (
            "async-no-start",
            f"{step.name} continues {before.name if before else 'nothing'}",
            step,
        )


def _continues(step: Instruction, user: Instruction) -> bool:
    """Says whether an instruction is an update or a done of the spelling in which a step is
    written.
    """
    stem, role = step_of(step.opcode)
    onward = step_of(user.opcode)
    return role != "done" and onward.stem == stem and onward.role in ("update", "done")


def _leaves_the_program(op: AsyncOperation) -> bool:
    """Says whether a start has no done because the entry returns its future, alone or in a tuple.

    What is called by anything but control flow may be finished by its caller. `_users` reports a
    start that has no user, or one that may not be there.
    """
    if op.windows or op.spelling not in ("first-class", "generic"):
        return False
    at = op.start.computation
    if at is not at.module.entry and not any(call.opcode in CONTROL_FLOW for call in at.callers):
        return False
    last = chain(op.start).futures[-1]
    users = _users_in_order(last)
    return (bool(users) or last.is_root) and all(
        u.opcode in ("tuple", *CONTROL_FLOW) for u in users
    )


def _users_in_order(step: Instruction) -> list[Instruction]:
    """Returns the users of a step, without those that only order instructions."""
    return [user for user in step.users if user.custom_call_target != "control_dep"]


def _tuples(steps: Chain) -> Iterator[Broken]:
    """Checks the tuples of a start and its updates against the operands bound by then and the
    done.
    """
    futures = steps.futures
    done = steps.done
    binds_output = _late(futures[0]) and not _late(futures[-1])
    for n, step in enumerate(futures):
        first = step.shape.at((0,))
        second = step.shape.at((1,))
        bound = steps.bound(n + 1)
        if first is not None and first.is_tuple:
            found = list(first.elements)
        else:
            found = None
        alike = found is not None and all(a.is_like(b) for a, b in zip(found, bound, strict=False))
        # An update may bind the buffers of results, as further operands. The first part then ends
        # before them.
        few = (
            found is None
            or len(found) > len(bound)
            or (len(found) < len(bound) and not (n and binds_output))
        )
        if not alike or few:
            have = ", ".join(map(str, bound))
            yield (
                "async-operand-alias",
                _short(f"{step.name} begins with {first}, its operands are ({have})"),
                step,
            )
        if second is None or (done and second != _NOTHING and not second.is_like(done.shape)):
            returned = ""
            if done:
                returned = f", {done.name} returns {done.shape}"
            yield (
                "async-result-alias",
                _short(f"{step.name} holds {second} as its results{returned}"),
                step,
            )


def _late(step: Instruction) -> bool:
    return step.shape.at((1,)) == _NOTHING


def _called(steps: Chain) -> Iterator[Broken]:
    """Checks what an async-start calls: that there is one instruction, which one, and the shapes of
    its signature.
    """
    start = steps.futures[0]
    called = start.called
    if len(called) != 1 or "calls" not in start.attributes:
        named = len(called) if "calls" in start.attributes else "no"
        yield "async-no-calls", f"{start.name} names {named} computations by calls=", start
        return
    wrapped = called[0]
    work = [i for i in wrapped.instructions if i.opcode not in _REGROUPING]
    is_group = len(work) > 1 and all(step_of(i.opcode).stem in COLLECTIVES for i in work)
    if len(work) != 1 and not is_group:
        yield (
            "async-wrapped-one",
            f"{start.name} wraps {wrapped.name}, which has {len(work)} instructions",
            start,
        )
    is_first_class = len(work) == 1 and step_of(work[0].opcode).stem in FIRST_CLASS
    if is_first_class and wrapped.execution_thread == "main":
        yield (
            "async-wrapped-first-class",
            f"{start.name} wraps {work[0].name}, a {work[0].opcode}",
            start,
        )
    bound = steps.bound()
    declared = [wrapped.parameters[n].shape for n in sorted(wrapped.parameters)]
    # A step after the start may bind the buffers of results, too.
    binds_results = _late(start) and (len(steps.futures) > 1 or steps.done is not None)
    more = len(bound) > len(declared) and not binds_results
    # Without a done, further steps may follow.
    fewer = len(bound) < len(declared) and steps.done is not None
    if more or fewer or not all(a.is_like(b) for a, b in zip(declared, bound, strict=False)):
        have = ", ".join(map(str, declared))
        yield (
            "async-shape",
            _short(f"{start.name} binds operands that {wrapped.name}({have}) does not take"),
            start,
        )
    last = steps.futures[-1]
    result = last.shape.at((1,))
    if steps.done is not None:
        last = steps.done
        result = last.shape
    if result not in (None, _NOTHING) and not wrapped.root.shape.is_like(result):
        yield (
            "async-shape",
            _short(f"{wrapped.name} makes {wrapped.root.shape}, {last.name} has {result}"),
            start,
        )


def _short(message: str) -> str:
    if len(message) <= _LONG:
        return message
    return message[: _LONG - 3] + "..."
