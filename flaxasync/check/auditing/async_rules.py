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
from flaxasync.check.hlo.async_forms import chain, operands_of
from flaxasync.check.hlo.async_operations import (
    COLLECTIVES,
    FIRST_CLASS,
    AsyncOperation,
    async_operations,
    spelling_of_opcode,
    step_of_opcode,
)
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape

_CARRIERS = ("while", "conditional", "call")  # they pass a future on
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
    found = [
        finding(code, message, computation.name, i.name, source=module.source(i))
        for computation in module.computations.values()
        for code, message, i in _broken_in(module, computation)
    ]
    for op in known:
        if _leaves_the_program(module, op):
            message = f"{op.name} has no done: its future leaves the program"
            source = module.source(op.start)
            found.append(
                finding("async-unfinished", message, op.computation, op.name, source=source)
            )
    return tuple(found)


def _broken_in(module: HloModule, computation: Computation) -> Iterator[Broken]:
    for i in computation.instructions:
        is_start = bool(spelling_of_opcode(i.opcode))
        step = step_of_opcode(i.opcode)
        if is_start or step == "update":
            yield from _users(computation, i)
        if step and not is_start:
            yield from _beginning(computation, i)
        if i.opcode == "async-start":
            steps = chain(computation, i)
            yield from _tuples(computation, steps)
            yield from _called(module, computation, steps)


def _users(computation: Computation, step: Instruction) -> Iterator[Broken]:
    users = _users_in_order(computation, step)
    right = [u for u in users if _continues(step, u) or u.opcode in ("tuple", *_CARRIERS)]
    # the caller of this computation finishes what its root starts
    if not users and not step.is_root:
        yield "async-unfinished", f"{step.name} has no done", step
    if len(users) > 1 or len(right) < len(users):
        yield "async-one-user", f"{step.name} is used by {', '.join(u.name for u in users)}", step


def _beginning(computation: Computation, step: Instruction) -> Iterator[Broken]:
    before = next(iter(computation.operands(step)), None)
    carriers = ("get-tuple-element", "parameter", *_CARRIERS)
    is_carried = before is not None and before.shape.is_tuple and before.opcode in carriers
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
    if step.opcode in ("send", "recv"):
        return user.opcode == f"{step.opcode}-done"
    stem = step.opcode.removesuffix("-start").removesuffix("-update")
    return user.opcode in (f"{stem}-done", f"{stem}-update")


def _leaves_the_program(module: HloModule, op: AsyncOperation) -> bool:
    """Says whether a start has no done because the entry returns its future, alone or in a tuple.

    What is called by anything but control flow may be finished by its caller. `_users` reports a
    start that has no user, or one that may not be there.
    """
    if op.windows or op.spelling not in ("first-class", "generic"):
        return False
    at = module.computations[op.computation]
    called = [call.opcode for _, call in module.callers.get(op.computation, [])]
    if at is not module.entry and not any(opcode in _CARRIERS for opcode in called):
        return False
    last = chain(at, op.start)[-1]
    users = _users_in_order(at, last)
    return (bool(users) or last.is_root) and all(u.opcode in ("tuple", *_CARRIERS) for u in users)


def _users_in_order(computation: Computation, step: Instruction) -> list[Instruction]:
    """Returns the users of a step, without those that only order instructions."""
    users = computation.users.get(step.name, [])
    return [user for user in users if user.custom_call_target != "control_dep"]


def _tuples(computation: Computation, steps: list[Instruction]) -> Iterator[Broken]:
    """Checks the tuples of a start and its updates against the operands bound by then and the
    done.
    """
    if step_of_opcode(steps[-1].opcode) == "done":
        done = steps[-1]
    else:
        done = None
    if done:
        futures = steps[:-1]
    else:
        futures = steps
    binds_output = _late(futures[0]) and not _late(futures[-1])
    for n, step in enumerate(futures):
        first = step.shape.at((0,))
        second = step.shape.at((1,))
        bound = operands_of(computation, futures[: n + 1])
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
            if done:
                returned = f", {done.name} returns {done.shape}"
            else:
                returned = ""
            yield (
                "async-result-alias",
                _short(f"{step.name} holds {second} as its results{returned}"),
                step,
            )


def _late(step: Instruction) -> bool:
    return step.shape.at((1,)) == _NOTHING


def _called(
    module: HloModule, computation: Computation, steps: list[Instruction]
) -> Iterator[Broken]:
    """Checks what an async-start calls: that there is one instruction, which one, and the shapes of
    its signature.
    """
    start = steps[0]
    called = module.called(start)
    if len(called) != 1 or "calls" not in start.attributes:
        yield "async-no-calls", f"{start.name} names {len(called)} computations by calls=", start
        return
    wrapped = called[0]
    work = [i for i in wrapped.instructions if i.opcode not in _REGROUPING]
    is_group = len(work) > 1 and all(_stem(i) in COLLECTIVES for i in work)
    if len(work) != 1 and not is_group:
        yield (
            "async-wrapped-one",
            f"{start.name} wraps {wrapped.name}, which has {len(work)} instructions",
            start,
        )
    if len(work) == 1 and _stem(work[0]) in FIRST_CLASS and wrapped.execution_thread == "main":
        yield (
            "async-wrapped-first-class",
            f"{start.name} wraps {work[0].name}, a {work[0].opcode}",
            start,
        )
    bound = operands_of(computation, steps)
    declared = [wrapped.parameters[n].shape for n in sorted(wrapped.parameters)]
    if step_of_opcode(steps[-1].opcode) == "done":
        done = steps[-1]
    else:
        done = None
    more = len(bound) > len(declared) and not (_late(start) and len(steps) > 1)
    fewer = len(bound) < len(declared) and done is not None
    if more or fewer or not all(a.is_like(b) for a, b in zip(declared, bound, strict=False)):
        have = ", ".join(map(str, declared))
        yield (
            "async-shape",
            _short(f"{start.name} binds operands that {wrapped.name}({have}) does not take"),
            start,
        )
    result: Shape | None = steps[-1].shape.at((1,))
    if done is not None:
        result = done.shape
    if result not in (None, _NOTHING) and not wrapped.root.shape.is_like(result):
        yield (
            "async-shape",
            _short(f"{wrapped.name} makes {wrapped.root.shape}, {steps[-1].name} has {result}"),
            start,
        )


def _stem(i: Instruction) -> str:
    return i.opcode.removesuffix("-start").removesuffix("-done")


def _short(message: str) -> str:
    if len(message) <= _LONG:
        return message
    return message[: _LONG - 3] + "..."
