"""What is written down while devices run: stretches of time on lanes, the phases of the program, and bytes by kind."""

import dataclasses
from collections import Counter

CAUSES = {
    "memory": "a transfer of the device's own",
    "receive": "bytes from another device",
    "send": "its own bytes to have left for another device",
    "sync": "a signal of another device",
    "collective": "a collective of XLA, timed by a ring model",
}


@dataclasses.dataclass(slots=True)
class Stretch:
    """A stretch of one device's time. Times in cycles."""

    device: int
    lane: str  # "core", "memory", "link to N"
    name: str
    kind: str  # "run", "wait", "transfer", "copy"
    start: float
    end: float
    cause: str = ""
    busy: int = 0  # cycles of the matrix unit within


@dataclasses.dataclass(slots=True)
class PhaseTime:
    """One stay in one instruction of the program. Times in cycles."""

    device: int
    name: str
    start: float
    end: float
    depth: int
    issue: int
    stall: int
    busy: int
    waits: Counter[str]
    analytic: bool
    bytes: Counter[str]


@dataclasses.dataclass(slots=True)
class _Open:
    name: str
    start: float
    issue: int
    stall: int
    busy: int
    waits: Counter[str]
    bytes: Counter[str]
    analytic: bool = False


class Recorder:
    """Books of all devices."""

    def __init__(self, devices: int):
        self.stretches: list[Stretch] = []
        self.phases: list[PhaseTime] = []
        self.waits: list[Counter[str]] = [Counter() for _ in range(devices)]
        self.bytes: list[Counter[str]] = [Counter() for _ in range(devices)]
        self.counts: Counter[str] = Counter()
        self._open: list[list[_Open]] = [[] for _ in range(devices)]
        self._run_start = [0.0] * devices
        self._run_busy = [0] * devices

    def phase(self, device: int) -> str:
        """Returns the innermost instruction that a device is in."""
        return self._open[device][-1].name if self._open[device] else ""

    def open(self, device: int, name: str, now: float, issue: int, stall: int, busy: int) -> None:
        self.run_until(device, now, busy)
        entry = _Open(name, now, issue, stall, busy, self.waits[device].copy(), self.bytes[device].copy())
        self._open[device].append(entry)

    def close(self, device: int, now: float, issue: int, stall: int, busy: int) -> None:
        self.run_until(device, now, busy)
        entry = self._open[device].pop()
        waits, moved = self.waits[device] - entry.waits, self.bytes[device] - entry.bytes
        self.phases.append(
            PhaseTime(
                device, entry.name, entry.start, now, len(self._open[device]), issue - entry.issue, stall - entry.stall,
                busy - entry.busy, waits, entry.analytic, moved,
            )
        )  # fmt: skip

    def mark_analytic(self, device: int) -> None:
        if self._open[device]:
            self._open[device][-1].analytic = True

    def depth(self, device: int) -> int:
        return len(self._open[device])

    def run_until(self, device: int, now: float, busy: int) -> None:
        """Ends the stretch in which the core ran."""
        start = self._run_start[device]
        if now > start:
            name = self.phase(device) or "program"
            self.stretches.append(Stretch(device, "core", name, "run", start, now, "", busy - self._run_busy[device]))
        self._run_start[device], self._run_busy[device] = now, busy

    def wait(self, device: int, start: float, end: float, name: str, cause: str, busy: int) -> None:
        """Writes down that the core waited."""
        if end <= start:
            return
        self.run_until(device, start, busy)
        self.waits[device][cause] += end - start  # type: ignore[assignment]
        self.stretches.append(Stretch(device, "core", name, "wait", start, end, cause))
        self._run_start[device] = end

    def transfer(self, device: int, lane: str, name: str, kind: str, start: float, end: float) -> None:
        self.stretches.append(Stretch(device, lane, name, kind, start, end, name))

    def move(self, device: int, kind: str, size: int) -> None:
        self.bytes[device][kind] += size
        self.counts[kind] += 1
