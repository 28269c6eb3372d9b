"""The rules about the users of an asynchronous operation, from XLA's "Async HLO Instructions" proposal.

A start or an update has one user, an update or the done, and a done continues a start (openxla.org/xla/async_ops).
Compilers verify the rules about shapes when they build a program, so no compiled program breaks those.
"""

from collections.abc import Iterator

from flaxasync.check.auditing.findings import Finding, finding
from flaxasync.check.hlo.async_operations import spelling_of_opcode, step_of_opcode
from flaxasync.check.hlo.module import Computation, HloModule, Instruction

_CARRIERS = ("while", "conditional", "call")  # they pass a future on


def check_async_rules(module: HloModule) -> tuple[Finding, ...]:
    """Returns a finding for every rule that an asynchronous operation of the module breaks."""
    return tuple(
        finding(code, message, computation.name, i.name, source=module.source(i))
        for computation in module.computations.values()
        for i in computation.instructions
        for code, message in _broken_rules(computation, i)
    )


def _broken_rules(computation: Computation, i: Instruction) -> Iterator[tuple[str, str]]:
    """Yields the code and the message of each rule that an instruction breaks."""
    is_start, step = bool(spelling_of_opcode(i.opcode)), step_of_opcode(i.opcode)
    if is_start or step == "update":
        users = computation.users.get(i.name, [])
        right = [u for u in users if _continues(i, u) or u.opcode in ("tuple", *_CARRIERS)]
        if not users and not i.is_root:  # the caller of this computation finishes what its root starts
            yield "async-unfinished", f"{i.name} has no done"
        if len(users) > 1 or len(right) < len(users):
            yield "async-one-user", f"{i.name} is used by {', '.join(u.name for u in users)}"
    if step and not is_start:
        before = next(iter(computation.operands(i)), None)
        carriers = ("get-tuple-element", "parameter", *_CARRIERS)
        is_carried = before is not None and before.shape.is_tuple and before.opcode in carriers
        if before is None or not (is_carried or _continues(before, i)):
            yield "async-no-start", f"{i.name} continues {before.name if before else 'nothing'}"


def _continues(step: Instruction, user: Instruction) -> bool:
    """Says whether an instruction is an update or a done of the spelling in which a step is written."""
    if step.opcode in ("send", "recv"):
        return user.opcode == f"{step.opcode}-done"
    stem = step.opcode.removesuffix("-start").removesuffix("-update")
    return user.opcode in (f"{stem}-done", f"{stem}-update")
