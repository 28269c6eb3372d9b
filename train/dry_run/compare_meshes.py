"""`run.py --dry-run --compare-meshes --topology v5e:4x4` says which mesh of those chips a run
should take.

All grids of data x fsdp x context x model are ranked by predicted time and memory, without
compiling anything, each with the form of the step that is predicted to be the fastest of those that
fit (`train.dry_run.forms`). A dry run with the options of a row compiles that step.
"""

import json
from pathlib import Path

from flaxasync import check
from flaxasync.ops.trust import Mode, trusting
from train.config import Config
from train.dry_run.command import topology_devices
from train.dry_run.forms import rank
from train.dry_run.prediction import Prediction
from train.lifecycle.errors import InputError
from train.metrics.output import gib, say, time_text
from train.step.mesh import AXES

LISTED = 12  # number of meshes in the printed table; the file has all of them
HEADER = (*AXES, "remat", "fsdp overlap", "memory", "step", "MFU", "exposed", "by what")


def compare_meshes(config: Config, topology: str, trust: Mode) -> int:
    """Prints the table, saves all of it in the folder `dry_run` of the workdir, and returns the
    exit code.
    """
    if "*" in topology:
        raise InputError(
            "--compare-meshes must have a topology of one slice, because it does not know the "
            f"network between slices: got --topology {topology}; use {topology.partition('*')[0]}, "
            "or a dry run of one mesh"
        )
    devices = len(topology_devices(topology))
    with trusting(trust):
        rows = rank(config, check.CHIPS[topology.partition(":")[0]], devices)
    fitting = [row for row in rows if row.fits]
    text = table([cells(row) for row in rows[:LISTED]])
    say(
        f"meshes     {len(rows)} of {topology} divide the model and the batch; {len(fitting)} are "
        f"predicted to fit\n{text}"
    )
    if fitting:
        say(f"best       {rows[0].options}, by prediction; a dry run with these compiles the step")
    folder = Path(config.workdir) / "dry_run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meshes.txt").write_text(text + "\n")
    (folder / "meshes.json").write_text(json.dumps([figures(row) for row in rows], indent=2) + "\n")
    say(f"details    {folder}: meshes.txt, and meshes.json with all {len(rows)} meshes")
    return 0


def figures(one: Prediction) -> dict[str, object]:
    """Returns a row of meshes.json."""
    return {
        "mesh": one.sizes,
        "remat": one.remat,
        "overlap": one.overlap,
        "memory": one.needed,
        "fits": one.fits,
        "seconds": one.seconds,
        "mfu": one.mfu,
        "exposed": one.exposed / one.seconds,
        "by_what": one.binds,
    }


def cells(one: Prediction) -> tuple[str, ...]:
    """Returns the row of the table under HEADER."""
    memory = gib(one.needed)
    if not one.fits:
        memory += " (too much)"
    times = (time_text(one.seconds), f"{one.mfu:.1%}", f"{one.exposed / one.seconds:.1%}")
    return (*map(str, one.sizes.values()), one.remat, one.overlap, memory, *times, one.binds)


def table(rows: list[tuple[str, ...]]) -> str:
    """Formats rows under HEADER, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEADER, *rows)
    )
    return "\n".join(lines)
