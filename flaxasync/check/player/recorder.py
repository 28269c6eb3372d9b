"""The record of one device: what it does when, and where its time and its bytes go, in total and by phase."""

import dataclasses
from collections import Counter
from typing import Any

from flaxasync.check.estimate.timeline import Slice
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.result import Device, Phase


@dataclasses.dataclass(slots=True)
class Counts:
    """What a device has done so far, or in one phase. Times are in cycles."""

    cycles: float = 0.0
    issue: int = 0  # in which a bundle was issued
    stall: int = 0  # in which a bundle waited for a matrix unit
    busy: int = 0  # in which the busiest matrix unit multiplied
    waits: Counter[str] = dataclasses.field(default_factory=Counter)  # cycles by cause
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)  # that transfers moved, by kind

    def at(self, now: float) -> "Counts":
        return dataclasses.replace(self, cycles=now, waits=self.waits.copy(), bytes=self.bytes.copy())

    def times(self, chip: PlayedChip) -> dict[str, Any]:
        return {
            "seconds": chip.seconds(self.cycles),
            "issue": chip.seconds(self.issue),
            "matrix_stall": chip.seconds(self.stall),
            "matrix_busy": chip.seconds(self.busy),
            "waits": {cause: chip.seconds(cycles) for cause, cycles in sorted(self.waits.items())},
            "bytes": dict(sorted(self.bytes.items())),
        }

    def add(self, later: "Counts", earlier: "Counts") -> None:
        self.cycles += later.cycles - earlier.cycles
        self.issue += later.issue - earlier.issue
        self.stall += later.stall - earlier.stall
        self.busy += later.busy - earlier.busy
        self.waits.update(later.waits - earlier.waits)
        self.bytes.update(later.bytes - earlier.bytes)


@dataclasses.dataclass(slots=True)
class _Phase:
    """All executions of one instruction of the program on one device."""

    start: float  # of the execution that ended first, in cycles
    depth: int  # the number of instructions (loops) around it
    runs: int = 0
    counts: Counts = dataclasses.field(default_factory=Counts)


class Recorder:
    """The record of one device. `slices` collects those of all devices, in the order in which they end."""

    def __init__(self, device: int, chip: PlayedChip, slices: list[Slice]):
        self.counts = Counts()  # what the device has done so far, without its time
        self._device, self._chip, self._slices = device, chip, slices
        self._open: list[tuple[str, Counts]] = []  # the phases that the device is in, with its counts when it entered
        self._ended: dict[str, _Phase] = {}
        self._analytic: set[str] = set()
        self._run_start = 0.0

    @property
    def phase(self) -> str:
        """The innermost instruction that the device is in; "" if it is in none."""
        return self._open[-1][0] if self._open else ""

    def enter_phase(self, name: str, now: float) -> None:
        self.run_until(now)
        self._open.append((name, self.counts.at(now)))

    def leave_phase(self, now: float) -> None:
        """Ends the innermost phase, if the device is in one."""
        if not self._open:
            return
        self.run_until(now)
        name, before = self._open.pop()
        phase = self._ended.setdefault(name, _Phase(before.cycles, len(self._open)))
        phase.runs += 1
        phase.counts.add(self.counts.at(now), before)

    def run_until(self, now: float) -> None:
        if now > self._run_start:
            self._slice("core", self.phase or "program", "compute", self._run_start, now)
        self._run_start = now

    def wait(self, start: float, end: float, name: str, cause: str) -> None:
        if end > start:
            self.run_until(start)
            self.counts.waits[cause] += end - start  # type: ignore[assignment]
            self._slice("core", name, cause if cause in ("memory", "collective") else "stall", start, end, cause)
            self._run_start = end

    def transfer(self, lane: str, start: float, end: float, name: str) -> None:
        self._slice(lane, name, "copy" if lane == "memory" else "transfer", start, end, name)

    def mark_analytic(self) -> None:
        self._analytic.add(self.phase)

    def device(self, coords: tuple[int, ...], now: float) -> Device:
        """Returns where the time of the device went until its end, on the chip with these coordinates."""
        phases = [
            Phase(
                name=name, runs=p.runs, start=self._chip.seconds(p.start), depth=p.depth,
                analytic=name in self._analytic, **p.counts.times(self._chip),
            )
            for name, p in self._ended.items()
        ]  # fmt: skip
        in_order = tuple(sorted(phases, key=lambda p: (p.start, p.depth)))
        times = self.counts.at(now).times(self._chip)
        return Device(device=self._device, coords=coords, phases=in_order, **times)

    def _slice(self, lane: str, name: str, kind: str, start: float, end: float, cause: str = "") -> None:
        seconds = self._chip.seconds
        self._slices.append(Slice(self._device, lane, name, kind, seconds(start), seconds(end), cause))
