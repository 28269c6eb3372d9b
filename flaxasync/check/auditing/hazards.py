"""What is wrong with pairs of kernels: hazards that no compiler sees.

XLA schedules and allocates its own asynchronous operations safely. For XLA a pair of kernels is
just two calls that share semaphores and aliased buffers, so XLA may copy, free or move a buffer
that a transfer is using.

The text does not say which buffer a kernel reads and which it writes. A buffer that the start
creates is assumed to be the destination. If the start aliases all of its buffers (Refs), the last
one is assumed to be the destination. Several transfers may send one buffer at the same time,
because each start aliases it to a result but only reads it.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Set

from flaxasync.check.auditing.findings import Finding, Severity, finding
from flaxasync.check.hlo.async_operations import AsyncOperation, async_operations
from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.shapes import SEMAPHORE, SMEM, VMEM, Shape
from flaxasync.check.hlo.value_flow import Use, trace

SMALL = 1024  # bytes; anything smaller is assumed to be a scalar that the kernel takes by value

# the computation, the instruction, and the number of the operand
type Operand = tuple[str, str, int]


def unsafe_buffers(module: HloModule) -> tuple[str, ...]:
    """Returns the errors of all kernel pairs of a program, each as "code: message"."""
    found = kernel_hazards(async_operations(module))
    return tuple(f"{f.code}: {f.message}" for f in found if f.severity is Severity.ERROR)


def kernel_hazards(operations: Iterable[AsyncOperation]) -> list[Finding]:
    """Returns what endangers the buffers of the kernel pairs among all operations of a program: of
    each pair one finding for each code and instruction.
    """
    pairs = [op for op in operations if op.spelling == "kernel"]
    sent = _sent_operands(pairs)
    found: list[Finding] = []
    for op in pairs:
        of_pair: dict[tuple[str, str, str], Finding] = {}
        for hazard in _hazards(op, sent):
            key = (hazard.code, hazard.computation, hazard.instruction)
            source = hazard.source or op.start.source
            of_pair.setdefault(key, dataclasses.replace(hazard, source=source))
        found += of_pair.values()
    return found


def _sent_operands(pairs: Iterable[AsyncOperation]) -> frozenset[Operand]:
    """Returns the sources of kernel pairs, as operands of their starts and dones, which alias them
    but only read.
    """
    found: set[Operand] = set()
    for op in pairs:
        for path, role in _roles(op.start).items():
            if role == "source":
                found |= {
                    (op.computation, op.name, a.operand)
                    for a in op.start.aliases
                    if a.output == path
                }
                uses = trace(op.start, path, stop=op.is_done)
                found |= {_operand(u) for u in uses if op.is_done(u.instruction)}
    return frozenset(found)


def _hazards(operation: AsyncOperation, sent: Set[Operand]) -> Iterator[Finding]:
    """Yields what endangers the buffers of one kernel pair, some of it more than once. `sent` are
    the sources of all pairs.
    """
    start = operation.start
    for path, role in _roles(start).items():
        shape = start.shape.at(path)
        what = f"the {role} buffer of {start.name}, {shape}"
        if shape is not None and shape.memory_space == VMEM:
            yield finding("in-flight-vmem", f"{what}, lies in vector memory", start)
        if not operation.windows:
            continue
        uses = trace(start, path, stop=operation.is_done)
        for use in uses:
            yield from _of_use(operation, use, role, what, sent)
        if not _keeps_alive(operation, uses):
            yield finding("in-flight-freed", f"{what}, does not reach the done", start)
    if operation.windows:
        yield from _of_unaliased(operation)


def _of_use(
    operation: AsyncOperation, use: Use, role: str, what: str, sent: Set[Operand]
) -> Iterator[Finding]:
    """Yields what one use of a buffer of a start, and the copies on the way to it, endanger."""
    user = use.instruction
    if operation.is_done(user):
        for copied in use.copies:
            message = f"{what}, is copied before {user.name} waits for it"
            yield finding("in-flight-copied", message, copied)
        return
    of_destination = role.startswith("destination")
    # A destination by position alone is inferred.
    if role == "destination":
        of_read = Severity.ERROR
    else:
        of_read = Severity.WARNING
    for copied in use.copies:
        if of_destination and _is_inside(operation, copied):
            message = f"{what}, is copied before its done"
            yield finding("in-flight-read", message, copied, severity=of_read)
    if not _is_inside(operation, user):
        return
    if use.aliased and not (role == "source" and _operand(use) in sent):
        yield finding("in-flight-written", f"{what}, is written by {user.name}", user)
    elif role == "only":
        message = f"{what}, is read; the text does not say which part"
        yield finding("in-flight-read", message, user, severity=Severity.INFO)
    elif of_destination:
        message = f"{what}, is read by {user.name}"
        yield finding("in-flight-read", message, user, severity=of_read)


def _of_unaliased(operation: AsyncOperation) -> Iterator[Finding]:
    """Yields the operands that a start reads, but that nothing holds until its done."""
    start = operation.start
    for number, operand in _unaliased_operands(start):
        if not _keeps_alive(operation, trace(operand, ())):
            what = f"{operand.name}, operand {number} of {start.name}"
            message = f"{what}, is not used after it and not aliased through it"
            yield finding("in-flight-freed", message, start)


def _operand(use: Use) -> Operand:
    return use.instruction.computation.name, use.instruction.name, use.operand


def _roles(start: Instruction) -> dict[tuple[int, ...], str]:
    """Returns the role of each buffer of a start by its index path: a source, a destination, or the
    only buffer.
    """
    aliased = {alias.output for alias in start.aliases}
    buffers = [path for path, leaf in start.shape.leaves() if _is_buffer(leaf)]
    made = [path for path in buffers if path not in aliased]
    if made:
        return {path: "destination" if path in made else "source" for path in buffers}
    if len(buffers) == 1:
        return {buffers[0]: "only"}
    return {
        path: "destination (by position)" if path == buffers[-1] else "source" for path in buffers
    }


def _is_inside(operation: AsyncOperation, instruction: Instruction) -> bool:
    return any(
        span.computation == instruction.computation.name
        and span.first <= instruction.position < span.stop
        for window in operation.windows
        for span in window.spans
    )


def _keeps_alive(operation: AsyncOperation, uses: list[Use]) -> bool:
    """Says whether one of the uses of a buffer is a done, or comes after one in the computation of
    the done.
    """
    return any(
        use.instruction.computation is window.done.computation
        and use.instruction.position >= window.done.position
        for window in operation.windows
        for use in uses
    )


def _unaliased_operands(start: Instruction) -> list[tuple[int, Instruction]]:
    """Returns the buffers that a start reads and does not alias, except the program's arguments,
    which stay alive.
    """
    aliased = {alias.operand for alias in start.aliases}
    found = []
    for n, made in enumerate(start.inputs):
        is_buffer = _is_buffer(made.shape) and not made.shape.is_tuple
        if (
            n not in aliased
            and is_buffer
            and not (made.opcode == "parameter" and made.computation.is_entry)
        ):
            found.append((n, made))
    return found


def _is_buffer(shape: Shape) -> bool:
    """Says whether an array can be one that a transfer moves, and is no semaphore and no scalar."""
    return shape.memory_space not in (SEMAPHORE, SMEM) and shape.bytes >= SMALL
