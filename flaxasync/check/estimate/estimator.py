"""`timeline`: an estimated timeline of a scheduled program, per device: work, transfers, and the stalls between.

Plays the text of the program, in its scheduled order, on every device at once: work takes the time of cost.py, a
transfer begins when both ends have started it and its link is free, a done waits for its transfer, a synchronous
collective waits for its group. Loops are played for a few iterations and then repeated. The result type, `Timeline`,
is also that of better sources of time.

Kernels that start a transfer do not say which way it goes: those with one collective_id are taken to share a link. Not
modelled: contention for HBM between work and transfers, links shared by different collectives, host time.
"""

import collections
from collections.abc import Mapping
from typing import Any

from flaxasync.check.auditing.audit import chip_of, executed, module_of
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.estimate.timeline import KINDS, DeviceTime, Loop, Slice, Timeline
from flaxasync.check.hlo.async_operations import COLLECTIVES, AsyncOperation, async_operations
from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.participants import permute_pairs, replica_groups
from flaxasync.hardware import Chip
from flaxasync.hardware import chip as chip_named

PLAYED = 4  # iterations of a longer loop that are played: three at its begin, one at its end
MAX_DEVICES = 64  # of a program whose devices do different things
KNOWN_ERROR = {
    "v5e": "+2.4 % on the one program with a published time, the 2x2 jnp.matmul of docs/check.md "
    "(12.05 ms measured, 12.34 estimated)"
}


def timeline(
    compiled: Any, chip: str | None = None, *, kernels: Mapping[str, float] | None = None, copies: str = "cycles"
) -> Timeline:
    """Estimates when what runs.

    Args:
      compiled: a compiled program, its text, or a parsed module; it must be scheduled.
      chip: "v5e", "v6e", "v5p" or "tpu7x" (a topology's name will do); that of the program when None.
      kernels: seconds of Pallas kernels by name; by default their own cost estimate at the chip's peak.
      copies: "cycles" takes the compiler's estimates of copies, which are far too long within vector memory; "bytes"
        times copies by what they move.

    Returns:
      The timeline; `.seconds`, `.compute`, `.exposed`, `.save_trace(path)`, `.save_picture(path)`; str() is a table.

    Raises:
      ValueError: the chip is unknown or not given, or the program is not scheduled or has no text.
      HloError: the text cannot be read.
    """
    module = module_of(compiled)
    named = chip or chip_of(compiled)
    if named is None:
        raise ValueError("chip must be given for a text, which does not name it: chip='v5e', for example")
    if not module.is_scheduled:
        raise ValueError(
            f"{module.name or 'the text'} is not scheduled, so it has no order to put in time: compile it first "
            "(jitted.lower(...).compile(), or compile_for)"
        )
    if copies not in ("bytes", "cycles"):
        raise ValueError(f"copies must be 'bytes' or 'cycles': got {copies!r}")
    costs = Costs(module, chip_named(named), dict(kernels or {}), copies)
    return _Player(module, costs).play()


class _Player:
    """All devices of one program, in lockstep: they run the same instructions."""

    def __init__(self, module: HloModule, costs: Costs):
        self.module, self.costs = module, costs
        self.executed = executed(module, costs)
        self.operations = [op for op in async_operations(module) if op.computation in self.executed]
        self.devices = self.distinct_devices()
        count = len(self.devices)
        self.clock = [0.0] * count
        self.totals: list[dict[tuple[str, str], float]] = [{} for _ in range(count)]
        self.slices: list[Slice] = []
        self.loops: list[Loop] = []
        self.free: dict[tuple[str, int], float] = {}  # when a lane of a device is next free
        self.ends: dict[str, list[float]] = {}  # of the transfers under way, by start
        self.order: list[str] = []  # starts in the order they ran
        self.begin = {op.name: op for op in self.operations if op.start.operands or not op.updates}
        self.begin |= {op.updates[-1].name: op for op in self.operations if op.updates and not op.start.operands}
        self.finish: dict[str, list[AsyncOperation]] = {}
        for op in self.operations:
            for window in op.windows:
                self.finish.setdefault(window.done.name, []).append(op)
        self.trail: list[str] = []

    def distinct_devices(self) -> list[int]:
        """Returns [0] where all devices do the same, all of them where a permute leaves some out."""
        count = self.module.num_partitions
        for i in self.communications():
            pairs = [(source, target) for source, target in permute_pairs(i) if source != target]
            if permute_pairs(i) and (len({s for s, _ in pairs}) < count or len({t for _, t in pairs}) < count):
                return list(range(min(count, MAX_DEVICES)))
        return [0]

    def communications(self) -> list[Instruction]:
        starts = [op.inner or op.start for op in self.operations]
        return starts + [
            i for n in self.executed for i in self.module.computations[n].instructions if i.opcode in COLLECTIVES
        ]

    def play(self) -> Timeline:
        self.run(self.module.entry)
        chip = self.costs.chip
        devices = []
        for n, device in enumerate(self.devices):
            causes: dict[str, float] = {}
            sums = dict.fromkeys(KINDS, 0.0)
            for (kind, cause), seconds in self.totals[n].items():
                sums[kind] += seconds
                if cause:
                    causes[cause] = causes.get(cause, 0.0) + seconds
            exposed = sums["stall"] + sums["collective"]
            devices.append(DeviceTime(device, self.clock[n], sums["compute"], exposed, sums["memory"], causes))
        return Timeline(
            self.module.name,
            chip.name,
            _basis(chip, self.costs.copies),
            _known_error(chip),
            tuple(self.slices),
            tuple(devices),
            self.notes(),
            tuple(self.loops),
        )

    def notes(self) -> tuple[str, ...]:
        notes = []
        if len(self.devices) == 1 and self.module.num_partitions > 1:
            notes.append(f"all {self.module.num_partitions} devices do the same: one is shown")
        if len(self.devices) < self.module.num_partitions and len(self.devices) > 1:
            notes.append(f"the first {len(self.devices)} of {self.module.num_partitions} devices are shown")
        unknown = [
            i.name
            for n in self.executed
            for i in self.module.computations[n].instructions
            if i.custom_call_target == "tpu_custom_call"
            and self.costs.explained(self.module.computations[n], i)[1] == "bytes"
        ]
        if unknown:
            named = ", ".join(unknown[:4]) + (" ..." if len(unknown) > 4 else "")
            notes.append(
                f"Pallas kernels without a cost estimate count as their bytes: {named}; give kernels={{name: seconds}}"
            )
        return tuple(notes)

    def run(self, computation: Computation) -> None:
        for i in computation.instructions:
            if i.name in self.begin:
                self.start(computation, self.begin[i.name])
            if i.name in self.finish:
                self.done(self.finish[i.name], i)
            elif i.opcode == "while":
                self.loop(i)
            elif i.opcode == "conditional":
                self.branch(i)
            elif i.opcode == "call":
                for name in i.called_computations:
                    self.run(self.module.computations[name])
            elif (collective := self.synchronous(i)) is not None:
                self.collective(computation, i, collective)
            elif (seconds := self.costs.seconds(computation, i)) > 0:
                for n in range(len(self.devices)):
                    self.spend(n, self.clock[n] + seconds, i.name, "compute", "")

    def spend(self, n: int, until: float, name: str, kind: str, cause: str) -> None:
        """Moves a device's core to a later time."""
        start = self.clock[n]
        if until <= start:
            return
        self.clock[n] = until
        key = (kind, cause)
        self.totals[n][key] = self.totals[n].get(key, 0.0) + until - start
        self.slices.append(Slice(self.devices[n], "core", name, kind, start, until, cause))

    def start(self, computation: Computation, op: AsyncOperation) -> None:
        seconds = self.costs.transfer_seconds(op)
        ends = [0.0] * len(self.devices)
        to_itself = 2 * op.bytes / self.costs.chip.hbm_bandwidth
        for n in range(len(self.devices)):
            for lane, begin, partner in self.ways(op, n):
                begin = max(begin, self.free.get((lane, n), 0.0))
                end = begin + (to_itself if op.communicates and lane == "memory" else seconds)
                self.free[lane, n] = end
                kind = "transfer" if op.communicates else "copy"
                self.slices.append(Slice(self.devices[n], lane, op.name, kind, begin, end, op.kind))
                ends[n] = max(ends[n], end)  # the source may not be touched before it is sent
                ends[partner] = max(ends[partner], end)
        self.ends[op.name] = ends
        self.order = [name for name in self.order if name != op.name] + [op.name]

    def ways(self, op: AsyncOperation, n: int) -> list[tuple[str, float, int]]:
        """Returns (lane, earliest begin, receiving device) of what device n sends in an operation."""
        pairs = permute_pairs(op.inner or op.start)
        count = max(self.module.num_partitions, 1)
        if not op.communicates:
            return [("memory", self.clock[n], n)]
        if not pairs:
            group = next((g for g in self.groups(op.inner or op.start) if n in g), [n])
            lane = "links" if op.spelling != "kernel" else _kernel_lane(op)
            return [(lane, max(self.clock[m] for m in group), n)]
        if len(self.devices) == 1:
            shift = collections.Counter((target - source) % count for source, target in pairs).most_common(1)[0][0]
            return [(f"link {shift if shift <= count // 2 else shift - count:+d}", self.clock[0], 0)]
        ways = []
        for source, target in pairs:
            if source == n and target < len(self.devices):
                lane = f"link to {target}" if target != n else "memory"
                ways.append((lane, max(self.clock[n], self.clock[target]), target))
        return ways

    def groups(self, i: Instruction) -> list[list[int]]:
        """Returns the groups of a collective as indices of the devices that are played."""
        if len(self.devices) == 1:
            return [[0]]
        groups = replica_groups(i, self.module.num_partitions)
        return [[d for d in group if d < len(self.devices)] for group in groups]

    def done(self, candidates: list[AsyncOperation], done: Instruction) -> None:
        started = [name for name in self.order if any(op.name == name for op in candidates)]
        if not started:
            return
        op = next(op for op in candidates if op.name == started[-1])
        kind = "stall" if op.communicates or op.thread not in ("main", "") else "memory"
        for n, end in enumerate(self.ends[op.name]):
            self.spend(n, end, done.name, kind, op.name)

    def synchronous(self, i: Instruction) -> Instruction | None:
        """Returns the collective that an instruction performs without a start, itself or within a fusion."""
        if i.opcode == "fusion":
            inside = self.costs.fused_collective(i)
            return inside if inside is not None and inside.opcode in COLLECTIVES else None
        return i if i.opcode in COLLECTIVES and i.opcode not in ("send", "recv") else None

    def collective(self, computation: Computation, i: Instruction, collective: Instruction) -> None:
        seconds = self.costs.seconds(computation, i)
        pairs = permute_pairs(collective)
        if pairs and len(self.devices) > 1:
            before = list(self.clock)
            for source, target in pairs:
                if source < len(before) and target < len(before):
                    begin = max(before[source], before[target])
                    for n in (source, target):
                        self.spend(n, begin, f"waits for {i.name}", "stall", i.name)
                        self.spend(n, begin + seconds, i.name, "collective", i.name)
            return
        for group in self.groups(collective):
            begin = max((self.clock[n] for n in group), default=0.0)
            for n in group:
                self.spend(n, begin, f"waits for {i.name}", "stall", i.name)
                self.spend(n, begin + seconds, i.name, "collective", i.name)

    def branch(self, i: Instruction) -> None:
        names = [name for name in i.called_computations if name in self.module.computations]
        if names:
            self.run(self.module.computations[max(names, key=self.costs.computation_seconds)])

    def loop(self, loop: Instruction) -> None:
        body = self.module.computations.get(loop.attributes.get("body", "").lstrip("%"))
        if body is None or body.name in self.trail:
            return
        self.trail.append(body.name)
        trips, depth = self.costs.trips(loop), len(self.trail) - 1
        began = before = after = self.clock[0]
        if trips <= PLAYED:
            for _ in range(trips):
                before = self.clock[0]
                self.run(body)
            after = self.clock[0]
        else:
            for _ in range(PLAYED - 2):
                self.run(body)
            clock, totals = list(self.clock), [dict(t) for t in self.totals]
            self.run(body)
            before, after = clock[0], self.clock[0]
            self.repeat(loop, trips - PLAYED, clock, totals)
            self.run(body)
        self.loops.append(Loop(loop.name, depth, trips, began, self.clock[0], (before, after)))
        self.trail.pop()

    def repeat(self, loop: Instruction, times: int, clock: list[float], totals: list[dict]) -> None:
        """Adds iterations like the last one, which began at `clock` with `totals`."""
        step = max(now - before for now, before in zip(self.clock, clock, strict=True)) * times
        for n in range(len(self.devices)):
            for key, value in list(self.totals[n].items()):
                self.totals[n][key] = value + times * (value - totals[n].get(key, 0.0))
            start = self.clock[n]
            self.clock[n] += step
            name = f"{times} more iterations of {loop.name}"
            self.slices.append(Slice(self.devices[n], "core", name, "repeat", start, self.clock[n]))
        self.free = {lane: end + step for lane, end in self.free.items()}
        self.ends = {name: [end + step for end in ends] for name, ends in self.ends.items()}


def _kernel_lane(op: AsyncOperation) -> str:
    """Kernels with the same barrier are taken to send the same way, others another way: the text does not tell."""
    config = op.start.backend_config.get("custom_call_config", {})
    return f"link {config.get('collective_id', 0) if isinstance(config, dict) else 0}"


def _basis(chip: Chip, copies: str) -> str:
    cycles = "matmuls and copies" if copies == "cycles" else "matmuls"
    return (
        f"the compiler's cycle estimates of {cycles} at {chip.clock / 1e9:g} GHz, other work by its bytes in HBM of "
        f"{chip.hbm_bandwidth / 1e9:g} GB/s at {chip.hbm_efficiency:.0%}, links of {chip.link_bandwidth / 1e9:g} GB/s "
        "each way; nothing was run"
    )


def _known_error(chip: Chip) -> str:
    return KNOWN_ERROR.get(chip.name, f"none measured on {chip.name}")
