"""`run.py --dry-run --topology v5e:2x4` reports whether a run fits those chips and how fast it would be, without them.

The whole training step is compiled for the topology by libtpu, in a separate process. The memory figures are the
compiler's own. Times are estimated by `flaxasync.check` from the compiled program; nothing is run. If the step does not
fit, a smaller version of it is compiled: the report names the options that make it smaller, and the estimates are those
of the smaller step.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax

from flaxasync import check
from flaxasync.check.estimate.phases import Phases
from flaxasync.check.estimate.picture import draw_timeline
from flaxasync.hardware import Chip
from flaxasync.ops.trust import Mode, trusting
from train.config import Config
from train.dry_run.mesh_costs import predicted_memory
from train.dry_run.report import DryRun
from train.lifecycle.errors import InputError
from train.metrics.output import say
from train.step.mesh import batch_shards, check_fits_mesh, mesh_over
from train.step.trainer import Trainer, TrainState, backend_limits_are_input_errors

# A smaller batch is chosen to fill this share of the memory. Close to the limit the compiler searches long for values
# that it could recompute.
MEMORY_TARGET = 0.5
COMPILE_SECONDS = 1200  # time limit of one compilation
type Kernels = Literal["play", "estimate"]


def dry_run(config: Config, topology: str, trust: Mode = "predicted", kernels: Kernels = "play") -> int:
    """Prints a report on a run, saves its details in the folder `dry_run` of the workdir, and returns the exit code.

    `trust` and `kernels` are those of `train.config.command.Command`.
    """
    began = time.monotonic()
    mesh = mesh_over(topology_devices(topology), config.mesh, topology)
    check_fits_mesh(config, mesh.shape)
    taken = {"predicted": "those predicted to be fastest", "verified": "only those that are verified for this chip"}
    say(f"kernels    {taken[trust]} (--trust {trust})")
    with jax.set_mesh(mesh), trusting(trust), backend_limits_are_input_errors(config):
        report = _compile_what_fits(config, topology, mesh, kernels)
    folder = Path(config.workdir) / "dry_run"
    folder.mkdir(parents=True, exist_ok=True)
    text = report.render()
    say(f"{text}\ntook       {time.monotonic() - began:.0f} s")
    (folder / "report.txt").write_text(text + "\n")
    (folder / "report.json").write_text(json.dumps(report.figures(), indent=2) + "\n")
    (folder / "audit.txt").write_text(f"{report.audit}\n\n{report.timeline}\n")
    (folder / "program.txt").write_text(report.program.as_text())
    check.save_trace(report.timeline, folder / "trace.json")
    phases = Phases(report.program)
    draw_timeline(
        report.timeline, folder / "timeline.png", phase_of=lambda name: phases.part(name) or phases.phase(name)
    )
    say(f"details    {folder}: timeline.png, trace.json (ui.perfetto.dev), audit.txt, program.txt, report.json")
    return 0


def topology_devices(topology: str) -> list[Any]:
    """Returns the devices of a topology, which need not be there, and keeps JAX from occupying those that are."""
    jax.config.update("jax_platforms", "cpu")
    try:
        return check.topology_devices(topology)
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error


def compile_step(
    config: Config, topology: str, mesh: jax.sharding.Mesh, **options: Any
) -> tuple[TrainState, check.CompiledProgram]:
    """Compiles the training step of a run in a child process, and returns its abstract state and the program."""
    trainer = Trainer(config, mesh)
    state, batch = trainer.abstract_state(), trainer.abstract_batch()
    return state, check.compile_for(topology, trainer.train_step, state, *batch, timeout=COMPILE_SECONDS, **options)


def replace_options(config: Config, options: dict[str, Any]) -> Config:
    """Returns a configuration with the fields in `options`, such as {"data.batch_size": 8}, replaced."""
    for name, value in options.items():
        section, field = name.split(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def _compile_what_fits(config: Config, topology: str, mesh: jax.sharding.Mesh, kernels: Kernels) -> DryRun:
    """Compiles the step that was requested or, if that does not fit, the first smaller step that does."""
    refused = list[check.HbmError]()
    for smaller in _smaller_steps(config, mesh, check.CHIPS[topology.partition(":")[0]]):
        tried = replace_options(config, smaller)
        named = " ".join(f"--{name} {value}" for name, value in smaller.items()) or "as requested"
        say(f"compiling  for {topology}, {named} ...")
        try:
            state, program = compile_step(tried, topology, mesh)
        except check.HbmError as error:
            refused.append(error)
            continue
        except RuntimeError as error:  # a crash, a timeout, or a refusal for another reason than memory
            raise InputError(f"the training step could not be compiled for {topology}: {error}") from error
        needed = refused[0].needed if refused else program.bytes_by_kind["total"]
        audit = check.audit(program)
        played: Literal["play"] | None = "play" if kernels == "play" else None
        timeline = check.timeline(program, kernels=played, say=lambda line: say(f"simulating {line}"))
        return DryRun(config, tried, smaller, needed, topology, dict(mesh.shape), state, program, audit, timeline)
    raise InputError(f"not even one layer fits on {topology}: {refused[-1]}; use a larger topology, or a smaller model")


def _smaller_steps(config: Config, mesh: jax.sharding.Mesh, chip: Chip) -> Iterator[dict[str, Any]]:
    """Yields the options to try: none, a smaller batch, then bfloat16 parameters too, then fewer layers too."""
    smaller: dict[str, Any] = {}
    yield smaller
    for batch in _smaller_batches(config, mesh, chip):
        smaller = {"data.batch_size": batch}
        yield smaller
    if config.model.param_dtype != "bfloat16":
        smaller = smaller | {"model.param_dtype": "bfloat16"}
        yield smaller
    for halvings in range(1, config.model.layers.bit_length()):
        yield smaller | {"model.layers": config.model.layers >> halvings}


def _smaller_batches(config: Config, mesh: jax.sharding.Mesh, chip: Chip) -> list[int]:
    """Returns the largest batch that is predicted to fit with a margin, and the smallest batch, in sequences.

    Both have as many sequences as a power of two for each micro-batch and shard of the batch, fewer than requested.
    """
    smallest = batch_shards(mesh.shape) * config.data.microbatches
    batches = [smallest << n for n in range(32) if smallest << n < config.data.batch_size]

    def fits(batch: int) -> bool:
        tried = replace_options(config, {"data.batch_size": batch})
        return sum(predicted_memory(tried, mesh.shape, chip).values()) <= MEMORY_TARGET * chip.hbm_bytes

    return list(dict.fromkeys([*filter(fits, reversed(batches))][:1] + batches[:1]))
