"""The semaphores of all devices: which device waits for which value, and what it learns when the wait ends."""

import dataclasses
from collections.abc import Callable, Sequence

from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.event_queue import EventQueue
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.recorder import Recorder
from flaxasync.check.player.scalar_operations import signed
from flaxasync.check.player.vector_clocks import Progress, VectorClocks

# The comparisons of a wait, and how a message says what is needed.
_COMPARISONS = {
    "ge": (int.__ge__, "at least"),
    "gt": (int.__gt__, "more than"),
    "eq": (int.__eq__, "equal to"),
    "ne": (int.__ne__, "other than"),
    "le": (int.__le__, "at most"),
    "lt": (int.__lt__, "less than"),
}


@dataclasses.dataclass(slots=True)
class Wait:
    """A wait of one device.

    Attributes:
      semaphore: The number of the semaphore.
      comparison: How its value must compare: "ge", "gt", "eq", "ne", "le" or "lt".
      needed: The value with which it is compared.
      operation: The operation that waits.
    """

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
    """Raises semaphores, and lets devices wait for them.

    Attributes:
      waits: The wait of each device; None if it does not wait for a semaphore.
    """

    def __init__(
        self,
        devices: int,
        queue: EventQueue,
        clocks: VectorClocks,
        recorder: Recorder,
        resume: Callable[[Machine], None],
    ):
        """Makes semaphores that are all zero.

        Args:
          devices: The number of devices.
          queue: The events of the simulation.
          clocks: What the devices know about each other.
          recorder: The records of the simulation.
          resume: A function that lets a device go on after a wait.
        """
        self.waits: list[Wait | None] = [None] * devices
        self._queue, self._clocks, self._recorder, self._resume = queue, clocks, recorder, resume
        self._messages: list[dict[int, Progress]] = [{} for _ in range(devices)]  # what each semaphore has carried

    def add(
        self, machine: Machine, semaphore: int, amount: int, now: float, cause: str, message: Progress | None
    ) -> None:
        """Adds to a semaphore of a device, and lets the device go on if this ends its wait.

        Args:
          machine: The device.
          semaphore: The number of the semaphore.
          amount: What is added.
          now: The time.
          cause: The cause of the wait that this may end, a key of recorder.CAUSES.
          message: The progress that the sender knew; None if the device's own transfer raises the semaphore.
        """
        machine.semaphores[semaphore] = value = signed(machine.semaphores[semaphore] + amount)
        if message is not None and amount > 0:
            carried = self._messages[machine.device].setdefault(semaphore, [0] * len(message))
            carried[:] = map(max, carried, message)
        wait = self.waits[machine.device]
        if wait is None or wait.semaphore != semaphore or not wait.is_over(value):
            return
        self.waits[machine.device] = None
        name = wait.operation.operation.comment or wait.operation.operation.name
        self._recorder.wait(machine.device, machine.now, max(now, machine.now), name, cause, machine.busy)
        machine.wait_until(now)
        self._learn(machine, semaphore)
        self._queue.at(machine.now, lambda now: self._resume(machine))

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
            self._clocks.learn(machine.device, message)


def leftovers(machines: Sequence[Machine]) -> list[tuple[Machine, int, int]]:
    """Returns the semaphores that are not zero, each as (device, number, value)."""
    return [(m, number, value) for m in machines for number, value in sorted(m.semaphores.items()) if value]
