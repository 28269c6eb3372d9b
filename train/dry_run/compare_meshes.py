"""`run.py --dry-run --compare-meshes --topology v5e:4x4` says which mesh of those chips a run should take.

All grids of data x fsdp x context x model are ranked by predicted cost and memory, without compiling anything, each
with the form of the step that is predicted to be the fastest of those that fit (`train.dry_run.forms`). The best few
are then compiled, in a process apart, and their times are estimated from the compiled step as in a dry run. A mesh that
the compiler refuses or cannot compile, or that a backend cannot serve, is replaced by the next one of the ranking.
"""

import dataclasses
import json
from pathlib import Path

import jax

from flaxasync import check
from flaxasync.check.estimate.phases import Phases
from flaxasync.ops.trust import Mode, trusting
from models.config import FsdpOverlap, Remat
from train.config import Config
from train.dry_run.command import compile_step, topology_devices
from train.dry_run.forms import AXES, rank, with_form, with_mesh
from train.dry_run.mesh_costs import Prediction, form_options
from train.lifecycle.errors import InputError
from train.metrics.output import gib, say, time_text
from train.step.flags import flags_of, require_known
from train.step.mesh import mesh_over
from train.step.products import model_flops_per_token
from train.step.trainer import backend_limits_are_input_errors

COMPILED, PREDICTED, FAILED = "compiled", "predicted", "predicted; it could not be compiled"  # sources of figures
LISTED = 12  # number of predicted meshes in the printed table; the file has all of them
HEADER = (*AXES, "remat", "fsdp overlap", "memory", "step", "MFU", "exposed", "by what", "figures are")


@dataclasses.dataclass(frozen=True)
class Row:
    """A mesh and its figures, predicted or from the compiled step; there are none if that does not fit."""

    mesh: tuple[int, ...]
    remat: Remat
    overlap: FsdpOverlap
    memory: int  # bytes that a device needs
    fits: bool
    seconds: float | None
    mfu: float | None  # model FLOPs utilization, 0 to 1
    exposed: float | None  # share of the step in which a device waits for others
    by_what: str  # what it waits for longest
    source: str  # COMPILED, PREDICTED, or FAILED

    def cells(self) -> tuple[str, ...]:
        shares = ["-" if share is None else f"{share:.1%}" for share in (self.mfu, self.exposed)]
        memory = gib(self.memory) + ("" if self.fits else " (too much)")
        seconds = "-" if self.seconds is None else time_text(self.seconds)
        return (*map(str, self.mesh), self.remat, self.overlap, memory, seconds, *shares, self.by_what, self.source)

    @property
    def place(self) -> tuple[int, float]:
        """What the table is sorted by: compiled, predicted, failed, too large; then by time, or else by memory."""
        if not self.fits or self.seconds is None:
            return 3, self.memory
        return (COMPILED, PREDICTED, FAILED).index(self.source), self.seconds


def compare_meshes(config: Config, topology: str, trust: Mode, compiled: int) -> int:
    """Prints the table, saves all of it in the folder `dry_run` of the workdir, and returns the exit code.

    `compiled` meshes are compiled, with the kernels that `trust` lets them take.
    """
    if "*" in topology:
        raise InputError(
            "--compare-meshes must have a topology of one slice, because it does not know the network between slices: "
            f"got --topology {topology}; use {topology.partition('*')[0]}, or a dry run of one mesh"
        )
    devices, chip = len(topology_devices(topology)), check.CHIPS[topology.partition(":")[0]]
    if compiled:
        require_known(config, chip.name)
    with trusting(trust):
        ranked = rank(config, chip, devices)
    fitting = sum(one.fits for one in ranked)
    say(f"meshes     {len(ranked)} of {topology} divide the model and the batch; {fitting} are predicted to fit")
    tried = _compile_best(config, topology, ranked, trust, compiled)
    rows = sorted([*tried, *map(row_of, ranked[len(tried) :])], key=lambda row: row.place)
    say(text := table([row.cells() for row in rows[: max(LISTED, compiled)]]))
    if rows[0].fits and rows[0].source != FAILED:
        options = " ".join(f"--mesh.{name} {size}" for name, size in zip(AXES, rows[0].mesh, strict=True))
        options += f" {form_options(rows[0].remat, rows[0].overlap)}"
        say(f"best       {options}, by figures that are {rows[0].source}")
    folder = Path(config.workdir) / "dry_run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meshes.txt").write_text(text + "\n")
    figures = [dataclasses.asdict(row) | {"mesh": dict(zip(AXES, row.mesh, strict=True))} for row in rows]
    (folder / "meshes.json").write_text(json.dumps(figures, indent=2) + "\n")
    say(f"details    {folder}: meshes.txt, and meshes.json with all {len(rows)} meshes")
    if tried and all(row.source == FAILED for row in tried):
        raise InputError(
            f"no step could be compiled for {topology}, on {len(tried)} meshes: the figures above are predictions alone"
        )
    return 0


def row_of(one: Prediction) -> Row:
    form, exposed = (_sizes(one), one.remat, one.overlap), one.exposed / one.seconds
    return Row(*form, one.needed, one.fits, one.seconds, one.mfu, exposed, one.binds, PREDICTED)


def compiled_row(config: Config, topology: str, prediction: Prediction, trust: Mode) -> Row:
    """Compiles the step on one mesh, in a child process, and returns its row."""
    form = _sizes(prediction), prediction.remat, prediction.overlap
    config = with_form(with_mesh(config, form[0]), *form[1:])
    try:
        mesh = mesh_over(check.topology_devices(topology), config.mesh, topology)
        with flags_of(config, topology.partition(":")[0]) as flags, jax.set_mesh(mesh), trusting(trust):
            say(flags)
            with backend_limits_are_input_errors(config):
                _, program = compile_step(config, topology, mesh, compiler_options=check.HLO_ONLY)
    except check.HbmError as error:
        say(f"           does not fit: it needs {gib(error.needed)}")
        return Row(*form, error.needed, False, None, None, None, "memory", COMPILED)
    except (RuntimeError, InputError) as error:  # a crash, a timeout, a mesh or a backend that cannot serve the run
        say(f"           not compiled: {error}")
        return dataclasses.replace(row_of(prediction), source=FAILED)
    timeline = check.timeline(program)
    seconds, length = timeline.seconds, config.data.sequence_length
    flops = config.data.batch_size * length * model_flops_per_token(config.model, length)
    mfu = flops / (seconds * len(program.coords) * check.CHIPS[program.chip].flops)
    longest = (*(name for name, _ in Phases(program).waits(timeline)), "nothing")[0]
    memory = program.bytes_by_kind["total"]
    return Row(*form, memory, True, seconds, mfu, timeline.exposed / seconds, longest, COMPILED)


def table(rows: list[tuple[str, ...]]) -> str:
    """Formats rows under HEADER, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (HEADER, *rows))
    return "\n".join(line.rstrip() for line in lines)


def _compile_best(config: Config, topology: str, ranked: list[Prediction], trust: Mode, wanted: int) -> list[Row]:
    """Compiles the first meshes of a ranking until so many fit, and returns the rows of all that were tried.

    At most 2 x wanted + 2 meshes are tried, and beyond the first `wanted` only those that are predicted to fit.
    """
    rows: list[Row] = []
    for number, one in enumerate(ranked[: 2 * wanted + 2], 1):
        done = sum(row.fits and row.source == COMPILED for row in rows)
        if done == wanted or (number > wanted and not one.fits):
            break
        shape = " x ".join(f"{name} {size}" for name, size in one.mesh.items())
        say(f"compiling  {done + 1} of {min(wanted, len(ranked))}: {shape} {one.form} ...")
        rows.append(compiled_row(config, topology, one, trust))
    return rows


def _sizes(prediction: Prediction) -> tuple[int, ...]:
    return tuple(prediction.mesh.get(name, 1) for name in AXES)
