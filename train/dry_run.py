"""`run.py --dry-run --topology v5e:2x4`: does a run fit on those chips, and how fast would it be? Needs none of them.

The whole training step is compiled for the topology, by libtpu in a process of its own. Memory is the compiler's
count. Times are estimates of `flaxasync.check` from the compiled program; nothing is run. Where the step does not fit,
the same step is compiled smaller, with options that the report names, and the estimates are of that one.
"""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxasync import check
from models.transformer import check_fits
from train.config import Config, InputError
from train.dry_run_picture import save_picture
from train.dry_run_report import DryRun, render
from train.mesh import grid
from train.model_flops import model_flops_per_token
from train.show import say
from train.step import Trainer, TrainState

COMFORT = 0.5  # part of the memory that a smaller batch is chosen for; near the limit the compiler recomputes, for long
COMPILE_SECONDS = 1200


def dry_run(config: Config, topology: str) -> int:
    """Reports on a run, and leaves the details in the folder `dry_run` of its workdir; returns the exit code.

    Raises:
      InputError: the topology is unknown or does not suit the mesh, libtpu is missing, or the model does not divide.
    """
    jax.config.update("jax_platforms", "cpu")  # to trace on; a run on the chips of this machine is not disturbed
    mesh = _mesh(config, topology)
    with jax.set_mesh(mesh), _bad_input(config):
        began = time.monotonic()
        found = _compile_what_fits(config, topology, mesh)
        folder = Path(config.workdir) / "dry_run"
        folder.mkdir(parents=True, exist_ok=True)
        report = dataclasses.replace(found, seconds=time.monotonic() - began)
        text = render(report)
        say(text)
        _save(report, text, folder)
    say(f"in full    {folder}: timeline.png, trace.json (ui.perfetto.dev), audit.txt, program.txt, report.json")
    return 0


def _mesh(config: Config, topology: str) -> jax.sharding.Mesh:
    try:
        size = check.topology_size(topology)
        shape = grid(config.mesh, size, topology)
        explicit = (jax.sharding.AxisType.Explicit,) * len(shape)
        mesh = check.topology_mesh(topology, tuple(shape.values()), tuple(shape), axis_types=explicit)
        check_fits(
            config.model,
            sequence_length=config.data.sequence_length,
            mesh_shape=shape,
            context_layout=config.mesh.context_layout,
        )
    except InputError:
        raise
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    if config.data.batch_size % mesh.shape["data"]:
        raise InputError(
            f"data.batch_size must be divisible by the 'data' axis: got {config.data.batch_size} on "
            f"{mesh.shape['data']} devices"
        )
    return mesh


@contextlib.contextmanager
def _bad_input(config: Config) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise InputError(f"backend={config.backend} cannot serve this run: {error}") from error


def _compile_what_fits(config: Config, topology: str, mesh: jax.sharding.Mesh) -> DryRun:
    """Compiles the step as it was asked for, or else the first of the smaller ones that fits."""
    refused: list[check.HbmError] = []
    for smaller in _attempts(config, mesh, refused):
        tried = _with(config, smaller)
        trainer = Trainer(tried, mesh)
        state, batch = trainer.abstract_state(), trainer.abstract_batch()
        named = " ".join(f"--{name} {value}" for name, value in smaller.items()) or "as asked"
        say(f"compiling  for {topology}, {named} ...")
        try:
            program = check.compile_for(topology, trainer.train_step, state, batch, batch, timeout=COMPILE_SECONDS)
        except check.HbmError as error:
            refused.append(error)
            continue
        except RuntimeError as error:  # it crashed, hung, or refused for another reason
            raise InputError(f"the training step could not be compiled for {topology}: {error}") from error
        return _measure(config, tried, smaller, refused, topology, mesh, state, program)
    raise InputError(f"not even one layer fits on {topology}: {refused[-1]}; use a larger topology, or a smaller model")


def _attempts(config: Config, mesh: jax.sharding.Mesh, refused: list[check.HbmError]) -> Iterator[dict[str, Any]]:
    """Yields options: none; a smaller batch; bfloat16 parameters, too; fewer layers, too."""
    yield {}
    smaller: dict[str, Any] = {}
    shards, batch = mesh.shape["data"], config.data.batch_size
    if batch > shards:
        guess = _batch_that_fits(config, mesh, refused[-1])
        for sequences in dict.fromkeys((guess, 1)):
            smaller["data.batch_size"] = sequences * shards
            yield dict(smaller)
    if config.model.param_dtype != "bfloat16":
        smaller["model.param_dtype"] = "bfloat16"
        yield dict(smaller)
    for halvings in itertools.count(1):
        if config.model.layers >> halvings < 1:
            return
        smaller["model.layers"] = config.model.layers >> halvings
        yield dict(smaller)


def _batch_that_fits(config: Config, mesh: jax.sharding.Mesh, refusal: check.HbmError) -> int:
    """Returns the sequences a data shard, a power of two below those refused, that should fit with room to spare.

    What is needed is taken for the state, gradients as large as the parameters, and a part for each sequence.
    """
    trainer = Trainer(config, mesh)
    state = trainer.abstract_state()
    fixed = _device_bytes(state) + _device_bytes(state.params)
    refused = config.data.batch_size // mesh.shape["data"]
    each = max(refusal.needed - fixed, 1) / refused
    room = max(COMFORT * refusal.available - fixed, 0)
    sequences = 1
    while sequences * 2 < refused and sequences * 2 * each <= room:
        sequences *= 2
    return sequences


def _with(config: Config, options: dict[str, Any]) -> Config:
    """Returns a configuration with fields replaced: {"data.batch_size": 8}."""
    for name, value in options.items():
        section, field = name.split(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{field: value})}
        )
    return config


def _measure(
    config: Config,
    tried: Config,
    smaller: dict[str, Any],
    refused: list[check.HbmError],
    topology: str,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    program: check.CompiledProgram,
) -> DryRun:
    sequence = tried.data.sequence_length
    return DryRun(
        config=config,
        tried=tried,
        smaller=smaller,
        needed=refused[0].needed if refused else program.bytes_by_kind["total"],
        topology=topology,
        chip=check.CHIPS[program.chip],
        mesh=dict(mesh.shape),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        parameter_bytes=_device_bytes(state.params),
        optimizer_bytes=_device_bytes(state.opt_state),
        tokens=tried.data.batch_size * sequence,
        flops_per_token=model_flops_per_token(tried.model, sequence),
        program=program,
        audit=check.audit(program),
        timeline=check.timeline(program),
        seconds=0.0,
    )


def _device_bytes(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree take on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def _save(report: DryRun, text: str, folder: Path) -> None:
    (folder / "report.txt").write_text(text + "\n")
    (folder / "report.json").write_text(json.dumps(report.figures(), indent=2) + "\n")
    (folder / "audit.txt").write_text(f"{report.audit}\n\n{report.timeline}\n")
    (folder / "program.txt").write_text(report.program.as_text())
    check.save_trace(report.timeline, folder / "trace.json")
    save_picture(report, folder / "timeline.png")
