"""`run.py --dry-run --topology v5e:2x4` reports whether a run fits those chips and how fast it
would be, without them.

The whole training step is compiled for the topology by libtpu, in a separate process. The memory
figures are the compiler's own. Times are estimated by `flaxasync.check` from the compiled program.
If the step does not fit, a smaller version of it is compiled, and the estimates are those of the
smaller step.
"""

import collections
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from flaxasync import check
from flaxasync.check.estimate.phases import Phases
from flaxasync.check.estimate.picture import draw_timeline
from flaxasync.check.estimate.timeline import SOURCES
from flaxasync.check.progress import progress
from flaxasync.hardware import Chip
from flaxasync.ops.trust import Mode, trusting
from train.config import Config, replace_options
from train.dry_run.forms import choose_and_say, what_fits
from train.dry_run.mesh_costs import predicted_memory
from train.lifecycle.errors import InputError, as_input_errors
from train.metrics.output import gib, say, time_text
from train.step.flags import flags_of, in_effect, require_known
from train.step.mesh import batch_shards, check_fits_mesh, mesh_over
from train.step.products import FORMULA, model_flops_per_token
from train.step.trainer import Trainer, TrainState, backend_limits_are_input_errors

# A smaller batch is chosen to fill this share of the memory. Close to the limit the compiler
# searches long for values that it could recompute.
MEMORY_TARGET = 0.5
COMPILE_SECONDS = 1200  # time limit of one compilation
LISTED = 5  # number of causes of waits, and of kinds of findings, that the text names
type Kernels = Literal["play", "estimate"]


def dry_run(
    config: Config, topology: str, trust: Mode = "predicted", kernels: Kernels = "play"
) -> int:
    """Prints a report on a run, saves its details in the folder `dry_run` of the workdir, and
    returns the exit code.
    """
    began = time.monotonic()
    mesh = mesh_over(topology_devices(topology), config.mesh, topology)
    check_fits_mesh(config, mesh.shape)
    taken = {
        "predicted": "those predicted to be fastest",
        "verified": "only those that are verified for this chip",
    }
    say(f"kernels    {taken[trust]} (--trust {trust})")
    require_known(config, topology.partition(":")[0])
    with flags_of(config, topology.partition(":")[0]) as flags, jax.set_mesh(mesh), trusting(trust):
        say(flags)
        config = choose_and_say(config, mesh)
        with backend_limits_are_input_errors(config):
            report = _compile_what_fits(config, topology, mesh, kernels)
    folder = Path(config.workdir) / "dry_run"
    folder.mkdir(parents=True, exist_ok=True)
    with progress("reading the compiled program"):
        text = report.render()
    say(f"{text}\ntook       {time.monotonic() - began:.0f} s")
    with progress("writing the details"):
        _write_details(report, text, folder)
    say(
        f"details    {folder}: timeline.png, trace.json (ui.perfetto.dev), audit.txt, program.txt, "
        "report.json"
    )
    return 0


def _write_details(report: "DryRun", text: str, folder: Path) -> None:
    (folder / "report.txt").write_text(text + "\n")
    (folder / "report.json").write_text(json.dumps(report.figures(), indent=2) + "\n")
    (folder / "audit.txt").write_text(f"{report.audit}\n\n{report.timeline}\n")
    (folder / "program.txt").write_text(report.program.as_text())
    check.save_trace(report.timeline, folder / "trace.json")
    parts = Phases(report.program)
    draw_timeline(
        report.timeline,
        folder / "timeline.png",
        phase_of=lambda name: parts.part(name) or parts.phase(name),
    )


def topology_devices(topology: str) -> list[Any]:
    """Returns the devices of a topology, which need not be there, and keeps JAX from occupying
    those that are.
    """
    jax.config.update("jax_platforms", "cpu")
    with as_input_errors(ValueError, ImportError):
        return check.topology_devices(topology)


def compile_step(
    config: Config, topology: str, mesh: jax.sharding.Mesh, **options: Any
) -> tuple[TrainState, check.CompiledProgram]:
    """Compiles the training step of a run in a child process, and returns its abstract state and
    the program.
    """
    trainer = Trainer(config, mesh)
    state = trainer.abstract_state()
    batch = trainer.abstract_batch()
    return state, check.compile_for(
        topology, trainer.train_step, state, *batch, timeout=COMPILE_SECONDS, **options
    )


@dataclasses.dataclass(frozen=True)
class DryRun:
    """One compiled training step: the step that was requested or, if that does not fit, a smaller
    one.
    """

    config: Config  # as requested
    tried: Config  # what the program was compiled from
    smaller: dict[str, Any]  # the options in which the two differ; empty if the requested step fits
    needed: int  # memory that the requested step needs, in bytes per device
    predicted: int  # what that was predicted to need, from the sizes of model and mesh
    advice: str  # what is predicted to fit instead of the requested step; "" if that fits
    topology: str
    mesh: dict[str, int]
    state: TrainState  # abstract, of the tried configuration
    program: check.CompiledProgram
    audit: check.Audit
    timeline: check.Timeline
    flags: dict[str, str]  # of libtpu, with which the program was compiled

    def figures(self) -> dict[str, Any]:
        """Returns the figures of report.json; all sizes are in bytes per device."""
        t = self.timeline
        program = self.program
        model = self.tried.model
        chip = check.CHIPS[program.chip]
        length = self.tried.data.sequence_length
        kinds = program.bytes_by_kind
        params = _bytes_per_device(self.state.params)
        optimizer = _bytes_per_device(self.state.opt_state)
        tokens_per_second = self.tried.data.batch_size * length / t.seconds
        peak = len(program.coords) * chip.flops
        return {
            "topology": self.topology,
            "mesh": self.mesh,
            "flags": self.flags,
            "fits": not self.smaller,
            "bytes_needed": self.needed,
            "bytes_predicted": self.predicted,
            "bytes_available": round(chip.hbm_bytes),
            "estimates_are_of": dict(self.smaller),
            "bytes_by_kind": kinds | {"aliased": program.memory["alias_size_in_bytes"]},
            "bytes_by_use": {
                "parameters": params,
                "optimizer state": optimizer,
                "activations and gradients": kinds["temporaries"],
                "batch and outputs": kinds["arguments"] - params - optimizer + kinds["outputs"],
                "code": kinds["code"],
            },
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(self.state.params)),
            "estimated_step_seconds": t.seconds,
            "estimated_tokens_per_second": tokens_per_second,
            "estimated_mfu": model_flops_per_token(model, length) * tokens_per_second / peak,
            "estimated_causal_mfu": model_flops_per_token(model, length, causal=True)
            * tokens_per_second
            / peak,
            "estimated_hardware_utilization": (t.flops or 0) / (t.seconds * chip.flops),
            "seconds_taken_from": dict(t.slowest.sources),
            "exposed_share": t.exposed / t.seconds,
            "model_flops_per_token": model_flops_per_token(model, length),
            "model_flops": FORMULA,
            "utilization_is_of": f"{chip.flops:.6g} FLOP/s a device, the peak rate of bfloat16",
            "basis": t.basis,
            "known_error": t.known_error,
            "notes": list(t.notes),
            "audit_ok": self.audit.ok,
        }

    def render(self) -> str:
        """Formats the report as text."""
        f = self.figures()
        t = self.timeline
        data = self.config.data
        sizes = {
            name: gib(count) for name, count in (f["bytes_by_kind"] | f["bytes_by_use"]).items()
        }
        chips = len(self.program.coords)
        chip = check.CHIPS[self.program.chip]
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        names = ("tokens_per_second", "mfu", "causal_mfu", "hardware_utilization")
        speed, mfu, causal, hardware = (f[f"estimated_{name}"] for name in names)
        lines = [
            f"dry run    {chips} devices of {self.topology}, as {shape}; {f['parameters']:,} "
            "parameters",
            f"memory     {'fits' if f['fits'] else 'does not fit'}: {gib(self.needed)} per device "
            "for batch "
            f"{data.batch_size} x {data.sequence_length} tokens; {gib(chip.hbm_bytes)} are "
            "available",
            f"           as the compiler counts it; {gib(self.predicted)} were predicted from the "
            "sizes alone",
        ]
        if self.smaller:
            lines.append(f"           {self.advice}")
            options = " ".join(f"--{name} {value}" for name, value in self.smaller.items())
            lines.append(
                f"fits       with {options}: {sizes['total']} per device. All figures below are of "
                "that step"
            )
        lines += [
            f"           arguments {sizes['arguments']} (parameters {sizes['parameters']} and "
            "optimizer state "
            f"{sizes['optimizer state']}; {sizes['aliased']} of these are donated to the outputs)",
            f"           further outputs {sizes['outputs']}, temporaries {sizes['temporaries']} "
            "(activations, "
            f"gradients), code {sizes['code']}",
            f"step       {time_text(t.seconds)} estimated: work {t.compute / t.seconds:.1%}, "
            "waiting for other devices "
            f"{f['exposed_share']:.1%}, for its own memory {t.slowest.memory / t.seconds:.1%}; "
            "nothing was run",
            f"speed      {speed:,.0f} tokens/s, {speed / chips:,.0f} per device; MFU {causal:.1%} "
            "of "
            f"{chip.flops / 1e12:g} TFLOP/s in bfloat16 (with half of attention, as it is causal; "
            f"{mfu:.1%} with all)",
            f"           hardware FLOPs utilization {hardware:.1%} of that rate, recomputed "
            "products included",
            f"           model FLOPs: {f['model_flops_per_token']:.4g} per token = {FORMULA}",
        ]
        for part, seconds in Phases(self.program).waits(t)[:LISTED]:
            if seconds > 1e-3 * t.seconds:
                lines.append(
                    f"           waits {time_text(seconds)} ({seconds / t.seconds:.1%}) in {part}"
                )
        shares = [
            f"{name} {t.slowest.sources[name] / t.seconds:.1%}"
            for name in SOURCES
            if name in t.slowest.sources
        ]
        lines += [
            f"           taken from: {', '.join(shares)}",
            f"basis      {t.basis}",
            f"           known error: {t.known_error}",
            *(f"           note: {note}" for note in t.notes),
            *_audit_lines(self.audit),
        ]
        return "\n".join(lines)


def _compile_what_fits(
    config: Config, topology: str, mesh: jax.sharding.Mesh, kernels: Kernels
) -> DryRun:
    """Compiles the step that was requested or, if that does not fit, the first smaller step that
    does.
    """
    refused = list[check.HbmError]()
    for smaller in _smaller_steps(config, mesh, check.CHIPS[topology.partition(":")[0]]):
        tried = replace_options(config, smaller)
        named = " ".join(f"--{name} {value}" for name, value in smaller.items()) or "as requested"
        say(f"compiling  for {topology}, {named} ...")
        try:
            with progress(f"compiling for {topology}"):
                state, program = compile_step(tried, topology, mesh)
        except check.HbmError as error:
            refused.append(error)
            continue
        except (
            RuntimeError
        ) as error:  # a crash, a timeout, or a refusal for another reason than memory
            raise InputError(
                f"the training step could not be compiled for {topology}: {error}"
            ) from error
        needed = refused[0].needed if refused else program.bytes_by_kind["total"]
        played: Literal["play"] | None = "play" if kernels == "play" else None
        with progress("reading the compiled program"):
            audit = check.audit(program)
            timeline = check.timeline(
                program, kernels=played, say=lambda line: say(f"simulating {line}")
            )
        shape = dict(mesh.shape)
        flags = in_effect()
        advice = what_fits(config, check.CHIPS[program.chip], shape) if refused else ""
        predicted = sum(predicted_memory(config, shape, check.CHIPS[program.chip]).values())
        return DryRun(
            config,
            tried,
            smaller,
            needed,
            predicted,
            advice,
            topology,
            shape,
            state,
            program,
            audit,
            timeline,
            flags,
        )
    raise InputError(
        f"not even one layer fits on {topology}: {refused[-1]}; use a larger topology, or a "
        "smaller model"
    )


def _smaller_steps(config: Config, mesh: jax.sharding.Mesh, chip: Chip) -> Iterator[dict[str, Any]]:
    """Yields the options to try: none, a smaller batch, then bfloat16 parameters too, then fewer
    layers too.
    """
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
    """Returns the largest batch that is predicted to fit with a margin, and the smallest batch, in
    sequences.

    Both have as many sequences as a power of two for each micro-batch and shard of the batch, fewer
    than requested.
    """
    smallest = batch_shards(mesh.shape) * config.data.microbatches
    batches = [smallest << n for n in range(32) if smallest << n < config.data.batch_size]

    def fits(batch: int) -> bool:
        tried = replace_options(config, {"data.batch_size": batch})
        return (
            sum(predicted_memory(tried, mesh.shape, chip).values())
            <= MEMORY_TARGET * chip.hbm_bytes
        )

    return list(dict.fromkeys([*filter(fits, reversed(batches))][:1] + batches[:1]))


def _audit_lines(audit: check.Audit) -> list[str]:
    moving = [pair for pair in audit.pairs if pair.communicates]
    total = sum(pair.runs * pair.transfer for pair in moving)
    hidden = sum(pair.runs * min(pair.inside, pair.transfer) for pair in moving)
    lines = [
        f"audit      {'ok' if audit.ok else 'NOT OK'}: {sum(pair.runs for pair in moving):,} "
        "transfers per step, "
        f"{gib(sum(pair.runs * pair.bytes for pair in moving))}, {time_text(total)} on their links"
        + (f", {hidden / total:.0%} of it hidden behind work" if total else "")
    ]
    counts = collections.Counter(finding.code for finding in audit.findings)
    # the first of each code
    worst = {finding.code: finding for finding in reversed(audit.findings)}
    for code, count in list(counts.items())[:LISTED]:
        lines.append(f"           {worst[code].severity} {code} x{count}: {worst[code].message}")
        lines.append(f"               remedy: {worst[code].remedy}")
    return lines


def _bytes_per_device(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree occupy on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves
    )
