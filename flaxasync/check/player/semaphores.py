"""The semaphores of all devices: which device waits for which value, and what it learns when the wait ends."""

import dataclasses
import functools
import operator
from collections.abc import Callable

from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.scalar_operations import signed
from flaxasync.check.player.state import State
from flaxasync.check.player.vector_clocks import Progress

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
    """A wait of one device until a semaphore compares in some way ("ge", "eq", ...) with a needed value."""

    semaphore: int
    comparison: str
    needed: int
    operation: ExternalOperation

    def is_over(self, value: int) -> bool:
        """Says whether a value of the semaphore ends the wait."""
        return _COMPARISONS[self.comparison][0](value, self.needed)

    @property
    def needed_in_words(self) -> str:
        return f"to be {_COMPARISONS[self.comparison][1]} {self.needed}"


class Semaphores:
    """Raises semaphores, and lets devices wait for them. `resume` lets a device go on after a wait."""

    def __init__(self, state: State, resume: Callable[[Machine], None]):
        self.waits: list[Wait | None] = [None] * len(state.machines)  # None for a device that waits for no semaphore
        self._state, self._resume = state, resume
        self._messages: list[dict[int, Progress]] = [{} for _ in state.machines]  # what each semaphore has carried

    def add(
        self, machine: Machine, semaphore: int, amount: int, now: float, cause: str, message: Progress | None
    ) -> None:
        """Adds to a semaphore of a device, and lets the device go on if this ends its wait, which had the given cause.

        `message` is the progress that the sender knew; None if the device's own transfer raises the semaphore.
        """
        machine.semaphores[semaphore] = value = signed(machine.semaphores[semaphore] + amount)
        if message is not None and amount > 0:
            carried = self._messages[machine.device].get(semaphore, message)
            self._messages[machine.device][semaphore] = list(map(max, carried, message))
        wait = self.waits[machine.device]
        if wait is None or wait.semaphore != semaphore or not wait.is_over(value):
            return
        self.waits[machine.device] = None
        name = wait.operation.operation.comment or wait.operation.operation.name
        machine.recorder.wait(machine.now, now, name, cause)
        machine.wait_until(now)
        self._learn(machine, semaphore)
        self._state.queue.at(machine.now, functools.partial(self._resume, machine))

    def wait(self, machine: Machine, operation: ExternalOperation, values: tuple) -> bool:
        """Waits for a semaphore. Returns True if it has the value already, and False if the device must wait."""
        kind = operation.operation
        comparison = "ge" if kind.unit == "dma" else kind.name.split(".")[1]
        wait = Wait(values[0], comparison, signed(values[1]), operation)
        if wait.is_over(machine.semaphores[wait.semaphore]):
            self._learn(machine, wait.semaphore)
            return True
        self.waits[machine.device] = wait
        return False

    def _learn(self, machine: Machine, semaphore: int) -> None:
        if (message := self._messages[machine.device].get(semaphore)) is not None:
            self._state.clocks.learn(machine.device, message)
