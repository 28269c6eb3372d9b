"""`Result`: where the time and the bytes of a simulated program went, for each device and phase;
and its `Recorder`.

A phase is one instruction of the scheduled program, with all of its executions. Times are in
seconds, and every device begins at 0.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from flaxasync.check.estimate.timeline import DeviceTime, Slice, Timeline
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.matrix_unit import Operations

# What a device can wait for.
CAUSES = {
    "memory": "a transfer within its own chip",
    "receive": "bytes from another device",
    "send": "its own bytes to have left for another device",
    "sync": "a signal of another device",
    "collective": "a collective of XLA that is timed by a ring model",
}
# what raises semaphores beside transfers
RING_MODEL = "collective (ring model)"
SIGNAL = "signal"


def exposed_in(waits: Mapping[str, float]) -> float:
    """Returns the seconds of waiting for other devices."""
    return sum(waits.get(cause, 0.0) for cause in CAUSES if cause != "memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Where the time and the bytes of a device, or of a phase, went. Times are in seconds."""

    seconds: float  # all of its time: the sum of `issue`, `matrix_stall` and all `waits`
    issue: float  # in which bundles were issued
    matrix_stall: float = 0.0  # in which a bundle waited for a matrix unit
    matrix_busy: float = 0.0  # in which the busiest matrix unit multiplied
    waits: Mapping[str, float]  # by cause
    # that its transfers moved, by kind
    bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase(Times):
    """One instruction of the program, with all of its executions together."""

    name: str
    runs: int  # how often it was executed
    start: float  # when the first execution began, in seconds
    analytic: bool = False  # whether a collective in it was timed by the ring model
    depth: int = 0  # the number of loops around it

    @property
    def exposed(self) -> float:
        """Seconds of waiting for other devices."""
        return exposed_in(self.waits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device(Times, DeviceTime):
    """One device, by the number of its partition and the coordinates of its chip."""

    coords: tuple[int, ...]
    phases: tuple[Phase, ...]  # in the order in which they first began

    @property
    def share_of_peak(self) -> float:
        """The share of the time in which a matrix unit multiplies. It is the share of peak where
        tiles are full.
        """
        if self.seconds:
            return self.matrix_busy / self.seconds
        return 0.0

    def phase(self, name: str) -> Phase:
        """Returns the phase whose name begins so, or the longest of them if there are several.

        Raises:
          KeyError: There is no such phase.
        """
        found = [p for p in self.phases if p.name.startswith(name)]
        if not found:
            raise KeyError(
                f"no phase begins with {name!r}: {', '.join(p.name for p in self.phases)}"
            )
        return max(found, key=lambda p: p.seconds)


class EndedWait(NamedTuple):
    """One wait of a device for a semaphore. It takes no time if the semaphore has been raised
    before.
    """

    device: int
    phase: str
    start: float  # in seconds
    seconds: float
    # of the transfer that last raised the semaphore, as in `Times.bytes`; SIGNAL, RING_MODEL; ""
    # for none
    kind: str


@dataclasses.dataclass(frozen=True)
class WaitTimes:
    """How long some waits took, in seconds, the shortest first."""

    seconds: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """Returns the least time that `share` percent of the waits do not exceed; 0.0 if there are
        no waits.
        """
        rank = math.ceil(share / 100 * len(self.seconds))
        if self.seconds:
            return self.seconds[max(rank, 1) - 1]
        return 0.0

    def __str__(self) -> str:
        shown = ", ".join(
            f"p{share} {self.percentile(share) * 1e6:.3f}" for share in (50, 90, 99, 100)
        )
        return f"{len(self.seconds)} waits of {sum(self.seconds) * 1e6:.1f} us in all, {shown} us"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result(Timeline):
    """A simulated program: a timeline whose devices say more. `print` shows a table."""

    topology: str
    devices: tuple[Device, ...]  # in the order of the partitions
    # of each fusion, of each kernel, and of the top level program ("TLP")
    operations: Mapping[str, Operations] = dataclasses.field(default_factory=dict)
    # of all devices, in the order in which they ended
    all_waits: tuple[EndedWait, ...] = dataclasses.field(default=(), repr=False)
    # what the audit rejects of buffers in flight, which no figure here shows
    unsafe: tuple[str, ...] = ()

    @property
    def slowest(self) -> Device:
        return max(self.devices, key=lambda d: d.seconds)

    @property
    def share_of_peak(self) -> float:
        return self.slowest.share_of_peak

    @property
    def bytes(self) -> dict[str, int]:
        return dict(sum((Counter(d.bytes) for d in self.devices), Counter()))

    def waits(
        self,
        device: int,
        phase: str = "",
        kind: str = "",
        *,
        begin: float = 0.0,
        end: float = math.inf,
    ) -> WaitTimes:
        """Returns a device's waits of one kind in phases whose names begin so, from `begin` to
        `end` (seconds).
        """
        found = (w for w in self.all_waits if w.device == device and w.phase.startswith(phase))
        return WaitTimes(
            tuple(
                sorted(w.seconds for w in found if kind in ("", w.kind) and begin <= w.start < end)
            )
        )

    def to_json(self) -> str:
        """Returns everything except the slices and the single waits as JSON."""
        fields = dataclasses.asdict(dataclasses.replace(self, slices=(), all_waits=()))
        del fields["slices"], fields["all_waits"]
        totals = ("seconds", "share_of_peak", "exposed", "bytes")
        return json.dumps(fields | {name: getattr(self, name) for name in totals}, indent=1)

    def __str__(self) -> str:
        slowest = self.slowest
        head = (
            f"{self.name} on {self.topology}: {self.seconds * 1e3:.4f} ms, "
            f"{slowest.share_of_peak:.1%} of peak, exposed communication {self.exposed * 1e3:.4f} ms"
        )
        if self.unsafe:
            head += "; its results are wrong on a chip, because a buffer in flight is touched"
        columns = ("total", "issue", "mxu stall", "mxu busy", *CAUSES)
        lines = [head, *(f"  unsafe: {found}" for found in self.unsafe)]
        lines += [f"  {'':34s}" + "".join(f"{c:>11s}" for c in columns) + "   ms"]
        lines += [
            _row(f"device {d.device} at {','.join(map(str, d.coords))}", d) for d in self.devices
        ]
        lines.append(f"  phases of device {slowest.device}, the slowest:")
        lines += [_row(_label(p), p) for p in slowest.phases if p.seconds > 0.002 * slowest.seconds]
        if self.all_waits:
            lines.append(f"  device {slowest.device} has {self.waits(slowest.device)}")
        if self.bytes:
            moved = (f"{kind} {size / 1e6:.1f} MB" for kind, size in sorted(self.bytes.items()))
            lines.append(f"  bytes of all devices: {', '.join(moved)}")
        lines += [f"  basis: {self.basis}", f"  known error: {self.known_error}"]
        lines.append(f"  which to believe: {self.preference}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def _label(phase: Phase) -> str:
    label = "  " * (1 + phase.depth) + phase.name
    if phase.runs > 1:
        label += f" x{phase.runs}"
    if phase.analytic:
        label += " (ring model)"
    return label


def _row(label: str, times: Times) -> str:
    waits = (times.waits.get(cause, 0.0) for cause in CAUSES)
    values = (times.seconds, times.issue, times.matrix_stall, times.matrix_busy, *waits)
    return f"  {label[:34]:34s}" + "".join(f"{v * 1e3:11.4f}" for v in values)


@dataclasses.dataclass(slots=True)
class _Phase:
    """All executions of one instruction of the program on one device."""

    start: float  # of the execution that ended first, in cycles
    depth: int  # the number of instructions (loops) around it
    runs: int = 0
    cycles: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)


class Recorder:
    """The record of one device. `slices` and `waits` collect those of all devices, in the order in
    which they end.
    """

    def __init__(self, device: int, chip: PlayedChip, slices: list[Slice], waits: list[EndedWait]):
        # What the device has done so far: the cycles in which a bundle was issued ("issue") or
        # waited for a matrix unit ("stall"), in which the busiest matrix unit multiplied ("busy"),
        # and those of waits by cause.
        self.cycles: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # that its transfers moved, by kind
        self._device = device
        self._chip = chip
        self._slices = slices
        self._waits = waits
        # The phases that the device is in: their names, when it entered, and its cycles and bytes
        # then.
        self._open: list[tuple[str, float, Counter[str], Counter[str]]] = []
        self._ended: dict[str, _Phase] = {}
        self._analytic: set[str] = set()
        self._run_start = 0.0

    @property
    def phase(self) -> str:
        """The innermost instruction that the device is in; "" if it is in none."""
        if self._open:
            return self._open[-1][0]
        return ""

    def enter_phase(self, name: str, now: float) -> None:
        self.run_until(now)
        self._open.append((name, now, self.cycles.copy(), self.bytes.copy()))

    def leave_phase(self, now: float) -> None:
        """Ends the innermost phase, if the device is in one."""
        if not self._open:
            return
        self.run_until(now)
        name, entered, cycles, moved = self._open.pop()
        phase = self._ended.setdefault(name, _Phase(entered, len(self._open)))
        phase.runs += 1
        phase.cycles.update(self.cycles - cycles, total=now - entered)  # type: ignore[call-overload]
        phase.bytes.update(self.bytes - moved)

    def run_until(self, now: float) -> None:
        if now > self._run_start:
            self._slice("core", self.phase or "program", "compute", self._run_start, now)
        self._run_start = now

    def wait(self, start: float, end: float, name: str, cause: str, kind: str) -> None:
        seconds = self._chip.seconds
        self._waits.append(
            EndedWait(self._device, self.phase, seconds(start), seconds(end - start), kind)
        )
        if end > start:
            self.run_until(start)
            self.cycles[cause] += end - start  # type: ignore[assignment]
            self._slice(
                "core",
                name,
                cause if cause in ("memory", "collective") else "stall",
                start,
                end,
                cause,
            )
            self._run_start = end

    def transfer(self, lane: str, start: float, end: float, name: str) -> None:
        self._slice(lane, name, "copy" if lane == "memory" else "transfer", start, end, name)

    def mark_analytic(self) -> None:
        self._analytic.add(self.phase)

    def device(self, coords: tuple[int, ...], now: float) -> Device:
        """Returns where the time of the device went until its end, on the chip with these
        coordinates.
        """
        phases = [
            Phase(
                name=name,
                runs=p.runs,
                start=self._chip.seconds(p.start),
                depth=p.depth,
                analytic=name in self._analytic,
                **self._times(p.cycles, p.bytes),
            )
            for name, p in self._ended.items()
        ]
        in_order = tuple(sorted(phases, key=lambda p: (p.start, p.depth)))
        cycles = self.cycles | Counter(total=now)  # type: ignore[call-overload]
        times = self._times(cycles, self.bytes)
        return Device(
            device=self._device,
            coords=coords,
            phases=in_order,
            compute=times["issue"] + times["matrix_stall"],
            exposed=exposed_in(times["waits"]),
            memory=times["waits"].get("memory", 0.0),
            causes={p.name: sum(p.waits.values()) for p in in_order if p.waits},
            **times,
        )

    def _times(self, cycles: Counter[str], moved: Counter[str]) -> dict[str, Any]:
        seconds = {what: self._chip.seconds(count) for what, count in sorted(cycles.items())}
        return {
            "seconds": seconds.get("total", 0.0),
            "issue": seconds.get("issue", 0.0),
            "matrix_stall": seconds.get("stall", 0.0),
            "matrix_busy": seconds.get("busy", 0.0),
            "waits": {cause: spent for cause, spent in seconds.items() if cause in CAUSES},
            "bytes": dict(sorted(moved.items())),
        }

    def _slice(
        self, lane: str, name: str, kind: str, start: float, end: float, cause: str = ""
    ) -> None:
        seconds = self._chip.seconds
        self._slices.append(
            Slice(self._device, lane, name, kind, seconds(start), seconds(end), cause)
        )
