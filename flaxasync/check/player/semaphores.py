"""Semaphores: which device waits for which value, what it learns when the wait ends, and what is a
wrong protocol.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.errors import DeadlockError, LeftoverSemaphoreError
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.result import SIGNAL
from flaxasync.check.player.scalar_operations import signed
from flaxasync.check.player.state import Progress, State

SEMAPHORE_MASK = 0x1FFF  # the bits of an operand that hold the number of a semaphore
_SHOWN = 16  # leftover semaphores that a message lists
# The comparisons of a wait, and how a message says what is needed.
_COMPARISONS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "eq": (operator.eq, "equal to"),
    "ne": (operator.ne, "other than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


@dataclasses.dataclass(slots=True)
class Wait:
    """A wait of one device until a semaphore compares in some way ("ge", "eq", ...) with a needed
    value.
    """

    semaphore: int
    comparison: str
    needed: int
    external: ExternalOperation

    def is_over(self, value: int) -> bool:
        return _COMPARISONS[self.comparison][0](value, self.needed)


class Semaphores:
    """Raises semaphores, and lets devices wait for them. `resume` lets a device go on after a
    wait.
    """

    def __init__(self, state: State, resume: Callable[[Machine], None]):
        # None for a device that waits for no semaphore
        self._waits: list[Wait | None] = [None] * len(state.machines)
        self._state = state
        self._resume = resume
        # what each semaphore has carried
        self._messages: list[dict[int, Progress]] = [{} for _ in state.machines]
        # what last raised each semaphore
        self._kinds: list[dict[int, str]] = [{} for _ in state.machines]

    def add(
        self,
        machine: Machine,
        semaphore: int,
        amount: int,
        now: float,
        kind: str,
        message: Progress | None,
    ) -> None:
        """Adds to a semaphore of a device, and lets the device go on if this ends its wait.

        `kind` is that of the transfer that raises the semaphore, or SIGNAL. `message` is the
        progress that the sender knew; None if the device's own transfer has left.
        """
        machine.semaphores[semaphore] = value = signed(machine.semaphores[semaphore] + amount)
        if amount > 0:
            self._kinds[machine.device][semaphore] = kind
            if message is not None:
                carried = self._messages[machine.device].get(semaphore, message)
                self._messages[machine.device][semaphore] = list(map(max, carried, message))
        wait = self._waits[machine.device]
        if wait is None or wait.semaphore != semaphore or not wait.is_over(value):
            return
        self._waits[machine.device] = None
        operation = wait.external.operation
        if kind == SIGNAL:
            cause = "sync"
        elif "remote" not in kind:
            cause = "memory"
        elif message is None:
            cause = "send"
        else:
            cause = "receive"
        machine.recorder.wait(machine.now, now, operation.comment or operation.name, cause, kind)
        machine.wait_until(now)
        self._learn(machine, semaphore)
        self._state.at(machine.now, functools.partial(self._resume, machine))

    def wait(self, machine: Machine, external: ExternalOperation, values: tuple) -> bool:
        """Waits for a semaphore. Returns True if it has the value already, and False if the device
        must wait.
        """
        comparison = "ge"
        if external.operation.unit != "dma":
            comparison = external.operation.name.split(".")[1]
        wait = Wait(values[0], comparison, signed(values[1]), external)
        if wait.is_over(machine.semaphores[wait.semaphore]):
            self._learn(machine, wait.semaphore)
            machine.recorder.wait(
                machine.now,
                machine.now,
                "",
                "",
                self._kinds[machine.device].get(wait.semaphore, ""),
            )
            return True
        self._waits[machine.device] = wait
        return False

    def end_scope(self, machine: Machine, semaphore: int) -> None:
        """Raises LeftoverSemaphoreError for a semaphore that is not zero at the end of its
        kernel.
        """
        if value := machine.semaphores[semaphore]:
            raise LeftoverSemaphoreError(
                f"device {machine.device}: {self._named(semaphore)} is {value} at the end of its "
                f"life in {machine.kernel}, {machine.location()}: a transfer or signal was not "
                f"waited for{self._state.made_at(machine)}"
            )

    def end_program(self) -> None:
        """Raises LeftoverSemaphoreError for semaphores that are not zero at the end of the
        program.
        """
        left = [
            f"device {m.device}: {self._named(number)} is {value}"
            for m in self._state.running
            for number, value in sorted(m.semaphores.items())
            if value
        ]
        if left:
            listed = "\n  ".join(left[:_SHOWN])
            raise LeftoverSemaphoreError(
                f"semaphores are not zero at the end of the program:\n  {listed}"
            )

    def deadlock(self) -> DeadlockError:
        """Returns the error for devices that wait although no event is left that could end their
        waits.
        """
        machines = self._state.running
        lines = [self._blocked(m) for m in machines if not m.finished]
        finished = ", ".join(str(m.device) for m in machines if m.finished)
        if finished:
            done = f"; devices {finished} ran to the end"
        else:
            done = ""
        return DeadlockError("deadlock:\n  " + "\n  ".join(lines) + done)

    def _learn(self, machine: Machine, semaphore: int) -> None:
        if (message := self._messages[machine.device].get(semaphore)) is not None:
            self._state.clocks.learn(machine.device, message)

    def _blocked(self, machine: Machine) -> str:
        source = self._state.dump.source(machine.phase)
        if source:
            made_at = f", made at {source}"
        else:
            made_at = ""
        waits = f"device {machine.device} waits in {machine.phase} for"
        wait = self._waits[machine.device]
        if wait is None:  # in a collective that is timed by the ring model
            return f"{waits} the other devices of its group; {machine.location()}{made_at}"
        comment = wait.external.operation.comment
        value = machine.semaphores[wait.semaphore]
        needed = f"to be {_COMPARISONS[wait.comparison][1]} {wait.needed}"
        if comment:
            needed = f"{needed} ({comment})"
        where = machine.location(wait.external.index)
        return f"{waits} {self._named(wait.semaphore)} {needed}, which is {value}; {where}{made_at}"

    def _named(self, number: int) -> str:
        addresses = self._state.addresses
        buffer = addresses.at("sflag", number)
        if buffer is not None:
            if buffer.size > 1:
                index = f"[{number - buffer.address}]"
            else:
                index = ""
            return f"semaphore {number}{index}, {buffer.label},"
        return f"semaphore {number}, {addresses.fixed.get(('sflag', number), 'unnamed')},"
