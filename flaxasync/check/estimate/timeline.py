"""`Timeline`: what runs when in a program, as slices of work, waits and transfers on the lanes of
each device.

Both the estimate in this folder and the player make timelines. A timeline says what its times are
based on (`basis`) and, if a measurement is known, how far such times were from it (`known_error`).
render.py writes it to files.
"""

import dataclasses
from collections.abc import Mapping

# What a slice can be.
KINDS = (
    "compute",  # work of the core
    # the core waits for a transfer between devices, or until the others join a collective
    "stall",
    "collective",  # the core is held by a synchronous collective
    # the core waits for a copy within its device, or to or from the memory of its host
    "memory",
    "transfer",  # a transfer between devices, under way
    "copy",  # a copy within the device, or to or from its host, under way
    "repeat",  # more iterations of a loop, like those before
)

# What the time of an instruction can be taken from.
SOURCES = (
    "played",  # kernels and products that were simulated
    "given",  # kernels whose seconds the caller gave
    "estimate",  # kernels, by their own cost estimates at the peak of the data sheet
    "cycles",  # the compiler's estimates of cycles
    "flops",  # products of a GPU, by FLOPs at a share of the peak
    "bytes",  # bytes at the rate of memory
    "links",  # waits for other devices, by bytes on the links of the data sheet
    "memory",  # waits for copies within the device
)


# Which of the predictions of one program to believe, for each of them. docs/check.md says why.
FROM_TEXT = (
    "this prediction, from the text of the program alone, is the coarsest: where Pallas kernels "
    'take much of the time, prefer timeline(program, kernels="play"), where matrix products do, '
    'products="play" beside it, and where it can be simulated, play of the whole'
)
PARTS_PLAYED = (
    "from the text, and from kernels or products that were simulated one by one: prefer it to a "
    "timeline without them, and play of the whole program, in which all work, copies and "
    "collectives share HBM and links, to both"
)
ONLY_FROM_TEXT = (
    "of a program for GPUs this is the only prediction, from its text alone: use it to compare "
    "forms of a program, and measure the one that you take"
)
WHOLE_PLAYED = "of the predictions of a program, the simulation of the whole is the one to believe"


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """One period of time on one lane of one device."""

    device: int
    lane: str  # "core", "memory", "to host", "from host", or the name of a link
    name: str  # of the instruction that runs, waits or travels
    kind: str  # one of KINDS
    start: float  # in seconds
    end: float  # in seconds
    # the operation that a wait is for; the kind of operation that a transfer belongs to
    cause: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Loop:
    """One run of a loop on the first device. Times are in seconds."""

    name: str  # of the while instruction
    depth: int  # the number of loops around this one
    trips: int  # the number of iterations
    start: float
    end: float
    # the begin and end of a typical iteration whose slices are all in the timeline
    iteration: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Where the time of one device goes, in seconds."""

    device: int
    seconds: float  # all of its time
    compute: float  # in which it works
    exposed: float  # in which it waits for other devices, in stalls or in synchronous collectives
    memory: float  # in which it waits for copies within the device
    # of `exposed` and `memory`, by the name of the operation that the device waits for
    causes: Mapping[str, float]
    # All of them by what they were taken from, one of SOURCES; empty where all come from one
    # simulation.
    sources: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What runs when in a program. The totals are those of the slowest device. `print` shows a
    table.
    """

    name: str
    chip: str
    basis: str  # what the times are based on
    known_error: str  # how far such times were from a measurement, if one is known
    slices: tuple[Slice, ...]  # of all devices
    devices: tuple[DeviceTime, ...]
    notes: tuple[str, ...] = ()  # what a reader should know beside the figures
    loops: tuple[Loop, ...] = ()  # in the order in which they ended
    # of a device's matrix products, recomputed ones included; None if they are not known
    flops: float | None = None
    preference: str = ""  # whether to believe it or another prediction of the program

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
        lines.append(
            f"{'device':>6}  {'total ms':>9}  {'compute':>9}  {'exposed':>9}  {'memory':>9}  "
            "longest waits"
        )
        for d in self.devices:
            waits = sorted(d.causes.items(), key=lambda item: -item[1])[:3]
            text = ", ".join(
                f"{name} {seconds * 1e3:.3f}" for name, seconds in waits if seconds > 0
            )
            values = "  ".join(
                f"{value * 1e3:9.3f}" for value in (d.seconds, d.compute, d.exposed, d.memory)
            )
            lines.append(f"{d.device:6d}  {values}  {text or 'none'}")
        if sources := self.slowest.sources:
            shares = (
                f"{name} {sources[name] / self.seconds:.1%}"
                for name in SOURCES
                if sources.get(name)
            )
            lines.append(f"taken from: {', '.join(shares)}")
        lines.append(f"basis: {self.basis}")
        lines.append(f"known error: {self.known_error}")
        if self.preference:
            lines.append(f"which to believe: {self.preference}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])
