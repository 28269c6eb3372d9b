"""`Result`: where the time and the bytes of a simulated program went, for each device and phase.

A phase is one instruction of the scheduled program; the phase of an instruction in a loop counts all of its executions.
Times are in seconds, and every device begins at 0. The file holds the data and its table; render.py writes pictures and
traces.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping

from flaxasync.check.estimate.timeline import DeviceTime, Slice, Timeline
from flaxasync.check.player.recorder import CAUSES, Stretch

BETWEEN_DEVICES = ("receive", "send", "sync", "collective")  # the causes whose waits are exposed communication


@dataclasses.dataclass(frozen=True)
class Phase:
    """One instruction of the program, with all of its executions together. Times are in seconds.

    Attributes:
      name: The instruction.
      runs: How often it was executed.
      start: When the first execution began.
      seconds: All of its time.
      issue: Time in which bundles were issued.
      matrix_stall: Time in which a bundle waited for a matrix unit.
      matrix_busy: Time in which the busiest matrix unit multiplied.
      waits: Time of waiting, by cause.
      bytes: Bytes that its transfers moved, by kind.
      analytic: Whether a collective in it was timed by the ring model.
      depth: The number of loops around it.
    """

    name: str
    runs: int
    start: float
    seconds: float
    issue: float
    matrix_stall: float
    matrix_busy: float
    waits: Mapping[str, float]
    bytes: Mapping[str, int]
    analytic: bool
    depth: int

    @property
    def exposed(self) -> float:
        """Seconds of waiting for other devices."""
        return sum(self.waits.get(cause, 0.0) for cause in BETWEEN_DEVICES)


@dataclasses.dataclass(frozen=True)
class Device:
    """One device. Times are in seconds: `seconds` is the sum of `issue`, `matrix_stall` and all `waits`.

    Attributes:
      device: The number of the partition.
      coords: The coordinates of its chip.
      seconds: All of its time.
      issue: Time in which bundles were issued.
      matrix_stall: Time in which a bundle waited for a matrix unit.
      matrix_busy: Time in which the busiest matrix unit multiplied.
      waits: Time of waiting, by cause.
      bytes: Bytes that its transfers moved, by kind.
      phases: The phases, in the order in which they first began.
    """

    device: int
    coords: tuple[int, ...]
    seconds: float
    issue: float
    matrix_stall: float
    matrix_busy: float
    waits: Mapping[str, float]
    bytes: Mapping[str, int]
    phases: tuple[Phase, ...]

    @property
    def exposed(self) -> float:
        """Seconds of waiting for other devices."""
        return sum(self.waits.get(cause, 0.0) for cause in BETWEEN_DEVICES)

    @property
    def share_of_peak(self) -> float:
        """The share of the time in which a matrix unit multiplies. It is the share of peak where tiles are full."""
        return self.matrix_busy / self.seconds if self.seconds else 0.0

    def phase(self, name: str) -> Phase:
        """Returns the phase whose name begins so, or the longest of them if there are several.

        Raises:
          KeyError: There is no such phase.
        """
        found = [p for p in self.phases if p.name.startswith(name)]
        if not found:
            raise KeyError(f"no phase begins with {name!r}: {', '.join(p.name for p in self.phases)}")
        return max(found, key=lambda p: p.seconds)


@dataclasses.dataclass(frozen=True)
class Result:
    """A simulated program. The totals are those of the slowest device. `print` shows a table.

    Attributes:
      name: The name of the program.
      topology: The topology.
      chip: The name of the chip.
      basis: What the times are based on.
      known_error: How far such times were from a measurement, if one is known.
      devices: The devices, in the order of the partitions.
      notes: What a reader should know beside the figures.
      stretches: What each lane of each device did when, in cycles.
      clock: Cycles per second.
      measured: Seconds that the program took on a TPU; None if it was not measured.
    """

    name: str
    topology: str
    chip: str
    basis: str
    known_error: str
    devices: tuple[Device, ...]
    notes: tuple[str, ...]
    stretches: tuple[Stretch, ...] = dataclasses.field(repr=False)
    clock: float = dataclasses.field(repr=False)
    measured: float | None = None

    @property
    def slowest(self) -> Device:
        return max(self.devices, key=lambda d: d.seconds)

    @property
    def seconds(self) -> float:
        return self.slowest.seconds

    @property
    def exposed(self) -> float:
        """Seconds in which the slowest device waits for other devices."""
        return self.slowest.exposed

    @property
    def share_of_peak(self) -> float:
        return self.slowest.share_of_peak

    @property
    def error(self) -> float | None:
        """The total divided by the measurement, minus 1; None if there is no measurement."""
        return None if self.measured is None else self.seconds / self.measured - 1

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that the transfers of all devices moved, by kind."""
        moved: Counter[str] = Counter()
        for d in self.devices:
            moved.update(d.bytes)
        return dict(moved)

    def timeline(self) -> Timeline:
        """Returns the result as a `Timeline`, which `fa.check.timeline` also returns."""
        kinds = {"run": "compute", "transfer": "transfer", "copy": "copy"}
        waits = dict.fromkeys(CAUSES, "stall") | {"memory": "memory", "collective": "collective"}
        slices = tuple(
            Slice(
                device=s.device,
                lane=s.lane,
                name=s.name,
                kind=kinds.get(s.kind) or waits[s.cause],
                start=s.start / self.clock,
                end=s.end / self.clock,
                cause=s.cause,
            )
            for s in self.stretches
        )
        devices = tuple(
            DeviceTime(
                device=d.device,
                seconds=d.seconds,
                compute=d.issue + d.matrix_stall,
                exposed=d.exposed,
                memory=d.waits.get("memory", 0.0),
                causes={p.name: sum(p.waits.values()) for p in d.phases if p.waits},
            )
            for d in self.devices
        )
        return Timeline(self.name, self.chip, self.basis, self.known_error, slices, devices, self.notes)

    def to_json(self) -> str:
        """Returns everything except the stretches of time as JSON."""
        content = {
            "name": self.name,
            "topology": self.topology,
            "seconds": self.seconds,
            "share_of_peak": self.share_of_peak,
            "exposed": self.exposed,
            "measured": self.measured,
            "error": self.error,
            "bytes": self.bytes,
            "basis": self.basis,
            "known_error": self.known_error,
            "notes": list(self.notes),
            "devices": [dataclasses.asdict(d) for d in self.devices],
        }
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        return _table(self)


def _table(result: Result) -> str:
    head = f"{result.name} on {result.topology}: {result.seconds * 1e3:.4f} ms, {result.share_of_peak:.1%} of peak, "
    head += f"exposed communication {result.exposed * 1e3:.4f} ms"
    if result.error is not None and result.measured is not None:
        head += f"; measured {result.measured * 1e3:.4g} ms, error {result.error:+.1%}"
    columns = ("total", "issue", "mxu stall", "mxu busy", *CAUSES)
    title = f"  {'':34s}" + "".join(f"{c:>11s}" for c in columns)
    lines = [head, title + "   ms"]
    for d in result.devices:
        lines.append(_row(f"device {d.device} at {','.join(map(str, d.coords))}", d))
    slowest = result.slowest
    lines.append(f"  phases of device {slowest.device}, the slowest:")
    for p in slowest.phases:
        if p.seconds > 0.002 * slowest.seconds:
            runs = f" x{p.runs}" if p.runs > 1 else ""
            lines.append(_row("  " * (1 + p.depth) + p.name + runs + (" (ring model)" if p.analytic else ""), p))
    moved = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in sorted(result.bytes.items()))
    lines += [f"  bytes of all devices: {moved}", f"  basis: {result.basis}", f"  known error: {result.known_error}"]
    return "\n".join(lines + [f"  note: {note}" for note in result.notes])


def _row(label: str, times: Device | Phase) -> str:
    waits = (times.waits.get(cause, 0.0) for cause in CAUSES)
    values = (times.seconds, times.issue, times.matrix_stall, times.matrix_busy, *waits)
    return f"  {label[:34]:34s}" + "".join(f"{v * 1e3:11.4f}" for v in values)
