"""The messages of errors, with names of semaphores, locations in the dump, and lines of the Python source."""

from collections.abc import Sequence

from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.errors import (
    DeadlockError,
    HaltError,
    LeftoverSemaphoreError,
    OutOfBoundsError,
    ProtocolError,
    RaceError,
)
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.semaphores import Wait
from flaxasync.check.player.state import State
from flaxasync.check.player.transfers import Transfer

_SHOWN = 16  # leftover semaphores that a message lists


def halted(state: State, machine: Machine, operation: ExternalOperation) -> ProtocolError:
    """Returns the error for one of the program's own checks that failed."""
    comment = operation.operation.comment
    first = comment.splitlines()[0] if comment else "no reason given"
    where = f"device {machine.device} in {machine.phase}, {machine.location(operation.index)}"
    made_at = _made_at(state, machine)
    if "BoundsCheck" in comment:
        return OutOfBoundsError(f"{where}: the program's own bounds check stops a transfer ({first}){made_at}")
    if "nonzero value" in comment:
        return LeftoverSemaphoreError(f"{where}: {first}{made_at}")
    return HaltError(f"{where}: the program halts: {first}{made_at}")


def left_in_scope(state: State, machine: Machine, semaphore: int) -> LeftoverSemaphoreError:
    """Returns the error for a semaphore that is not zero at the end of its kernel."""
    return LeftoverSemaphoreError(
        f"device {machine.device}: {_semaphore(state, semaphore)} is {machine.semaphores[semaphore]} at the end of "
        f"its life in {machine.kernel}, {machine.location()}: a transfer or signal was not waited "
        f"for{_made_at(state, machine)}"
    )


def left_at_the_end(state: State) -> LeftoverSemaphoreError | None:
    """Returns the error for semaphores that are not zero at the end of the program; None if all are zero."""
    left = [
        f"device {m.device}: {_semaphore(state, number)} is {value}"
        for m in state.machines
        for number, value in sorted(m.semaphores.items())
        if value
    ]
    listed = "\n  ".join(left[:_SHOWN])
    return LeftoverSemaphoreError(f"semaphores are not zero at the end of the program:\n  {listed}") if left else None


def deadlock(state: State, waits: Sequence[Wait | None]) -> DeadlockError:
    """Returns the error for devices that wait although no event is left that could end their waits."""
    lines = [_blocked(state, m, waits[m.device]) for m in state.machines if not m.finished]
    finished = ", ".join(str(m.device) for m in state.machines if m.finished)
    done = f"; devices {finished} ran to the end" if finished else ""
    return DeadlockError("deadlock:\n  " + "\n  ".join(lines) + done)


def not_entered(state: State, machine: Machine, target: Machine, transfer: Transfer) -> RaceError:
    """Returns the error for a write into a device that is not known to have entered the kernel."""
    return RaceError(
        f"{transfer.phase}: device {machine.device} writes into device {target.device} "
        f"({transfer.name}, {transfer.location}) without having heard that it has entered the kernel: "
        f"a barrier with the receiver is missing{_made_at(state, machine)}"
    )


def _semaphore(state: State, number: int) -> str:
    """Returns a name for a semaphore that says what it is for."""
    buffer = state.addresses.at("sflag", number)
    if buffer is not None:
        index = f"[{number - buffer.address}]" if buffer.size > 1 else ""
        return f"semaphore {number}{index}, {buffer.label},"
    return f"semaphore {number}, {state.addresses.fixed.get(('sflag', number), 'unnamed')},"


def _made_at(state: State, machine: Machine) -> str:
    """Returns the end of a message, with the line of Python that made the instruction."""
    source = state.dump.source(machine.phase)
    return f"; the operation was made at {source}" if source else ""


def _blocked(state: State, machine: Machine, wait: Wait | None) -> str:
    """Says where a device waits forever, and for what."""
    source = state.dump.source(machine.phase)
    made_at = f", made at {source}" if source else ""
    waits = f"device {machine.device} waits in {machine.phase} for"
    if wait is None:  # in a collective that is timed by the ring model
        return f"{waits} the other devices of its group; {machine.location()}{made_at}"
    comment = wait.operation.operation.comment
    why, value = f" ({comment})" if comment else "", machine.semaphores[wait.semaphore]
    return (
        f"{waits} {_semaphore(state, wait.semaphore)} {wait.needed_in_words}{why}, which is {value}; "
        f"{machine.location(wait.operation.index)}{made_at}"
    )
