"""`Timeline`: a program in time, as slices of work, waits and transfers on the lanes of each device.

The estimate of this folder and the player both make one. Whatever makes a timeline says what its times are based on
(`basis`), and how far they were off (`known_error`), if a measurement is known. The file holds data only: trace.py
and picture.py turn it into files.
"""

import dataclasses
from collections.abc import Mapping

# What a slice can be.
KINDS = {
    "compute": "work of the core",
    "stall": "the core waits for a transfer between devices, or for the others to come to a collective",
    "collective": "the core is held by a synchronous collective",
    "memory": "the core waits for a copy of its own",
    "transfer": "a transfer between devices, under way",
    "copy": "a copy of its own, under way",
    "repeat": "more iterations of a loop, like those before",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """One stretch of time on one lane of one device.

    Attributes:
      device: The number of the device.
      lane: "core", "memory", or the name of a link.
      name: The instruction that runs, waits or travels.
      kind: One of KINDS.
      start: When it begins, in seconds.
      end: When it ends, in seconds.
      cause: The operation that a wait is for; the kind of operation that a transfer belongs to.
    """

    device: int
    lane: str
    name: str
    kind: str
    start: float
    end: float
    cause: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Loop:
    """One run of a loop on the first device.

    Attributes:
      name: The name of the while instruction.
      depth: The number of loops around this one.
      trips: The number of iterations.
      start: When the loop begins, in seconds.
      end: When the loop ends, in seconds.
      iteration: Begin and end of one iteration that is like most others, and whose slices are all in the timeline.
    """

    name: str
    depth: int
    trips: int
    start: float
    end: float
    iteration: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Where the time of one device goes.

    Attributes:
      device: The number of the device.
      seconds: All of its time.
      compute: Seconds of work.
      exposed: Seconds in which it waits for other devices, in stalls or in synchronous collectives.
      memory: Seconds in which it waits for copies of its own.
      causes: The seconds of `exposed` and `memory`, by the operation that was waited for.
    """

    device: int
    seconds: float
    compute: float
    exposed: float
    memory: float
    causes: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A program in time. The totals are those of the slowest device. `print` shows a table.

    Attributes:
      name: The name of the program.
      chip: The name of the chip.
      basis: What the times are based on.
      known_error: How far such times were off, if a measurement is known.
      slices: All slices of all devices.
      devices: Where the time of each device goes.
      notes: What a reader should know beside the figures.
      loops: The loops, in the order in which they ended.
    """

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
