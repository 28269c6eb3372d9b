"""Hazards of kernel pairs: what the compiler does to a buffer between a kernel's start and its done.

XLA schedules and allocates its own asynchronous operations safely. A pair of kernels is two calls to it, tied by
semaphores and aliased buffers: it may copy, free or move what a transfer is using. Which buffer is read and which is
written is not in the text: one that the start makes is the destination; where it aliases all of them (Refs), the last
is taken for it. Several transfers may send one buffer: that reads it, though each start aliases it through.
"""

from collections.abc import Iterable, Set

from flaxasync.check.auditing.findings import Finding, Severity, finding
from flaxasync.check.hlo.async_operations import AsyncOperation
from flaxasync.check.hlo.module import SEMAPHORE, SMEM, VMEM, Computation, HloModule, Instruction
from flaxasync.check.hlo.value_flow import Use, trace

SMALL = 1024  # bytes; below are scalars that a kernel takes by value

type Operand = tuple[str, str, int]  # computation, instruction, number


def sent_operands(module: HloModule, operations: Iterable[AsyncOperation]) -> frozenset[Operand]:
    """Returns where kernel pairs take a source, at their start and at their done: there they only read it."""
    found: set[Operand] = set()
    for op in operations:
        if op.spelling != "kernel":
            continue
        computation, ends = module.computations[op.computation], {window.done.name for window in op.windows}
        for path, role in _roles(op.start).items():
            if role == "source":
                found |= {(op.computation, op.name, a.operand) for a in op.start.aliases if a.output == path}
                uses = trace(module, computation, op.start, path, stop=lambda i: i.name in ends)
                found |= {(u.computation, u.instruction.name, u.operand) for u in uses if u.instruction.name in ends}
    return frozenset(found)


def kernel_hazards(module: HloModule, operation: AsyncOperation, sent: Set[Operand]) -> list[Finding]:
    """Returns what endangers the buffers of one kernel pair; `sent` is what `sent_operands` says of all pairs."""
    computation, start = module.computations[operation.computation], operation.start
    ends = {window.done.name for window in operation.windows}
    found: dict[tuple[str, str, str], Finding] = {}

    def add(code: str, message: str, at: tuple[str, Instruction], severity: Severity | None = None) -> None:
        key = (code, at[0], at[1].name)
        if key not in found:
            source = module.source(at[1]) or module.source(start)
            found[key] = finding(code, message, at[0], at[1].name, source=source, severity=severity)

    roles = _roles(start)
    for path, role in roles.items():
        shape = start.shape.at(path)
        what = f"the {role} buffer of {start.name}, {shape}"
        if shape is not None and shape.memory_space == VMEM:
            add("in-flight-vmem", f"{what}, lies in vector memory", (operation.computation, start))
        if not ends:
            continue
        uses = trace(module, computation, start, path, stop=lambda i: i.name in ends)
        arrived = [use for use in uses if use.instruction.name in ends]
        for use in arrived:
            for copied in use.copies:
                add("in-flight-copied", f"{what}, is copied before {use.instruction.name} waits for it", copied)
        for use in uses:
            if use.instruction.name not in ends and role.startswith("destination"):
                for at, copy in use.copies:
                    if _inside(module, operation, at, copy):
                        add("in-flight-read", f"{what}, is copied before its done", (at, copy), _doubt(role))
            if use.instruction.name in ends or not _inside(module, operation, use.computation, use.instruction):
                continue
            place = (use.computation, use.instruction)
            if use.aliased and not (role == "source" and (use.computation, use.instruction.name, use.operand) in sent):
                add("in-flight-written", f"{what}, is written by {use.instruction.name}", place)
            elif role == "only":
                add("in-flight-read", f"{what}, is read; the text does not say which part", place, Severity.INFO)
            elif role.startswith("destination"):
                add("in-flight-read", f"{what}, is read by {use.instruction.name}", place, _doubt(role))
        if not arrived and not _used_after(module, operation, uses):
            add("in-flight-freed", f"{what}, does not reach the done", (operation.computation, start))
    for number, operand in _unaliased_operands(computation, start) if ends else ():
        uses = trace(module, computation, operand, ())
        if not any(use.instruction.name in ends for use in uses) and not _used_after(module, operation, uses):
            message = (
                f"{operand.name}, operand {number} of {start.name}, is not used after it and not aliased through it"
            )
            add("in-flight-freed", message, (operation.computation, start))
    return list(found.values())


def _roles(start: Instruction) -> dict[tuple[int, ...], str]:
    """Returns what each buffer of a start's result is: source, destination (perhaps by position), or the only one."""
    aliased = {alias.output for alias in start.aliases}
    buffers = [
        path
        for path, leaf in start.shape.leaves()
        if leaf.memory_space not in (SEMAPHORE, SMEM) and leaf.bytes >= SMALL
    ]
    fresh = [path for path in buffers if path not in aliased]
    if fresh:
        return {path: "destination" if path in fresh else "source" for path in buffers}
    if len(buffers) == 1:
        return {buffers[0]: "only"}
    return {path: "destination (by position)" if path == buffers[-1] else "source" for path in buffers}


def _doubt(role: str) -> Severity:
    return Severity.ERROR if role == "destination" else Severity.WARNING


def _inside(module: HloModule, operation: AsyncOperation, computation: str, instruction: Instruction) -> bool:
    at = module.computations[computation].position[instruction.name]
    return any(
        span.computation == computation and span.first <= at < span.stop
        for window in operation.windows
        for span in window.spans
    )


def _used_after(module: HloModule, operation: AsyncOperation, uses: list[Use]) -> bool:
    """Says whether a use comes after a done in the done's own computation: the buffer lives until then."""
    for window in operation.windows:
        position = module.computations[window.computation].position
        for use in uses:
            if use.computation == window.computation and position[use.instruction.name] > position[window.done.name]:
                return True
    return False


def _unaliased_operands(computation: Computation, start: Instruction) -> list[tuple[int, Instruction]]:
    aliased = {alias.operand for alias in start.aliases}
    found = []
    for n, name in enumerate(start.operands):
        made = computation.by_name.get(name)
        if n in aliased or made is None or made.shape.is_tuple or made.shape.memory_space in (SEMAPHORE, SMEM):
            continue
        if made.shape.bytes >= SMALL and not (made.opcode == "parameter" and computation.is_entry):
            found.append((n, made))
    return found
