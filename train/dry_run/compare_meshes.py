"""`run.py --dry-run --compare-meshes --topology v5e:4x4` says which mesh of those chips a run should take.

All grids of data x fsdp x context x model are ranked by predicted cost and memory, without compiling anything, each
with the policy of rematerialization that is predicted to be the fastest of those that fit. The best few are then
compiled, in a process apart, and their times are estimated from the compiled step as in a dry run. A mesh that the
compiler refuses, that it cannot compile, or that a backend cannot serve, is replaced by the next one of the ranking.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import jax

from flaxasync import check
from flaxasync.hardware import Chip
from flaxasync.ops.trust import Mode, trusting
from models.config import Remat
from train.config import Config
from train.dry_run.mesh_costs import Prediction, predict
from train.dry_run.report import gib, time_text
from train.dry_run.step_phases import Phases
from train.lifecycle.errors import InputError
from train.metrics.model_flops import model_flops_per_token
from train.metrics.show import say
from train.step.mesh import batch_shards, check_fits_mesh, mesh_over, mesh_shape
from train.step.trainer import Trainer, backend_limits_are_input_errors

AXES = ("data", "fsdp", "context", "model")
COMPILE_SECONDS = 1800  # time limit of one compilation
COMPILED, PREDICTED, FAILED = "compiled", "predicted", "predicted; it could not be compiled"  # sources of figures
LISTED = 12  # number of predicted meshes in the printed table; the file has all of them
ROOM = 0.9  # share of the memory up to which a policy that keeps more than each layer's input is chosen
HEADER = ("data", "fsdp", "context", "model", "remat", "memory", "step", "MFU", "exposed", "by what", "figures are")


@dataclasses.dataclass(frozen=True)
class Row:
    """A mesh and its figures, predicted or from the compiled step.

    Attributes:
      mesh: The sizes of the four axes.
      remat: What the backward pass computes again.
      memory: The bytes that a device needs.
      fits: Whether a device has them.
      seconds: The time of a step; None if it does not fit and was not estimated.
      mfu: Model FLOPs utilization, 0 to 1, or None.
      exposed: The share of the step in which a device waits for others, or None.
      by_what: What it waits for longest.
      source: What the figures are: COMPILED, PREDICTED, or FAILED for predicted figures of a step that could not be
        compiled.
    """

    mesh: tuple[int, ...]
    remat: Remat
    memory: int
    fits: bool
    seconds: float | None
    mfu: float | None
    exposed: float | None
    by_what: str
    source: str

    def cells(self) -> tuple[str, ...]:
        """Returns the row of the table."""
        if self.seconds is None or self.mfu is None or self.exposed is None:
            figures = ("-", "-", "-")
        else:
            figures = (time_text(self.seconds), f"{self.mfu:.1%}", f"{self.exposed:.1%}")
        memory = gib(self.memory) if self.memory else "-"
        return (
            *map(str, self.mesh),
            self.remat,
            memory + ("" if self.fits else " (too much)"),
            *figures,
            self.by_what,
            self.source,
        )


def compare_meshes(config: Config, topology: str, trust: Mode, compiled: int) -> int:
    """Prints the table, saves all of it in the folder `dry_run` of the workdir, and returns the exit code.

    Args:
      config: The run; its own mesh is not read, except for the layout of sequences, and neither is its policy of
        rematerialization.
      topology: The chips.
      trust: The kernels that compiled steps take.
      compiled: The number of meshes to compile. One that does not fit is replaced by the next one
        that is predicted to fit.

    Raises:
      InputError: The topology is unknown or has several slices, libtpu is missing, no mesh of it divides the model and
        the batch, or no mesh that was tried could be compiled.
    """
    if "*" in topology:
        raise InputError(
            "--compare-meshes must have a topology of one slice, as it does not know the network between slices: got "
            f"--topology {topology}; use {topology.partition('*')[0]}, or leave out --compare-meshes to try one mesh"
        )
    jax.config.update("jax_platforms", "cpu")  # tracing must not occupy the chips of this machine
    try:
        devices = len(check.topology_devices(topology))
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    ranked = rank(config, check.CHIPS[topology.partition(":")[0]], devices, remats=get_args(Remat.__value__))
    fitting = sum(one.fits for one in ranked)
    say(f"meshes     {len(ranked)} of {topology} divide the model and the batch; {fitting} are predicted to fit")
    tried = _compile_best(config, topology, ranked, trust, compiled)
    rows = sorted([*tried, *map(row_of, ranked[len(tried) :])], key=_order)
    say(text := table([row.cells() for row in rows[: max(LISTED, compiled)]]))
    if rows[0].fits and rows[0].source != FAILED:
        options = " ".join(f"--mesh.{name} {size}" for name, size in zip(AXES, rows[0].mesh, strict=True))
        say(f"best       {options} --model.remat {rows[0].remat}, by figures that are {rows[0].source}")
    if len(rows) > LISTED:
        say(f"           {len(rows) - LISTED} more meshes are in meshes.json")
    folder = Path(config.workdir) / "dry_run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meshes.txt").write_text(text + "\n")
    figures = [dataclasses.asdict(row) | {"mesh": dict(zip(AXES, row.mesh, strict=True))} for row in rows]
    (folder / "meshes.json").write_text(json.dumps(figures, indent=2) + "\n")
    say(f"details    {folder}: meshes.txt, meshes.json")
    if tried and all(row.source == FAILED for row in tried):
        raise InputError(
            f"no step could be compiled for {topology}, on {len(tried)} meshes; the reasons are above, and the figures "
            "are predictions: --compiled-meshes 0 makes the same table without compiling"
        )
    return 0


def rank(config: Config, chip: Chip, devices: int, remats: Sequence[Remat] = ()) -> list[Prediction]:
    """Returns all meshes on which the run can be laid out: those that fit by their time, then the others by memory.

    Args:
      config: The run; its own mesh is not read, except for the layout of sequences.
      chip: The chip of all devices.
      devices: Their number.
      remats: Policies of rematerialization, of which each mesh takes the fastest that fits with room to spare, or that
        which needs the least memory; by default that of the run.

    Raises:
      InputError: No mesh divides the model and the batch; the message says why one of them does not, and names one that
        the batch alone rules out, if there is one.
    """
    predictions, refusals = [], []
    for sizes in grids(devices):
        shape = mesh_shape(_with_sizes(config, sizes).mesh, devices)
        try:
            check_fits_mesh(config, shape)
        except InputError as error:
            refusals.append((not _fits_another_batch(config, shape), f"{_text(sizes)} is refused because {error}"))
        else:
            predictions.append(_fastest_policy(config, chip, shape, remats or (config.model.remat,)))
    if not predictions:
        _, reason = min(refusals, key=lambda refusal: refusal[0])  # a batch is easier to change than a model
        raise InputError(f"no mesh of {devices} devices divides the model and the batch; {reason}")
    return sorted(predictions, key=lambda one: (not one.fits, one.seconds if one.fits else one.needed))


def grids(devices: int) -> Iterator[tuple[int, ...]]:
    """Yields all sizes of the four axes that multiply to a number of devices."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for data, fsdp, context in itertools.product(divisors, repeat=3):
        if devices % (data * fsdp * context) == 0:
            yield data, fsdp, context, devices // (data * fsdp * context)


def row_of(prediction: Prediction) -> Row:
    """Returns the row of a mesh that was not compiled."""
    return Row(
        _sizes(prediction),
        prediction.remat,
        prediction.needed,
        prediction.fits,
        prediction.seconds,
        prediction.mfu,
        prediction.exposed / prediction.seconds,
        prediction.binds,
        PREDICTED,
    )


def compiled_row(config: Config, topology: str, prediction: Prediction, trust: Mode) -> Row:
    """Compiles the step on one mesh, in a child process, and returns its row."""
    sizes, remat = _sizes(prediction), prediction.remat
    config = _with_remat(_with_sizes(config, sizes), remat)
    try:
        mesh = mesh_over(check.topology_devices(topology), config.mesh, topology)
        with jax.set_mesh(mesh), trusting(trust), backend_limits_are_input_errors(config):
            trainer = Trainer(config, mesh)
            program = check.compile_for(
                topology,
                trainer.train_step,
                trainer.abstract_state(),
                *trainer.abstract_batch(),
                timeout=COMPILE_SECONDS,
                compiler_options=check.HLO_ONLY,
            )
    except check.HbmError as error:
        say(f"           does not fit: it needs {gib(error.needed)}")
        return Row(sizes, remat, error.needed, False, None, None, None, "memory", COMPILED)
    except (RuntimeError, InputError) as error:  # a crash, a timeout, a mesh or a backend that cannot serve the run
        say(f"           not compiled: {error}")
        return dataclasses.replace(row_of(prediction), source=FAILED)
    timeline = check.timeline(program)
    tokens = config.data.batch_size * config.data.sequence_length
    flops = tokens * model_flops_per_token(config.model, config.data.sequence_length)
    peak = len(program.coords) * check.CHIPS[program.chip].flops
    waits = Phases(program).waits(timeline)
    return Row(
        sizes,
        remat,
        program.bytes_by_kind["total"],
        True,
        timeline.seconds,
        flops / (timeline.seconds * peak),
        timeline.exposed / timeline.seconds,
        waits[0][0] if waits else "nothing",
        COMPILED,
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Formats rows under HEADER, with aligned columns."""
    widths = [max(len(row[column]) for row in (HEADER, *rows)) for column in range(len(HEADER))]
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
        say(f"compiling  {done + 1} of {min(wanted, len(ranked))}: {shape}, remat {one.remat} ...")
        rows.append(compiled_row(config, topology, one, trust))
    return rows


def _fastest_policy(config: Config, chip: Chip, shape: Mapping[str, int], remats: Sequence[Remat]) -> Prediction:
    """Returns the prediction of a mesh with one of some policies; see `rank`.

    Predictions of memory are no better than a few percent, and a step that is refused would take the place of one that
    is only a little slower, so a policy that keeps more than another one must leave some memory.
    """
    predictions = [predict(_with_remat(config, remat), chip, shape) for remat in remats]
    least = min(predictions, key=lambda one: one.needed)
    roomy = [one for one in predictions if one.needed <= ROOM * one.available]
    return min([least, *roomy], key=lambda one: one.seconds) if least.fits else least


def _order(row: Row) -> tuple[int, float]:
    """Returns the place of a row in the table: compiled ones, predicted ones, failed ones, and those that do not fit.

    Rows of one kind are sorted by their time, and those that do not fit by their memory.
    """
    if not row.fits or row.seconds is None:
        return 3, row.memory
    return (COMPILED, PREDICTED, FAILED).index(row.source), row.seconds


def _fits_another_batch(config: Config, shape: Mapping[str, int]) -> bool:
    """Returns whether the run can be laid out on a mesh with another batch."""
    batch = batch_shards(shape) * config.data.microbatches
    try:
        check_fits_mesh(dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=batch)), shape)
    except InputError:
        return False
    return True


def _text(sizes: tuple[int, ...]) -> str:
    return f"{' x '.join(AXES)} = {' x '.join(map(str, sizes))}"


def _with_sizes(config: Config, sizes: tuple[int, ...]) -> Config:
    data, fsdp, context, model = sizes
    return dataclasses.replace(
        config, mesh=dataclasses.replace(config.mesh, data=data, fsdp=fsdp, context=context, model=model)
    )


def _with_remat(config: Config, remat: Remat) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def _sizes(prediction: Prediction) -> tuple[int, ...]:
    return tuple(prediction.mesh.get(name, 1) for name in AXES)
