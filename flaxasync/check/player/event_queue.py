"""The queue of the events of a simulation, ordered by time."""

import heapq
import math
from collections.abc import Callable

type Answer = Callable[[], None]


class EventQueue:
    """The events that have not happened yet.

    Events at the same time happen in the order in which they were queued, so that a simulation is the same every time.
    """

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Answer]] = []
        self._queued = 0

    @property
    def next(self) -> float:
        """The time of the next event; infinity if there is none."""
        return self._events[0][0] if self._events else math.inf

    def at(self, time: float, answer: Answer) -> None:
        """Queues an event."""
        self._queued += 1
        heapq.heappush(self._events, (time, self._queued, answer))

    def pop(self) -> tuple[float, Answer]:
        """Removes the next event, and returns its time and what happens then."""
        time, _, answer = heapq.heappop(self._events)
        return time, answer
