"""One result type for a program in time: `Timeline`, slices of work, waits and transfers on the lanes of each device.

What makes one says on what its times rest (`basis`) and how far off they were where a measurement is known
(`known_error`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """One stretch of time on one lane of one device. `kind` is one of KINDS."""

    device: int
    lane: str  # "core", "memory", or a link
    name: str
    kind: str
    start: float
    end: float
    cause: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


KINDS = {
    "compute": "work of the core",
    "stall": "the core waits for a transfer between devices, or for the others to come to a collective",
    "collective": "the core is held by a synchronous collective",
    "memory": "the core waits for a copy of its own",
    "transfer": "a transfer between devices, under way",
    "copy": "a copy of its own, under way",
    "repeat": "more iterations of a loop, like those before",
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """One run of a loop on the first device. `iteration` is a stretch of it like most others, with all its slices."""

    name: str  # of the while instruction
    depth: int  # loops around it
    trips: int
    start: float
    end: float
    iteration: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Where the time of one device goes, in seconds."""

    device: int
    seconds: float
    compute: float
    exposed: float  # stalls and synchronous collectives
    memory: float
    causes: Mapping[str, float]  # of `exposed` and `memory`, by operation


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A program in time. Totals are those of the slowest device."""

    name: str
    chip: str
    basis: str
    known_error: str
    slices: tuple[Slice, ...]
    devices: tuple[DeviceTime, ...]
    notes: tuple[str, ...] = ()
    loops: tuple[Loop, ...] = ()

    @property
    def slowest(self) -> DeviceTime:
        return max(self.devices, key=lambda d: d.seconds)

    @property
    def seconds(self) -> float:
        return self.slowest.seconds

    @property
    def compute(self) -> float:
        return self.slowest.compute

    @property
    def exposed(self) -> float:
        """Seconds in which the slowest device waits for other devices."""
        return self.slowest.exposed

    def save_trace(self, path: Any) -> None:
        """Writes a Chrome trace (JSON), which Perfetto and chrome://tracing open."""
        from flaxasync.check.estimate.trace import save_trace

        save_trace(self, path)

    def save_picture(self, path: Any) -> None:
        """Writes a PNG; needs matplotlib."""
        from flaxasync.check.estimate.picture import save_picture

        save_picture([self], path)

    def __str__(self) -> str:
        lines = [f"timeline of {self.name} on {self.chip}: {self.seconds * 1e3:.3f} ms"]
        lines.append(f"{'device':>6}  {'total ms':>9}  {'compute':>9}  {'exposed':>9}  {'memory':>9}  longest waits")
        for d in self.devices:
            waits = sorted(d.causes.items(), key=lambda item: -item[1])[:3]
            text = ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in waits if seconds > 0)
            values = "  ".join(f"{value * 1e3:9.3f}" for value in (d.seconds, d.compute, d.exposed, d.memory))
            lines.append(f"{d.device:6d}  {values}  {text or 'none'}")
        lines.append(f"basis: {self.basis}")
        lines.append(f"known error: {self.known_error}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])
