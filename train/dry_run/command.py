"""`run.py --dry-run --topology v5e:2x4` reports whether a run fits those chips and how fast it
would be, without them; so does `--topology h100:2x8` for GPUs.

The whole training step is compiled for the topology by its compiler, in a separate process. The memory
figures are the compiler's own. Times are estimated by `flaxasync.check` from the compiled program.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from flaxasync import check
from flaxasync.check.estimate.phases import Phases
from flaxasync.check.estimate.picture import draw_timeline
from flaxasync.check.estimate.timeline import SOURCES
from flaxasync.check.progress import progress
from flaxasync.check.units import time_text
from flaxasync.hardware import Chip, accelerator
from flaxasync.ops import trust
from train.config import Config
from train.dry_run.compiled_forms import CompiledForms
from train.dry_run.meshes import choose_and_say, what_fits
from train.dry_run.prediction import predict
from train.lifecycle.errors import COMPLETE, InputError, as_input_errors
from train.lifecycle.memory import bytes_on_device
from train.metrics.output import gib, say
from train.step.flags import flags_of, in_effect, platform_of
from train.step.mesh import check_fits_mesh, mesh_over
from train.step.products import FORMULA, model_flops_per_token
from train.step.trainer import Trainer, TrainState

LISTED = 5  # number of causes of waits, and of kinds of findings, that the text names
MEMORY = """\
memory     {verdict}: {needed} per device for batch {data.batch_size} x {data.sequence_length} \
tokens; {available} are available
           as the compiler counts it{predicted}"""
STEP = """\
dry run    {chips} devices of {topology}, as {shape}; {parameters:,} parameters
{memory}
           {uses}
step       {step} estimated{guessed}: work {work:.1%}, waiting for other devices {exposed_share:.1%}, for \
its own memory {own_memory:.1%}; nothing was run
speed      {estimated_tokens_per_second:,.0f} tokens/s, {each:,.0f} per device; MFU \
{estimated_causal_mfu:.1%} of {teraflops:g} TFLOP/s in bfloat16 (with half of attention, as it \
is causal; {estimated_mfu:.1%} with all)
           hardware FLOPs utilization {estimated_hardware_utilization:.1%} of that rate, \
recomputed products included
           model FLOPs: {model_flops_per_token:.4g} per token = {model_flops}"""


def dry_run(
    config: Config,
    topology: str,
    kernels: Literal["play", "estimate"] = "play",
) -> int:
    """Prints a report on a run, saves its details in the folder `dry_run` of the workdir, and
    returns the exit code, which is COMPLETE also for a run that does not fit.
    """
    began = time.monotonic()
    chip = topology.partition(":")[0]
    mesh = mesh_over(topology_devices(topology), config.mesh, topology)
    check_fits_mesh(config, mesh.shape)
    # asks JAX for its backend, which `topology_devices` has made the CPU
    taken = f"those that {trust.VARIABLE} trusts"
    if trust.is_assumed():
        taken = "those predicted to be fastest"
    say(f"kernels    {taken}")
    folder = Path(config.workdir) / "dry_run"
    forms = CompiledForms(topology, mesh, kernels)
    with flags_of(config, chip) as flags, jax.set_mesh(mesh), contextlib.closing(forms):
        say(flags)
        try:
            # its form is complete from here on
            config = choose_and_say(config, mesh, forms.estimates)
            program = forms.start(config).result()
        except check.HbmError as error:
            figures = memory_figures(config, topology, mesh.shape, error.needed)
            advice = what_fits(config, accelerator(chip), mesh.shape)
            text = f"{memory_text(config, figures, 'does not fit')}\n           {advice}"
            say(text)
            _write_report(folder, figures | {"fits": False, "advice": advice}, text)
            return COMPLETE
        except RuntimeError as error:  # a crash, a timeout, or another refusal
            raise InputError(
                f"the training step could not be compiled for {topology}: {error}"
            ) from error
        figures = memory_figures(config, topology, mesh.shape, program.bytes_by_kind["total"])
        state = Trainer(config, mesh).abstract_state()
    timeline = forms.timeline(program)
    with progress("reading the compiled program"):
        audit = check.audit(program)
        figures |= step_figures(config, state, program, timeline)
        text = render(config, program, timeline, audit, figures)
    say(f"{text}\ntook       {time.monotonic() - began:.0f} s")
    with progress("writing the details"):
        _write_report(folder, figures | {"fits": True, "audit_ok": audit.ok}, text)
        _write_details(folder, program, timeline, audit)
    say(
        f"details    {folder}: timeline.png, trace.json (ui.perfetto.dev), audit.txt, program.txt, "
        "report.json"
    )
    return COMPLETE


def topology_devices(topology: str) -> list[jax.Device]:
    """Returns the devices of a topology, which need not be there, and keeps JAX from occupying
    those that are.
    """
    jax.config.update("jax_platforms", "cpu")
    with as_input_errors(ValueError, ImportError):
        return check.topology_devices(topology)


def memory_figures(
    config: Config, topology: str, mesh: Mapping[str, int], needed: int
) -> dict[str, Any]:
    """Returns the figures of report.json about memory, in bytes per device."""
    chip = accelerator(topology)
    model = config.model
    predicted = None
    if isinstance(chip, Chip):
        predicted = predict(config, chip, mesh).needed
    return {
        "topology": topology,
        "mesh": dict(mesh),
        "form": {
            "remat": model.remat,
            "fsdp_overlap": model.fsdp_overlap,
            "gathered_mib": model.gathered_mib,
        },
        "flags": in_effect(platform_of(topology)),
        "bytes_needed": needed,
        "bytes_predicted": predicted,
        "bytes_available": round(chip.hbm_bytes),
    }


def step_figures(
    config: Config, state: TrainState, program: check.CompiledProgram, t: check.Timeline
) -> dict[str, Any]:
    """Returns the figures of report.json about a step that fits; all sizes are in bytes per
    device.
    """
    model = config.model
    length = config.data.sequence_length
    kinds = program.bytes_by_kind
    params = bytes_on_device(state.params)
    optimizer = bytes_on_device(state.opt_state)
    speed = config.data.batch_size * length / t.seconds
    needed = model_flops_per_token(model, length)
    causal = model_flops_per_token(model, length, causal=True)
    flops = accelerator(program.chip).flops
    peak = len(program.coords) * flops
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "bytes_by_kind": kinds | {"aliased": program.memory["alias_size_in_bytes"]},
        "bytes_by_use": {
            "parameters": params,
            "optimizer state": optimizer,
            "activations and gradients": kinds["temporaries"],
            "batch and outputs": kinds["arguments"] - params - optimizer + kinds["outputs"],
            "code": kinds["code"],
        },
        "estimated_step_seconds": t.seconds,
        "estimated_tokens_per_second": speed,
        "estimated_mfu": needed * speed / peak,
        "estimated_causal_mfu": causal * speed / peak,
        "estimated_hardware_utilization": (t.flops or 0) / (t.seconds * flops),
        "seconds_taken_from": dict(t.slowest.sources),
        "exposed_share": t.exposed / t.seconds,
        "model_flops_per_token": needed,
        "model_flops": FORMULA,
        "basis": t.basis,
        "known_error": t.known_error,
        "notes": list(t.notes),
    }


def render(
    config: Config,
    program: check.CompiledProgram,
    t: check.Timeline,
    audit: check.Audit,
    figures: Mapping[str, Any],
) -> str:
    """Formats the report on a step that fits as text."""
    taken = t.slowest.sources
    text = STEP.format(
        chips=len(program.coords),
        shape=" x ".join(f"{name} {size}" for name, size in figures["mesh"].items()),
        memory=memory_text(config, figures, "fits"),
        uses=", ".join(f"{name} {gib(size)}" for name, size in figures["bytes_by_use"].items()),
        step=time_text(t.seconds),
        guessed=_guessed(t),
        work=t.compute / t.seconds,
        own_memory=t.slowest.memory / t.seconds,
        each=figures["estimated_tokens_per_second"] / len(program.coords),
        teraflops=accelerator(program.chip).flops / 1e12,
        **figures,
    )
    lines = [text]
    if audit.lost_overlap:
        lines.insert(0, f"overlap    lost: {audit.lost_overlap}")
    for part, seconds in Phases(program).waits(t)[:LISTED]:
        if seconds > 1e-3 * t.seconds:
            share = seconds / t.seconds
            lines.append(f"           waits {time_text(seconds)} ({share:.1%}) in {part}")
    shares = [f"{name} {taken[name] / t.seconds:.1%}" for name in SOURCES if name in taken]
    lines += [
        f"           taken from: {', '.join(shares)}",
        f"basis      {t.basis}",
        f"           known error: {t.known_error}",
        *(f"           note: {note}" for note in t.notes),
        *_audit_lines(audit),
    ]
    return "\n".join(lines)


def _guessed(t: check.Timeline) -> str:
    """Says which share of a step is that of kernels that were not simulated; "" for none."""
    share = t.slowest.sources.get("estimate", 0.0) / t.seconds
    if share < 0.001:
        return ""
    return f", {share:.1%} of it from cost estimates of kernels that were not simulated"


def memory_text(config: Config, figures: Mapping[str, Any], verdict: str) -> str:
    sizes = {name: gib(figures[f"bytes_{name}"]) for name in ("needed", "available")}
    predicted = ""
    if figures["bytes_predicted"] is not None:
        predicted = f"; {gib(figures['bytes_predicted'])} were predicted from the sizes alone"
    return MEMORY.format(verdict=verdict, data=config.data, predicted=predicted, **sizes)


def _write_report(folder: Path, figures: Mapping[str, object], text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(text + "\n")
    (folder / "report.json").write_text(json.dumps(figures, indent=2) + "\n")


def _write_details(
    folder: Path, program: check.CompiledProgram, timeline: check.Timeline, audit: check.Audit
) -> None:
    (folder / "audit.txt").write_text(f"{audit}\n\n{timeline}\n")
    (folder / "program.txt").write_text(program.as_text())
    check.save_trace(timeline, folder / "trace.json")
    parts = Phases(program)

    def phase_of(name: str) -> str:
        return parts.part(name) or parts.phase(name)

    draw_timeline(timeline, folder / "timeline.png", phase_of=phase_of)


def _audit_lines(audit: check.Audit) -> list[str]:
    moving = [pair for pair in audit.pairs if pair.communicates]
    verdict = "NOT OK"
    if audit.ok:
        verdict = "ok"
    total = sum(pair.runs * pair.transfer for pair in moving)
    hidden = sum(pair.runs * min(pair.inside, pair.transfer) for pair in moving)
    summary = f"audit      {verdict}: {sum(pair.runs for pair in moving):,} transfers per step"
    if total:
        summary += f", {time_text(total)} on their links, {hidden / total:.0%} hidden behind work"
    lines = [summary]
    codes = dict.fromkeys(finding.code for finding in audit.findings)
    for code in list(codes)[:LISTED]:
        first, *others = [finding for finding in audit.findings if finding.code == code]
        lines += [
            f"           {first.severity} {code} x{1 + len(others)}: {first.message}",
            f"               remedy: {first.remedy}",
        ]
    return lines
