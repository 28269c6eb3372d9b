"""`run.py --dry-run --compare-meshes --topology v5e:4x4` says which mesh of those chips a run
should take.

All grids of data x fsdp x context x model are ranked by predicted cost and memory, without
compiling anything, each with the form of the step that is predicted to be the fastest of those that
fit (`train.dry_run.forms`). The best few are then compiled, in a process apart, and their times are
estimated from the compiled step as in a dry run. A mesh that the compiler refuses or cannot
compile, or that a backend cannot serve, is replaced by the next one of the ranking.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from flaxasync import check
from flaxasync.check.estimate.phases import Phases
from flaxasync.check.progress import progress
from flaxasync.ops.trust import Mode, trusting
from train.config import Config
from train.dry_run.command import compile_step, topology_devices
from train.dry_run.forms import rank, with_form, with_mesh
from train.dry_run.mesh_costs import PREDICTED, Prediction
from train.lifecycle.errors import InputError
from train.metrics.output import gib, say, time_text
from train.step.flags import flags_of, require_known
from train.step.mesh import AXES, mesh_over
from train.step.trainer import backend_limits_are_input_errors

# sources of figures, beside PREDICTED
COMPILED = "compiled"
FAILED = "predicted; it could not be compiled"
LISTED = 12  # number of predicted meshes in the printed table; the file has all of them
HEADER = (
    *AXES,
    "remat",
    "fsdp overlap",
    "memory",
    "step",
    "MFU",
    "exposed",
    "by what",
    "figures are",
)


def compare_meshes(config: Config, topology: str, trust: Mode, compiled: int) -> int:
    """Prints the table, saves all of it in the folder `dry_run` of the workdir, and returns the
    exit code.

    `compiled` meshes are compiled, with the kernels that `trust` lets them take.
    """
    if "*" in topology:
        raise InputError(
            "--compare-meshes must have a topology of one slice, because it does not know the "
            "network between slices: "
            f"got --topology {topology}; use {topology.partition('*')[0]}, or a dry run of one mesh"
        )
    devices = len(topology_devices(topology))
    chip = check.CHIPS[topology.partition(":")[0]]
    if compiled:
        require_known(config, chip.name)
    with trusting(trust):
        ranked = rank(config, chip, devices)
    fitting = sum(one.fits for one in ranked)
    say(
        f"meshes     {len(ranked)} of {topology} divide the model and the batch; {fitting} are "
        "predicted to fit"
    )
    tried = _compile_best(config, topology, ranked, trust, compiled)
    rows = sorted([*tried, *ranked[len(tried) :]], key=place)
    say(text := table([cells(row) for row in rows[: max(LISTED, compiled)]]))
    if rows[0].fits and rows[0].source != FAILED:
        say(f"best       {rows[0].options}, by figures that are {rows[0].source}")
    folder = Path(config.workdir) / "dry_run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meshes.txt").write_text(text + "\n")
    (folder / "meshes.json").write_text(json.dumps([figures(row) for row in rows], indent=2) + "\n")
    say(f"details    {folder}: meshes.txt, and meshes.json with all {len(rows)} meshes")
    if tried and all(row.source == FAILED for row in tried):
        raise InputError(
            f"no step could be compiled for {topology}, on {len(tried)} meshes: the figures above "
            "are predictions alone"
        )
    return 0


def place(one: Prediction) -> tuple[int, float]:
    """What the table is sorted by: compiled, predicted, failed, too large; then by time, or else by
    memory.
    """
    return (
        ((COMPILED, PREDICTED, FAILED).index(one.source), one.seconds)
        if one.fits
        else (3, one.needed)
    )


def figures(one: Prediction) -> dict[str, Any]:
    """Returns a row of meshes.json. A compiled step that does not fit has no times."""
    times = {
        "seconds": one.seconds,
        "mfu": one.mfu,
        "exposed": one.exposed / one.seconds,
        "by_what": one.binds,
    }
    if one.source == COMPILED and not one.fits:
        times = dict.fromkeys(times) | {"by_what": "memory"}
    form = {"mesh": one.sizes, "remat": one.remat, "overlap": one.overlap}
    return form | {"memory": one.needed, "fits": one.fits} | times | {"source": one.source}


def cells(one: Prediction) -> tuple[str, ...]:
    """Returns the row of the table under HEADER."""
    row = figures(one)
    shares = ["-" if row[name] is None else f"{row[name]:.1%}" for name in ("mfu", "exposed")]
    memory = gib(one.needed) + ("" if one.fits else " (too much)")
    seconds = "-" if row["seconds"] is None else time_text(row["seconds"])
    return (
        *map(str, one.sizes.values()),
        one.remat,
        one.overlap,
        memory,
        seconds,
        *shares,
        row["by_what"],
        one.source,
    )


def compiled_form(config: Config, topology: str, one: Prediction, trust: Mode) -> Prediction:
    """Compiles the step on one mesh, in a child process, and returns the figures of that instead of
    the predicted.
    """
    config = with_form(with_mesh(config, tuple(one.sizes.values())), one.remat, one.overlap)
    try:
        mesh = mesh_over(check.topology_devices(topology), config.mesh, topology)
        with (
            flags_of(config, topology.partition(":")[0]) as flags,
            jax.set_mesh(mesh),
            trusting(trust),
        ):
            say(flags)
            with backend_limits_are_input_errors(config), progress(f"compiling for {topology}"):
                _, program = compile_step(config, topology, mesh, compiler_options=check.HLO_ONLY)
    except check.HbmError as error:
        say(f"           does not fit: it needs {gib(error.needed)}")
        return dataclasses.replace(one, memory={"total": error.needed}, source=COMPILED)
    except (
        RuntimeError,
        InputError,
    ) as error:  # a crash, a timeout, a mesh or a backend that cannot serve the run
        say(f"           not compiled: {error}")
        return dataclasses.replace(one, source=FAILED)
    with progress("reading the compiled program"):
        timeline = check.timeline(program)
    longest = (*(name for name, _ in Phases(program).waits(timeline)), "nothing")[0]
    return dataclasses.replace(
        one,
        memory={"total": program.bytes_by_kind["total"]},
        work=timeline.seconds - timeline.exposed,
        waits={longest: timeline.exposed},
        mfu=one.mfu * one.seconds / timeline.seconds,
        source=COMPILED,
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Formats rows under HEADER, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (HEADER, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def _compile_best(
    config: Config, topology: str, ranked: list[Prediction], trust: Mode, wanted: int
) -> list[Prediction]:
    """Compiles the first meshes of a ranking until so many fit, and returns the rows of all that
    were tried.

    At most 2 x wanted + 2 meshes are tried, and beyond the first `wanted` only those that are
    predicted to fit.
    """
    rows: list[Prediction] = []
    for number, one in enumerate(ranked[: 2 * wanted + 2], 1):
        done = sum(row.fits and row.source == COMPILED for row in rows)
        if done == wanted or (number > wanted and not one.fits):
            break
        shape = " x ".join(f"{name} {size}" for name, size in one.mesh.items())
        say(f"compiling  {done + 1} of {min(wanted, len(ranked))}: {shape} {one.form} ...")
        rows.append(compiled_form(config, topology, one, trust))
    return rows
