"""Transfers as flows: how their bytes share HBM and links, and when each transfer ends.

Every byte of a transfer uses one or more resources: the HBM of a chip (twice for a copy within it),
and each directed link on its route. Resources are shared by these rules, which were chosen by
comparison with the published study (docs/player.md):

* The transfers within a chip use its HBM one at a time, in the order in which they were issued.
* A chip sends one transfer at a time over each outgoing link, in the order in which they were
  issued.
* Transfers between chips, and the one within a chip, share links and HBM evenly (max-min fairness).
  Those between chips are as slow as their link, and hardly ever wait.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

_UNLIMITED = 1e9  # bytes per cycle of a transfer that uses no resource
# Rates that differ by less are the same, but for rounding. Devices that do the same use up all of
# their resources at the same rate.
_EQUAL = 1 + 1e-12

Resource = tuple[Any, ...]  # ("hbm", device), or ("link", from, to)
Use = tuple[Resource, float]  # a resource, and the bytes of it that one byte of the transfer uses


@dataclasses.dataclass(slots=True, eq=False)
class Flow:
    """A transfer under way."""

    number: int  # of the transfer, in the order in which transfers were issued
    size: int  # bytes
    uses: tuple[Use, ...]
    # called with the time and the flow when the transfer ends
    done: Callable[[float, "Flow"], None]
    left: float  # bytes that have not moved yet
    rate: float = 0.0  # bytes per cycle at the current time
    started: float = -1.0  # when its first byte moved; -1 before that


class Network:
    """All transfers of the mesh. Times are in cycles, rates in bytes per cycle."""

    def __init__(self, capacity: Mapping[str, float]):
        """Makes a network without transfers. The resource ("hbm", device) has the capacity of the
        kind "hbm".
        """
        self._capacity = capacity
        # by the first link of a transfer, or else by its HBM
        self._queues: dict[Hashable, deque[Flow]] = {}
        self._moving: list[Flow] = []
        self._now = 0.0
        self._count = 0
        self.next = math.inf  # when the next transfer ends; infinity if none is under way

    def start(
        self, now: float, size: int, uses: tuple[Use, ...], done: Callable[[float, Flow], None]
    ) -> None:
        """Begins a transfer. One that uses no resource, because it stays in on-chip memory, ends at
        once.
        """
        self.advance(now)
        self._count += 1
        link = next((resource for resource, _ in uses if resource[0] == "link"), None)
        name = link or (uses[0][0] if uses else self._count)
        queue = self._queues.setdefault(name, deque())
        queue.append(Flow(self._count, size, uses, done, float(max(size, 1))))
        if len(queue) == 1:
            self._share()

    def advance(self, now: float) -> None:
        """Moves bytes until `now`, which must not be later than `next`."""
        elapsed = now - self._now
        if elapsed > 0:
            for flow in self._moving:
                flow.left -= flow.rate * elapsed
            self._now = now

    def finish(self) -> None:
        """Moves on to `next`, and ends the transfers that are done then."""
        now = self.next
        self.advance(now)
        ended = [f for f in self._moving if f.left <= 1e-6 * max(1, f.size) + 1e-3]
        # rounding left a few bytes in each of them; the one that is closest to its end has ended
        if not ended:
            ended = [min(self._moving, key=lambda f: f.left / f.rate)]
        for name in [name for name, queue in self._queues.items() if queue[0] in ended]:
            self._queues[name].popleft()
            if not self._queues[name]:
                del self._queues[name]
        self._share()
        for flow in ended:
            flow.done(now, flow)

    def _share(self) -> None:
        self._moving = sorted(
            (queue[0] for queue in self._queues.values()), key=lambda flow: flow.number
        )
        _share_evenly(self._moving, self._capacity)
        self.next = math.inf
        for flow in self._moving:
            if flow.started < 0:
                flow.started = self._now
            self.next = min(self.next, self._now + max(flow.left, 0.0) / flow.rate)


def _share_evenly(flows: list[Flow], capacity: Mapping[str, float]) -> None:
    """Sets max-min fair rates of flows.

    It raises all rates evenly until resources are used up, fixes the flows that need one of these,
    and goes on with the rest.
    """
    for flow in flows:
        flow.rate = _UNLIMITED
    wanted = _wanted(flows)
    free = {resource: capacity[resource[0]] for resource in wanted}
    left = [flow for flow in flows if flow.uses]
    while left:
        rate = min(free[resource] / wanted[resource] for resource in wanted)
        used_up = {
            resource for resource in wanted if free[resource] <= rate * wanted[resource] * _EQUAL
        }
        remaining = []
        for flow in left:
            if used_up.isdisjoint(resource for resource, _ in flow.uses):
                remaining.append(flow)
                continue
            flow.rate = rate
            for resource, share in flow.uses:
                free[resource] -= share * rate
        left = remaining
        wanted = _wanted(left)


def _wanted(flows: list[Flow]) -> dict[Resource, float]:
    """Returns how many bytes of each resource are used if a byte of each flow moves."""
    wanted: dict[Resource, float] = {}
    for flow in flows:
        for resource, share in flow.uses:
            wanted[resource] = wanted.get(resource, 0.0) + share
    return wanted
