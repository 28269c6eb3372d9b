"""`run.py --dry-run --topology v5e:2x4` reports whether a run fits those chips and how fast it would be, without them.

The whole training step is compiled for the topology by libtpu, in a separate process. The memory figures are the
compiler's own. Times are estimated by `flaxasync.check` from the compiled program; nothing is run. If the step does not
fit, a smaller version of it is compiled: the report names the options that make it smaller, and the estimates are those
of the smaller step.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from flaxasync import check
from flaxasync.ops.trust import Mode, trusting
from train.config import Config
from train.dry_run.picture import save_picture
from train.dry_run.report import DryRun, render
from train.lifecycle.errors import InputError
from train.metrics.model_flops import causal_flops_per_token, model_flops_per_token
from train.metrics.show import say
from train.step.mesh import batch_shards, check_fits_mesh, mesh_over
from train.step.trainer import Trainer, TrainState, backend_limits_are_input_errors

# A smaller batch is chosen to fill this share of the memory. Close to the limit the compiler searches long for values
# that it could recompute.
MEMORY_TARGET = 0.5
type Kernels = Literal["play", "estimate"]
COMPILE_SECONDS = 1200  # time limit of one compilation


def dry_run(config: Config, topology: str, trust: Mode = "predicted", kernels: Kernels = "play") -> int:
    """Prints a report on a run, saves its details in the folder `dry_run` of the workdir, and returns the exit code.

    Args:
      config: The run.
      topology: The chips.
      trust: Which kernels calls may take that name none.
      kernels: Whether every distinct kernel is simulated, or takes what its own cost estimate says.

    Raises:
      InputError: The topology is unknown or does not match the mesh, libtpu is missing, the model or the batch does not
        divide over the mesh, or the step cannot be compiled at all.
    """
    jax.config.update("jax_platforms", "cpu")  # tracing must not occupy the chips of this machine
    mesh = _topology_mesh(config, topology)
    taken = {"predicted": "those predicted to be fastest", "verified": "only those that are verified for this chip"}
    say(f"kernels    {taken[trust]} (--trust {trust})")
    with jax.set_mesh(mesh), trusting(trust), backend_limits_are_input_errors(config):
        began = time.monotonic()
        found = _compile_what_fits(config, topology, mesh, kernels)
        folder = Path(config.workdir) / "dry_run"
        folder.mkdir(parents=True, exist_ok=True)
        report = dataclasses.replace(found, seconds=time.monotonic() - began)
        text = render(report)
        say(text)
        _save(report, text, folder)
    say(f"details    {folder}: timeline.png, trace.json (ui.perfetto.dev), audit.txt, program.txt, report.json")
    return 0


def _topology_mesh(config: Config, topology: str) -> jax.sharding.Mesh:
    try:
        devices = check.topology_devices(topology)
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    mesh = mesh_over(devices, config.mesh, topology)
    check_fits_mesh(config, mesh.shape)
    return mesh


def _compile_what_fits(config: Config, topology: str, mesh: jax.sharding.Mesh, kernels: Kernels) -> DryRun:
    """Compiles the step that was requested or, if that does not fit, the first smaller step that does."""
    refused: list[check.HbmError] = []
    for smaller in _smaller_steps(config, mesh, refused):
        tried = _replace_options(config, smaller)
        trainer = Trainer(tried, mesh)
        state, batch = trainer.abstract_state(), trainer.abstract_batch()
        named = " ".join(f"--{name} {value}" for name, value in smaller.items()) or "as requested"
        say(f"compiling  for {topology}, {named} ...")
        try:
            program = check.compile_for(topology, trainer.train_step, state, *batch, timeout=COMPILE_SECONDS)
        except check.HbmError as error:
            refused.append(error)
            continue
        except RuntimeError as error:  # a crash, a timeout, or a refusal for another reason than memory
            raise InputError(f"the training step could not be compiled for {topology}: {error}") from error
        return _estimate(config, tried, smaller, refused, topology, mesh, state, program, kernels)
    raise InputError(f"not even one layer fits on {topology}: {refused[-1]}; use a larger topology, or a smaller model")


def _smaller_steps(config: Config, mesh: jax.sharding.Mesh, refused: list[check.HbmError]) -> Iterator[dict[str, Any]]:
    """Yields the options to try, from no change to the smallest step.

    A smaller batch comes first, then bfloat16 parameters in addition, then fewer layers in addition.
    """
    yield {}
    smaller: dict[str, Any] = {}
    shards, batch = batch_shards(mesh.shape) * config.data.microbatches, config.data.batch_size
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
    """Predicts the number of sequences of a micro-batch per data shard, a power of two, that fits with a margin.

    The bytes that were needed are modelled as the state, gradients as large as the parameters, and an equal share for
    each sequence.
    """
    trainer = Trainer(config, mesh)
    state = trainer.abstract_state()
    fixed = _bytes_per_device(state) + _bytes_per_device(state.params)
    refused = config.data.batch_size // (batch_shards(mesh.shape) * config.data.microbatches)
    per_sequence = max(refusal.needed - fixed, 1) / refused
    available = max(MEMORY_TARGET * refusal.available - fixed, 0)
    sequences = 1
    while sequences * 2 < refused and sequences * 2 * per_sequence <= available:
        sequences *= 2
    return sequences


def _replace_options(config: Config, options: dict[str, Any]) -> Config:
    """Returns a configuration with the fields in `options`, such as {"data.batch_size": 8}, replaced."""
    for name, value in options.items():
        section, field = name.split(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{field: value})}
        )
    return config


def _estimate(
    config: Config,
    tried: Config,
    smaller: dict[str, Any],
    refused: list[check.HbmError],
    topology: str,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    program: check.CompiledProgram,
    kernels: Kernels,
) -> DryRun:
    def report(line: str) -> None:
        say(f"simulating {line}")

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
        parameter_bytes=_bytes_per_device(state.params),
        optimizer_bytes=_bytes_per_device(state.opt_state),
        tokens=tried.data.batch_size * sequence,
        flops_per_token=model_flops_per_token(tried.model, sequence),
        program=program,
        audit=check.audit(program),
        causal_flops_per_token=causal_flops_per_token(tried.model, sequence),
        timeline=check.timeline(program, kernels="play" if kernels == "play" else None, say=report),
        seconds=0.0,
    )


def _bytes_per_device(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree occupy on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def _save(report: DryRun, text: str, folder: Path) -> None:
    (folder / "report.txt").write_text(text + "\n")
    (folder / "report.json").write_text(json.dumps(report.figures(), indent=2) + "\n")
    (folder / "audit.txt").write_text(f"{report.audit}\n\n{report.timeline}\n")
    (folder / "program.txt").write_text(report.program.as_text())
    check.save_trace(report.timeline, folder / "trace.json")
    save_picture(report, folder / "timeline.png")
