"""Transfers as flows: how bytes share HBM and links, and when each transfer ends.

A transfer uses one or more resources for every byte: the HBM of a chip (twice for a copy within it) and each directed
link on its way. The order of service was chosen by comparison with the published study (docs/player.md):

* The core's own transfers use the HBM of their chip one at a time, in the order of issue.
* A chip sends one transfer at a time over an outgoing link, in the order of issue.
* Transfers between chips go before the core's own where they meet in an HBM: they are as slow as their link and never
  wait for long. Among each other they share links and HBM evenly (max-min).
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Mapping

INFINITY = float("inf")
_EPSILON = 1e-12

Use = tuple[Hashable, float]


@dataclasses.dataclass(slots=True, eq=False)
class Flow:
    """A transfer under way."""

    number: int
    size: int
    uses: tuple[Use, ...]  # (resource, bytes of it per byte)
    done: Callable[[float, "Flow"], None]
    left: float
    rate: float = 0.0
    started: float = -1.0  # when its first byte moved


class Network:
    """All transfers of the mesh. Time is in cycles, rates in bytes a cycle.

    Args:
      capacity: of a resource, by its kind, the first entry of its name: ("hbm", device), ("link", from, to).
    """

    def __init__(self, capacity: Mapping[str, float]):
        self._capacity = capacity
        self._between: dict[Hashable, deque[Flow]] = {}  # by first link
        self._own: dict[Hashable, deque[Flow]] = {}  # by HBM
        self._moving: list[Flow] = []
        self._now = 0.0
        self._count = 0
        self.next = INFINITY  # when the next transfer ends

    def start(self, now: float, size: int, uses: tuple[Use, ...], done: Callable[[float, Flow], None]) -> None:
        """Begins a transfer; `done(time, flow)` is called at its end.

        A transfer that uses no resource (within the on-chip memory) is over at once.
        """
        self.advance(now)
        self._count += 1
        flow = Flow(self._count, size, uses, done, float(max(size, 1)))
        link = next((resource for resource, _ in uses if resource[0] == "link"), None)  # type: ignore[index]
        lanes, lane = (self._between, link) if link is not None else (self._own, uses[0][0] if uses else flow.number)
        lanes.setdefault(lane, deque()).append(flow)
        if len(lanes[lane]) == 1:
            self._share()

    def advance(self, now: float) -> None:
        """Moves bytes until `now`, which must not be after `next`."""
        elapsed = now - self._now
        if elapsed > 0:
            for flow in self._moving:
                flow.left -= flow.rate * elapsed
            self._now = now

    def finish(self) -> None:
        """Moves on to `next` and ends the transfers that are done then."""
        now = self.next
        self.advance(now)
        ended = [f for f in self._moving if f.left <= 1e-6 * max(1, f.size) + 1e-3]
        if not ended:  # rounding: the one that is nearest to its end
            ended = [min(self._moving, key=lambda f: f.left / f.rate)]
        for lanes in (self._between, self._own):
            for lane in [lane for lane, queue in lanes.items() if queue[0] in ended]:
                lanes[lane].popleft()
                if not lanes[lane]:
                    del lanes[lane]
        self._share()
        for flow in ended:
            flow.done(now, flow)

    def _share(self) -> None:
        """Gives every transfer that is at the head of its lane a rate."""
        between = sorted((queue[0] for queue in self._between.values()), key=_number)
        own = sorted((queue[0] for queue in self._own.values()), key=_number)
        free: dict[Hashable, float] = {}
        for flow in between + own:
            for resource, _ in flow.uses:
                free[resource] = self._capacity[resource[0]]  # type: ignore[index]
        _max_min(between, free)
        for flow in own:
            flow.rate = min((free[resource] / share for resource, share in flow.uses), default=1e9)
        self._moving = [f for f in between + own if f.rate > _EPSILON]
        self.next = INFINITY
        for flow in self._moving:
            if flow.started < 0:
                flow.started = self._now
            self.next = min(self.next, self._now + max(flow.left, 0.0) / flow.rate)


def _number(flow: Flow) -> int:
    return flow.number


def _max_min(flows: list[Flow], free: dict[Hashable, float]) -> None:
    """Fills all flows evenly until a resource is used up, fixes the flows that need it, and goes on with the rest."""
    left = list(flows)
    while left:
        wanted: dict[Hashable, float] = {}
        for flow in left:
            for resource, share in flow.uses:
                wanted[resource] = wanted.get(resource, 0.0) + share
        narrow = min(wanted, key=lambda resource: free[resource] / wanted[resource])
        rate = max(free[narrow] / wanted[narrow], 0.0)
        for flow in [f for f in left if any(resource == narrow for resource, _ in f.uses)]:
            flow.rate = rate
            for resource, share in flow.uses:
                free[resource] -= share * rate
            left.remove(flow)
