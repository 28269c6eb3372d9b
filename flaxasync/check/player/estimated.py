"""`estimated_result`: what can still be said of a program that cannot be simulated, in the form of
a `Result`.

Its figures are those of `fa.check.timeline`, from the text of the program, and `not_simulated` says
why.
"""

from collections import Counter

from flaxasync.check.compile.program import CompiledProgram
from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.estimate.timeline import DeviceTime, Timeline
from flaxasync.check.player.result import Device, Phase, Result
from flaxasync.check.tested_libtpu import untested
from flaxasync.hardware import chip

# The cause of a wait, by the kind of its slice. The text does not tell a wait for bytes from one
# for a signal.
_CAUSES = {"stall": "receive", "collective": "collective", "memory": "memory"}


def estimated_result(
    program: CompiledProgram, why: str, *, measured: float | None = None
) -> Result:
    """Returns the estimate of a program. `why` says why it is not simulated."""
    version = untested(program.libtpu)
    if version is None:
        notes = []
    else:
        notes = [version]
    t = timeline(program, notes=notes)
    multiplying = (t.flops or 0.0) / chip(t.chip).flops
    return Result(
        name=t.name,
        topology=program.topology,
        chip=t.chip,
        basis=t.basis,
        known_error=t.known_error,
        devices=tuple(_device(t, d, program.coords[d.device], multiplying) for d in t.devices),
        notes=t.notes,
        slices=t.slices,
        measured=measured,
        not_simulated=why,
        preference=t.preference,
    )


def _device(t: Timeline, d: DeviceTime, coords: tuple[int, ...], multiplying: float) -> Device:
    first: dict[str, float] = {}  # when an instruction began to run first, by its name
    runs = Counter[str]()
    spent: dict[str, Counter[str]] = {}  # the seconds of an instruction by cause, "" for work
    for s in t.slices:
        if s.device == d.device and s.lane == "core":
            first.setdefault(s.name, s.start)
            runs[s.name] += 1
            spent.setdefault(s.name, Counter())[_CAUSES.get(s.kind, "")] += s.seconds  # type: ignore[assignment]
    phases = tuple(_phase(name, start, runs[name], spent[name]) for name, start in first.items())
    causes = {"memory": d.memory, "receive": d.exposed}
    return Device(
        device=d.device,
        coords=coords,
        phases=phases,
        seconds=d.seconds,
        issue=d.compute,
        matrix_busy=min(multiplying, d.compute),
        waits={cause: seconds for cause, seconds in causes.items() if seconds},
    )


def _phase(name: str, start: float, runs: int, spent: Counter[str]) -> Phase:
    return Phase(
        name=name,
        runs=runs,
        start=start,
        seconds=float(sum(spent.values())),
        issue=float(spent[""]),
        waits={cause: float(seconds) for cause, seconds in spent.items() if cause and seconds},
    )
