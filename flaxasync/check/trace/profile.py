"""Reads the profiles that `jax.profiler` writes (xplane files): the devices, their runs of
programs, and their events.

A profile has a plane for each device and one for the host. On a TPU a plane has a line of whole
runs ("XLA Modules"), a line of instructions in the order of execution ("XLA Ops"), and lines of
what is under way beside them ("Async XLA Ops"). On a GPU there is a line for each stream. CPU
devices have no plane: the instructions of all of them are on the threads of the host's plane, each
with its `hlo_op` and the number of its device.
"""

import dataclasses
import pathlib
import statistics
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

MODULES = "XLA Modules"
OPS = "XLA Ops"
ASYNC_OPS = "Async XLA Ops"
# the event in which a TPU waits at the beginning of a program for the others to begin it
BARRIER = "barrier-cores"
type Interval = tuple[float, float]  # begin and end, in seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that a device did. What the profile does not say is ""."""

    name: str  # of the instruction or of the program
    start: float  # in seconds
    end: float  # in seconds
    line: str  # the name of its line: a unit of a TPU, a stream of a GPU, a thread of a host
    scope: str = ""  # the names of the functions and `jax.named_scope`s that it comes from
    program: str = ""  # the name of the program, without the number that a TPU appends to it
    run: str = ""  # the number of the run of the program
    op: str = ""  # the instruction of the program, where the name is that of a kernel

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """What one device did."""

    name: str  # of its plane, such as "/device:TPU:0"
    events: tuple[Event, ...]  # without the runs of whole programs
    # of whole programs; empty where the profile has none, as on GPUs and CPUs
    runs: tuple[Event, ...]

    def run_seconds(self, program: str) -> list[float]:
        """Returns the device time of each run of the program whose name begins so, less its wait
        for others.
        """
        barriers = [e.interval for e in self.events if e.name.startswith(BARRIER)]
        runs = [run.interval for run in self.runs if run.name.startswith(program)]
        return [end - start - seconds(clip(barriers, (start, end))) for start, end in runs]


def read_profile(path: str | pathlib.Path) -> list[DeviceProfile]:
    """Reads the devices of a profile: of an xplane file, or of the newest one in a folder of
    `jax.profiler.trace`.

    ValueError says that there is no such file, or what it holds if it has no events of devices.
    """
    from jax.profiler import ProfileData  # here, because reading HLO must start without JAX

    file = pathlib.Path(path)
    if not file.is_file():
        files = sorted(file.rglob("*.xplane.pb"), key=lambda found: found.stat().st_mtime)
        if not files:
            raise ValueError(
                f"{path} must be an xplane file, or a folder that jax.profiler.trace wrote: it has "
                "none"
            )
        file = files[-1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="builtin type .* has no __module__ attribute")
        try:
            planes = list(ProfileData.from_file(str(file)).planes)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{file} is not an xplane file: {error}") from error
        found = [_device(plane) for plane in planes if plane.name.startswith("/device:")]
        found = [device for device in found if device.events or device.runs]
        if not found:
            for plane in planes:
                if plane.name == "/host:CPU":
                    found += _cpu_devices(plane)
    if not found:
        names = ", ".join(plane.name for plane in planes) or "none"
        raise ValueError(
            f"{file} has no planes of devices and no instructions of XLA programs: it has the "
            f"planes {names}; run the program within jax.profiler.trace, and wait for its result "
            "before the trace ends"
        )
    return sorted(found, key=lambda device: device.name)


def median_seconds(devices: Sequence[DeviceProfile], program: str, runs: int) -> float | None:
    """Returns the device time of one run: the median over the runs, of the slowest device; None if
    there is no event.

    Where a profile does not mark runs, it is the time in which the device did anything, divided by
    the number of runs.
    """
    if any(device.runs for device in devices):
        medians = [
            statistics.median(times) for device in devices if (times := device.run_seconds(program))
        ]
        return max(medians, default=None)
    busy = [seconds(event.interval for event in device.events) / runs for device in devices]
    return max(busy, default=0.0) or None


def _device(plane: Any) -> DeviceProfile:
    events = []
    runs = []
    for line in plane.lines:
        found = [_event(event, line.name) for event in line.events]
        if line.name == MODULES:
            runs = [dataclasses.replace(run, program=run.name.partition("(")[0]) for run in found]
        elif line.name in (OPS, ASYNC_OPS) or line.name.startswith("Stream"):
            events += found
    return DeviceProfile(plane.name, tuple(events), tuple(runs))


def _cpu_devices(plane: Any) -> list[DeviceProfile]:
    """Returns the devices whose instructions ran on the threads of the host."""
    by_device: dict[int, list[Event]] = {}
    for number, line in enumerate(plane.lines):
        if line.name == "python":
            continue
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" in stats:
                device = int(stats.get("device_ordinal", 0))
                by_device.setdefault(device, []).append(_event(event, f"thread {number}"))
    return [
        DeviceProfile(f"/device:CPU:{device}", tuple(events), ())
        for device, events in by_device.items()
    ]


def _event(event: Any, line: str) -> Event:
    stats = dict(event.stats)
    return Event(
        name=event.name.removeprefix("%").partition(" = ")[0],
        start=event.start_ns * 1e-9,
        end=(event.start_ns + event.duration_ns) * 1e-9,
        line=line,
        scope=str(stats.get("tf_op", "")),
        program=str(stats.get("hlo_module", "")),
        run=str(stats.get("run_id", "")),
        op=str(stats.get("hlo_op", "")),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals, in order, that cover what the given ones cover."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Returns the parts of the intervals within a window."""
    low, high = window
    return [(max(a, low), min(b, high)) for a, b in intervals if a < high and b > low]


def seconds(intervals: Iterable[Interval]) -> float:
    """Returns the time that the intervals cover together."""
    return sum(end - start for start, end in union(intervals))
