"""The messages of errors, with names of semaphores, locations in the dump, and lines of the Python source."""

from collections.abc import Sequence

from flaxasync.check.player.addresses import Addresses
from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.dump import Dump
from flaxasync.check.player.errors import (
    Blocked,
    DeadlockError,
    HaltError,
    LeftoverSemaphoreError,
    OutOfBoundsError,
    PlayerError,
    ProtocolError,
    RaceError,
)
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.recorder import Recorder
from flaxasync.check.player.semaphores import Wait, leftovers
from flaxasync.check.player.transfers import Transfer

_SHOWN = 16  # leftover semaphores that a message lists


class Diagnostics:
    """Makes the errors of one simulation."""

    def __init__(self, dump: Dump, addresses: Addresses, recorder: Recorder):
        self._dump, self._addresses, self._recorder = dump, addresses, recorder

    def phase(self, machine: Machine) -> str:
        """Returns the instruction that a device is in."""
        return self._recorder.phase(machine.device) or machine.kernel

    def semaphore(self, number: int) -> str:
        """Returns a name for a semaphore that says what it is for."""
        buffer = self._addresses.at("sflag", number)
        if buffer is not None:
            index = f"[{number - buffer.address}]" if buffer.size > 1 else ""
            return f"semaphore {number}{index}, {buffer.label},"
        return f"semaphore {number}, {self._addresses.fixed.get(('sflag', number), 'unnamed')},"

    def halted(self, machine: Machine, operation: ExternalOperation) -> ProtocolError:
        """Returns the error for one of the program's own checks that failed."""
        comment = operation.operation.comment
        where = f"device {machine.device} in {self.phase(machine)}, {machine.location(operation.index)}"
        first = comment.splitlines()[0] if comment else "no reason given"
        made_at = self._made_at(machine)
        if "BoundsCheck" in comment:
            return OutOfBoundsError(f"{where}: the program's own bounds check stops a transfer ({first}){made_at}")
        if "nonzero value" in comment:
            return LeftoverSemaphoreError(f"{where}: {first}{made_at}")
        return HaltError(f"{where}: the program halts: {first}{made_at}")

    def left_in_scope(self, machine: Machine, semaphore: int) -> LeftoverSemaphoreError:
        """Returns the error for a semaphore that is not zero at the end of its kernel."""
        return LeftoverSemaphoreError(
            f"device {machine.device}: {self.semaphore(semaphore)} is {machine.semaphores[semaphore]} at the end of "
            f"its life in {machine.kernel}, {machine.location()}: a transfer or signal was not waited "
            f"for{self._made_at(machine)}"
        )

    def left_at_the_end(self, machines: Sequence[Machine]) -> LeftoverSemaphoreError | None:
        """Returns the error for semaphores that are not zero at the end of the program; None if all are zero."""
        left = [f"device {m.device}: {self.semaphore(number)} is {value}" for m, number, value in leftovers(machines)]
        if not left:
            return None
        listed = "\n  ".join(left[:_SHOWN])
        return LeftoverSemaphoreError(f"semaphores are not zero at the end of the program:\n  {listed}")

    def deadlock(self, machines: Sequence[Machine], waits: Sequence[Wait | None]) -> DeadlockError:
        """Returns the error for devices that wait although no event is left that could end their waits."""
        blocked = tuple(self._blocked(m, waits[m.device]) for m in machines if not m.finished)
        return DeadlockError(blocked, tuple(m.device for m in machines if m.finished))

    def not_entered(self, machine: Machine, target: Machine, transfer: Transfer) -> RaceError:
        """Returns the error for a write into a device that is not known to have entered the kernel."""
        return RaceError(
            f"{self.phase(machine)}: device {machine.device} writes into device {target.device} "
            f"({transfer.name}, {transfer.location}) without having heard that it has entered the kernel: "
            f"a barrier with the receiver is missing{self._made_at(machine)}"
        )

    def no_such_chip(self, machine: Machine, chip: int, topology: str) -> PlayerError:
        """Returns the error for a chip that the program addresses and the topology does not have."""
        return PlayerError(
            f"{machine.kernel} on device {machine.device} addresses chip {chip}, which {topology} lacks: "
            "name the topology that the program was compiled for"
        )

    def _made_at(self, machine: Machine) -> str:
        """Returns the end of a message, with the line of Python that made the instruction."""
        source = self._dump.source(self.phase(machine))
        return f"; the operation was made at {source}" if source else ""

    def _blocked(self, machine: Machine, wait: Wait | None) -> Blocked:
        phase = self.phase(machine)
        source = self._dump.source(phase)
        if wait is None:  # the device waits in a collective that is timed by the ring model
            others = "the other devices of its group"
            return Blocked(machine.device, phase, others, 0, "to join", "", machine.location(), source)
        return Blocked(
            device=machine.device,
            kernel=phase,
            semaphore=self.semaphore(wait.semaphore),
            value=machine.semaphores[wait.semaphore],
            needed=wait.needed_in_words,
            comment=wait.operation.operation.comment,
            location=machine.location(wait.operation.index),
            source=source,
        )
