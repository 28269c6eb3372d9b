"""Steps through a scheduled program on all of its devices at once, and records which instruction
runs when.

Work takes the time of costs.py. A transfer begins when both of its ends have started it and its
link is free. A done waits for its transfer. A synchronous collective waits for all devices of its
group. Of a long loop, the first three iterations and the last one are stepped through; the others
are added as repetitions of the third one.

The text does not say in which direction a kernel sends, so kernels with the same collective_id are
assumed to share a link. A kernel that was simulated by itself waits for the copies within the
device that began before it. Three things are not modelled: other work and transfers that compete
for HBM, different collectives that share links, and the time of the host.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flaxasync.check.estimate.costs import Costs
from flaxasync.check.estimate.timeline import Loop, Slice
from flaxasync.check.hlo.async_operations import (
    COLLECTIVES,
    AsyncOperation,
    async_operations,
    synchronous_collective,
)
from flaxasync.check.hlo.module import CONTROL_FLOW, Computation, Instruction
from flaxasync.check.hlo.participants import groups_in, permute_pairs
from flaxasync.check.hlo.shapes import HBM

# iterations of a longer loop that are stepped through: three at its beginning, one at its end
STEPPED_ITERATIONS = 4
MAX_DEVICES = 64  # devices that are stepped through, of a program whose devices do different things
MAX_STEPS = 4_000_000  # instructions that are stepped through, counted once for each device


class _Send(NamedTuple):
    """What one device sends in an asynchronous operation."""

    sender: int  # the index of the device
    receiver: int
    lane: str
    begin: float  # the earliest time


class Lockstep:
    """All devices of one program. They run the same instructions, each at its own time."""

    def __init__(self, costs: Costs):
        module = costs.module
        self.module = module
        self.costs = costs
        self._operations = [op for op in async_operations(module) if op.computation in costs.runs]
        # those that are stepped through; [0] where all of them do the same
        self.devices = self._distinct_devices()
        count = len(self.devices)
        self.clock = [0.0] * count  # the time of each device's core, in seconds
        # The seconds of each device, by the kind of slice, its cause, and what its time was taken
        # from.
        self.seconds: list[dict[tuple[str, str, str], float]] = [{} for _ in range(count)]
        self.slices: list[Slice] = []
        self.loops: list[Loop] = []  # of the first device
        # by the start, or by the update that brings late operands
        self._begins: dict[str, AsyncOperation] = {}
        # by the instruction that may be their done
        self._finishes: dict[str, list[AsyncOperation]] = {}
        for op in self._operations:
            first = op.start
            if op.updates and not op.start.operands:
                first = op.updates[-1]
            self._begins[first.name] = op
            for window in op.windows:
                self._finishes.setdefault(window.done.name, []).append(op)
        self._lane_free: dict[tuple[str, int], float] = {}  # when a lane of a device is next free
        self._last_copy = ""  # the last start of a copy within the devices
        # by start: when the transfers under way end, for each device
        self._ends: dict[str, list[float]] = {}
        self._started: dict[str, int] = {}  # how many had started before each start
        self._count = 0  # of starts until now
        self._depth = 0  # of loops around the instruction that is stepped through

    def run(self) -> None:
        """Steps through the whole program. ValueError says that it has too many steps."""
        self._check_steps()
        self._run(self.module.entry)

    def _run(self, computation: Computation) -> None:
        for i in computation.instructions:
            if i.name in self._begins:
                self._start(self._begins[i.name])
            if i.name in self._finishes:
                self._done(self._finishes[i.name], i)
            elif i.opcode == "while":
                self._loop(i)
            elif i.opcode in CONTROL_FLOW:
                for called in self.costs.taken(i):
                    self._run(called)
            elif (collective := synchronous_collective(i)) is not None:
                self._hold(i, collective)
            else:
                self._work(i)

    def _work(self, i: Instruction) -> None:
        """Lets every device work on an instruction, and wait within it if it is a kernel that
        does.
        """
        taken = self.costs.explained(i)
        if taken.seconds <= 0:
            return
        after_copies = taken.source == "played" and any(
            made.shape.memory_space == HBM for made in i.inputs
        )
        for n in range(len(self.devices)):
            if after_copies:
                # One transfer after the other passes HBM, and the first block of the kernel is
                # behind the copies that began before it.
                copied = self._lane_free.get(("memory", n), 0.0)
                self._spend(n, copied, i.name, "memory", self._last_copy)
            worked = self.clock[n] + taken.seconds - taken.exposed
            self._spend(n, worked, i.name, "compute", "", taken.source)
            self._spend(n, self.clock[n] + taken.exposed, i.name, "stall", i.name, taken.source)

    def _spend(
        self, n: int, until: float, name: str, kind: str, cause: str, source: str = "links"
    ) -> None:
        """Moves the core of the n-th device to a later time, and records the reason as a slice."""
        start = self.clock[n]
        if until <= start:
            return
        self.clock[n] = until
        if kind == "memory":
            key = (kind, cause, "memory")
        else:
            key = (kind, cause, source)
        self.seconds[n][key] = self.seconds[n].get(key, 0.0) + until - start
        self.slices.append(Slice(self.devices[n], "core", name, kind, start, until, cause))

    def _start(self, op: AsyncOperation) -> None:
        seconds = self.costs.transfer_seconds(op)
        if op.communicates:
            kind = "transfer"
        else:
            kind = "copy"
        ends = [0.0] * len(self.devices)
        for n, receiver, lane, earliest in self._sends(op):
            begin = max(earliest, self._lane_free.get((lane, n), 0.0))
            end = begin + seconds
            if op.communicates and lane == "memory":  # from a device to itself
                end = begin + 2 * op.bytes / self.costs.chip.hbm_bandwidth
            self._lane_free[lane, n] = end
            if lane == "memory":
                self._last_copy = op.name
                end += self.costs.memory_latency()
            self.slices.append(Slice(self.devices[n], lane, op.name, kind, begin, end, op.kind))
            # the sender, too, waits: its source may not be touched before it is sent
            ends[n] = max(ends[n], end)
            ends[receiver] = max(ends[receiver], end)
        self._ends[op.name] = ends
        self._started[op.name] = self._count = self._count + 1

    def _sends(self, op: AsyncOperation) -> Iterator[_Send]:
        """Yields what the devices send in an operation, device by device."""
        moved = op.inner or op.start
        devices = range(len(self.devices))
        if not op.communicates:
            for n in devices:
                yield _Send(n, n, op.with_host or "memory", self.clock[n])
            return
        shared = self.costs.lane(op)
        pairs = permute_pairs(moved)
        if not pairs:
            lane = shared or "links"
            if op.spelling == "kernel":  # whose text does not say where it sends
                lane = f"link {_collective_id(op.start)}"
            group_of = {n: group for group in self._groups(moved) for n in group}
            for n in devices:
                begin = max(self.clock[m] for m in group_of.get(n, [n]))
                yield _Send(n, n, lane, begin)
        elif len(self.devices) == 1:  # which stands for all
            lane = shared or f"link {_usual_shift(pairs, self.module.num_devices):+d}"
            yield _Send(0, 0, lane, self.clock[0])
        else:
            for source, target in sorted(pairs):
                if max(source, target) in devices:
                    lane = shared or f"link to {target}"
                    if target == source:
                        lane = "memory"
                    begin = max(self.clock[source], self.clock[target])
                    yield _Send(source, target, lane, begin)

    def _done(self, candidates: list[AsyncOperation], done: Instruction) -> None:
        """Lets every device wait for an operation: of those that the instruction may end, the one
        that started last.
        """
        started = [op for op in candidates if op.name in self._started]
        if not started:
            return
        op = max(started, key=lambda op: self._started[op.name])
        if op.communicates or op.thread != "main":
            kind = "stall"
        else:
            kind = "memory"
        for n, end in enumerate(self._ends[op.name]):
            self._spend(n, end, done.name, kind, op.name)

    def _hold(self, i: Instruction, collective: Instruction) -> None:
        """Lets the devices of each group wait for each other, and then holds them for the time of
        the collective.
        """
        seconds = self.costs.seconds(i)
        before = list(self.clock)
        groups = self._groups(collective)
        if len(before) > 1 and (pairs := permute_pairs(collective)):
            groups = [list(pair) for pair in pairs if max(pair) < len(before)]
        for group in groups:
            begin = max((before[n] for n in group), default=0.0)
            for n in group:
                self._spend(n, begin, f"waits for {i.name}", "stall", i.name)
                self._spend(n, begin + seconds, i.name, "collective", i.name)

    def _groups(self, i: Instruction) -> list[list[int]]:
        """Returns the groups of a collective, without the devices that are not stepped through."""
        count = len(self.devices)
        if count == 1:
            return [[0]]
        return [[device for device in group if device < count] for group in groups_in(i)]

    def _loop(self, loop: Instruction) -> None:
        body = self.module.computations.get(loop.loop_body)
        if body is None:
            return
        self._depth += 1
        trips = self.costs.trips(loop)
        depth = self._depth - 1
        began = self.clock[0]
        iteration = (began, began)
        for number in range(min(trips, STEPPED_ITERATIONS)):
            clock = list(self.clock)
            seconds = [dict(by_kind) for by_kind in self.seconds]
            self._run(body)
            if trips <= STEPPED_ITERATIONS or number == STEPPED_ITERATIONS - 2:
                iteration = (clock[0], self.clock[0])
            if trips > STEPPED_ITERATIONS and number == STEPPED_ITERATIONS - 2:
                self._repeat(loop, trips - STEPPED_ITERATIONS, clock, seconds)
        self.loops.append(Loop(loop.name, depth, trips, began, self.clock[0], iteration))
        self._depth -= 1

    def _repeat(
        self, loop: Instruction, times: int, clock: list[float], seconds: list[dict]
    ) -> None:
        """Adds iterations that are like the last one, before which the clock and the seconds were
        those given.
        """
        step = max(now - before for now, before in zip(self.clock, clock, strict=True)) * times
        for n in range(len(self.devices)):
            for key, value in list(self.seconds[n].items()):
                self.seconds[n][key] = value + times * (value - seconds[n].get(key, 0.0))
            start = self.clock[n]
            self.clock[n] += step
            name = f"{times} more iterations of {loop.name}"
            self.slices.append(Slice(self.devices[n], "core", name, "repeat", start, self.clock[n]))
        self._lane_free = {lane: end + step for lane, end in self._lane_free.items()}
        self._ends = {name: [end + step for end in ends] for name, ends in self._ends.items()}

    def _distinct_devices(self) -> list[int]:
        """Returns [0] if all devices do the same, and the first MAX_DEVICES if a permute lets some
        of them send or receive nothing, or only to themselves.
        """
        count = self.module.num_devices
        communications = [op.inner or op.start for op in self._operations]
        communications += [i for i in self.costs.executed if i.opcode in COLLECTIVES]
        by_pairs = {i.attributes.get("source_target_pairs", ""): i for i in communications}
        for i in by_pairs.values():
            pairs = permute_pairs(i)  # none for what is no permute
            senders = {source for source, target in pairs if source != target}
            receivers = {target for source, target in pairs if source != target}
            if pairs and min(len(senders), len(receivers)) < count:
                return list(range(min(count, MAX_DEVICES)))
        return [0]

    def _check_steps(self) -> None:
        """Raises ValueError if loops or calls within one another repeat so many instructions that
        it takes too long.
        """
        most = MAX_STEPS // len(self.devices)
        known: dict[str, int] = {}
        for i in self.module.entry.instructions:
            steps = self._steps_in(i, known)
            if steps > most:
                raise i.error(
                    f"'{i.name}' runs {steps:.3g} instructions on each of {len(self.devices)} "
                    f"devices, of which a timeline steps through {most}: estimate its computations "
                    "one by one"
                )

    def _steps_in(self, caller: Instruction, known: dict[str, int]) -> int:
        """Returns how many instructions are stepped through in what an instruction calls."""
        if caller.opcode not in CONTROL_FLOW:
            return 0
        bodies = self.costs.taken(caller)
        for body in bodies:
            if body.name not in known:
                known[body.name] = sum(1 + self._steps_in(i, known) for i in body.instructions)
        times = min(self.costs.trips(caller), STEPPED_ITERATIONS)
        return times * sum(known[body.name] for body in bodies)


def _collective_id(kernel: Instruction) -> int:
    config = kernel.backend_config.get("custom_call_config", {})
    if isinstance(config, dict):
        return config.get("collective_id", 0)
    return 0


def _usual_shift(pairs: Sequence[tuple[int, int]], count: int) -> int:
    """Returns the distance over which most devices send in a permute of so many: -1 to the one
    before each.
    """
    shifts = collections.Counter((target - source) % count for source, target in pairs)
    shift = shifts.most_common(1)[0][0]
    if shift > count // 2:
        return shift - count
    return shift
