"""What a run tells: where the time and the bytes went, per device and phase; a table, JSON, a trace and a picture.

A phase is one instruction of the scheduled program; one in a loop counts every time it runs. Times are seconds of the
device's own clock, which all devices start at 0.
"""

import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flaxasync.check.estimate.timeline import DeviceTime, Slice, Timeline
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.recorder import CAUSES, PhaseTime, Stretch
from flaxasync.check.player.simulation import Mesh

BETWEEN_DEVICES = ("receive", "send", "sync", "collective")  # waits that count as exposed communication


@dataclasses.dataclass(frozen=True)
class Phase:
    """One instruction, all its runs together. Times in seconds."""

    name: str
    runs: int
    start: float  # of the first run
    seconds: float
    issue: float
    matrix_stall: float
    matrix_busy: float
    waits: Mapping[str, float]
    bytes: Mapping[str, int]
    analytic: bool
    depth: int  # loops around it

    @property
    def exposed(self) -> float:
        return sum(self.waits.get(cause, 0.0) for cause in BETWEEN_DEVICES)


@dataclasses.dataclass(frozen=True)
class Device:
    """One device. seconds = issue + matrix_stall + the sum of its waits."""

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
        """Seconds spent waiting for other devices."""
        return sum(self.waits.get(cause, 0.0) for cause in BETWEEN_DEVICES)

    @property
    def share_of_peak(self) -> float:
        """Share of the time in which a matrix unit multiplies: of the peak, as far as its tiles are full."""
        return self.matrix_busy / self.seconds if self.seconds else 0.0

    def phase(self, name: str) -> Phase:
        """Returns a phase by the beginning of its name, the longest if there are several."""
        found = [p for p in self.phases if p.name.startswith(name)]
        if not found:
            raise KeyError(f"no phase begins with {name!r}: {', '.join(p.name for p in self.phases)}")
        return max(found, key=lambda p: p.seconds)


@dataclasses.dataclass(frozen=True)
class Result:
    """A program played on a mesh. Totals are those of the slowest device."""

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
        return self.slowest.exposed

    @property
    def share_of_peak(self) -> float:
        return self.slowest.share_of_peak

    @property
    def error(self) -> float | None:
        """How far the total is from the measurement, as a share of it; None without one."""
        return None if self.measured is None else self.seconds / self.measured - 1

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes moved by all devices, by kind."""
        total: Counter[str] = Counter()
        for d in self.devices:
            total.update(d.bytes)
        return dict(total)

    def timeline(self) -> Timeline:
        """Returns the run as the result type that all sources of time in flaxasync.check share."""
        kinds = {"run": "compute", "transfer": "transfer", "copy": "copy"}
        waits = dict.fromkeys(CAUSES, "stall") | {"memory": "memory", "collective": "collective"}
        slices = tuple(
            Slice(
                s.device, s.lane, s.name, kinds.get(s.kind) or waits[s.cause], s.start / self.clock, s.end /
                self.clock, s.cause
            )
            for s in self.stretches
        )  # fmt: skip
        devices = tuple(
            DeviceTime(
                d.device, d.seconds, d.issue + d.matrix_stall, d.exposed, d.waits.get("memory", 0.0),
                {p.name: sum(p.waits.values()) for p in d.phases if p.waits},
            )
            for d in self.devices
        )  # fmt: skip
        return Timeline(self.name, self.chip, self.basis, self.known_error, slices, devices, self.notes)

    def save_trace(self, path: Any) -> None:
        """Writes a Chrome trace (JSON), which Perfetto and chrome://tracing open."""
        self.timeline().save_trace(path)

    def save_picture(self, path: Any) -> None:
        """Writes a PNG of the mesh's timeline; needs matplotlib."""
        from flaxasync.check.player.picture import save_picture

        save_picture([self], path)

    def to_json(self) -> str:
        """Returns everything but the single stretches of time."""
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

    def save_json(self, path: Any) -> None:
        pathlib.Path(path).write_text(self.to_json() + "\n")

    def __str__(self) -> str:
        return _table(self)


def make_result(mesh: Mesh, *, measured: float | None, basis_notes: tuple[str, ...] = ()) -> Result:
    """Collects what a finished run has written down."""
    chip = mesh.chip
    notes = sum((m.notes for m in mesh.machines), mesh.notes)
    devices = []
    for m in mesh.machines:
        waits = {cause: chip.seconds(t) for cause, t in sorted(mesh.recorder.waits[m.device].items())}
        phases = [p for p in mesh.recorder.phases if p.device == m.device]
        devices.append(
            Device(
                m.device, m.coords, chip.seconds(m.now), chip.seconds(m.issue), chip.seconds(m.stall),
                chip.seconds(m.busy), waits, dict(sorted(mesh.recorder.bytes[m.device].items())), _phases(phases,
                chip),
            )
        )  # fmt: skip
    version = mesh.dump.note.libtpu or "unknown"
    basis = (
        f"a played prediction, nothing was run on a TPU: libtpu {version}'s final bundles executed for {len(devices)} "
        f"devices, {chip.clock / 1e9:g} GHz, HBM {chip.hbm / 1e9:.0f} GB/s, links {chip.link / 1e9:.1f} GB/s each way"
    )
    analytic = sorted({p.name for p in mesh.recorder.phases if p.analytic})
    said = [*basis_notes, *(f"{text}{f' ({n} times)' if n > 1 else ''}" for text, n in sorted(notes.items()))]
    if analytic:
        said.append(f"timed by a ring model, not by their bundles: {', '.join(analytic)}")
    return Result(
        mesh.dump.module.name, mesh.grid.name, chip.name, basis, chip.known_error, tuple(devices), tuple(said),
        tuple(mesh.recorder.stretches), chip.clock, measured,
    )  # fmt: skip


def _phases(times: list[PhaseTime], chip: PlayedChip) -> tuple[Phase, ...]:
    grouped: dict[str, list[PhaseTime]] = {}
    for t in times:
        grouped.setdefault(t.name, []).append(t)
    phases = []
    for name, group in grouped.items():
        waits: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        for t in group:
            waits.update(t.waits)
            moved.update(t.bytes)
        phases.append(
            Phase(
                name, len(group), chip.seconds(group[0].start), chip.seconds(sum(t.end - t.start for t in group)),
                chip.seconds(sum(t.issue for t in group)), chip.seconds(sum(t.stall for t in group)),
                chip.seconds(sum(t.busy for t in group)), {c: chip.seconds(v) for c, v in sorted(waits.items())},
                dict(sorted(moved.items())), any(t.analytic for t in group), group[0].depth,
            )
        )  # fmt: skip
    return tuple(sorted(phases, key=lambda p: (p.start, p.depth)))


def _table(result: Result) -> str:
    head = f"{result.name} on {result.topology}: {result.seconds * 1e3:.4f} ms, {result.share_of_peak:.1%} of peak, "
    head += f"exposed communication {result.exposed * 1e3:.4f} ms"
    if result.error is not None and result.measured is not None:
        head += f"; measured {result.measured * 1e3:.4g} ms, error {result.error:+.1%}"
    columns = ("total", "issue", "mxu stall", "mxu busy", *CAUSES)
    title = f"  {'':34s}" + "".join(f"{c:>11s}" for c in columns)
    lines = [head, title + "   ms"]

    def row(label: str, part: Device | Phase) -> str:
        values = (
            part.seconds,
            part.issue,
            part.matrix_stall,
            part.matrix_busy,
            *(part.waits.get(c, 0.0) for c in CAUSES),
        )
        return f"  {label[:34]:34s}" + "".join(f"{v * 1e3:11.4f}" for v in values)

    for d in result.devices:
        lines.append(row(f"device {d.device} at {','.join(map(str, d.coords))}", d))
    slowest = result.slowest
    lines.append(f"  phases of device {slowest.device}, the slowest:")
    for p in slowest.phases:
        if p.seconds > 0.002 * slowest.seconds:
            runs = f" x{p.runs}" if p.runs > 1 else ""
            lines.append(row("  " * (1 + p.depth) + p.name + runs + (" (ring model)" if p.analytic else ""), p))
    moved = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in sorted(result.bytes.items()))
    lines += [f"  bytes of all devices: {moved}", f"  basis: {result.basis}", f"  known error: {result.known_error}"]
    return "\n".join(lines + [f"  note: {note}" for note in result.notes])
