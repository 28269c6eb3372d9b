"""Makes the result of a simulation from its records: converts cycles to seconds, and adds up executions to phases."""

from collections import Counter

from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.recorder import PhaseTime
from flaxasync.check.player.result import Device, Phase, Result
from flaxasync.check.player.simulation import Simulation


def summarize(simulation: Simulation, *, measured: float | None, notes: tuple[str, ...] = ()) -> Result:
    """Returns the result of a simulation that has ended.

    Args:
      simulation: The simulation.
      measured: Seconds that the program took on a TPU, if they are known.
      notes: Further notes, which come first.
    """
    chip, recorder = simulation.chip, simulation.recorder
    devices = []
    for m in simulation.machines:
        waits = {cause: chip.seconds(t) for cause, t in sorted(recorder.waits[m.device].items())}
        devices.append(
            Device(
                device=m.device,
                coords=m.coords,
                seconds=chip.seconds(m.now),
                issue=chip.seconds(m.issue),
                matrix_stall=chip.seconds(m.stall),
                matrix_busy=chip.seconds(m.busy),
                waits=waits,
                bytes=dict(sorted(recorder.bytes[m.device].items())),
                phases=_phases([p for p in recorder.phases if p.device == m.device], chip),
            )
        )
    return Result(
        name=simulation.dump.module.name,
        topology=simulation.grid.name,
        chip=chip.name,
        basis=_basis(simulation),
        known_error=chip.known_error,
        devices=tuple(devices),
        notes=notes + _notes(simulation),
        stretches=tuple(recorder.stretches),
        clock=chip.clock,
        measured=measured,
    )


def _basis(simulation: Simulation) -> str:
    version = simulation.dump.note.libtpu or "unknown"
    chip = simulation.chip
    return (
        f"a simulated prediction, nothing was run on a TPU: libtpu {version}'s final bundles executed for "
        f"{len(simulation.machines)} devices, {chip.clock / 1e9:g} GHz, HBM {chip.hbm / 1e9:.0f} GB/s, links "
        f"{chip.link / 1e9:.1f} GB/s in each direction"
    )


def _notes(simulation: Simulation) -> tuple[str, ...]:
    notes = [f"{text}{f' ({n} times)' if n > 1 else ''}" for text, n in sorted(simulation.notes().items())]
    if analytic := sorted({p.name for p in simulation.recorder.phases if p.analytic}):
        notes.append(f"timed by a ring model, not by their bundles: {', '.join(analytic)}")
    return tuple(notes)


def _phases(times: list[PhaseTime], chip: PlayedChip) -> tuple[Phase, ...]:
    """Returns the phases of one device, from all executions of its instructions."""
    executions: dict[str, list[PhaseTime]] = {}
    for t in times:
        executions.setdefault(t.name, []).append(t)
    phases = []
    for name, runs in executions.items():
        waits: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        for t in runs:
            waits.update(t.waits)
            moved.update(t.bytes)
        phases.append(
            Phase(
                name=name,
                runs=len(runs),
                start=chip.seconds(runs[0].start),
                seconds=chip.seconds(sum(t.end - t.start for t in runs)),
                issue=chip.seconds(sum(t.issue for t in runs)),
                matrix_stall=chip.seconds(sum(t.stall for t in runs)),
                matrix_busy=chip.seconds(sum(t.busy for t in runs)),
                waits={cause: chip.seconds(v) for cause, v in sorted(waits.items())},
                bytes=dict(sorted(moved.items())),
                analytic=any(t.analytic for t in runs),
                depth=runs[0].depth,
            )
        )
    return tuple(sorted(phases, key=lambda p: (p.start, p.depth)))
