"""The report of a dry run, as figures and as text."""

import collections
import dataclasses
import os
from typing import Any

from flaxasync.check import Audit, CompiledProgram, Timeline
from flaxasync.check.estimate.timeline import SOURCES
from flaxasync.hardware import Chip
from train.config import Config
from train.dry_run.step_phases import Phases
from train.metrics.model_flops import FORMULA
from train.step.mesh import batch_shards

GIB = 1 << 30
LISTED = 5  # number of causes of waits that the text names, and half the number of findings


@dataclasses.dataclass(frozen=True)
class DryRun:
    """One compiled training step: the step that was requested or, if that does not fit, a smaller one.

    Attributes:
      config: The configuration that was requested.
      tried: The configuration that the program was compiled from.
      smaller: The options in which the two differ; empty if the requested step fits.
      needed: Memory that the requested step needs, in bytes per device.
      topology: Name of the chips, such as "v5e:2x4".
      chip: Data-sheet figures of the chip.
      mesh: Axis names of the mesh and their sizes.
      parameters: Number of parameters of the tried model, over all devices.
      parameter_bytes: Size of the parameters, in bytes per device.
      optimizer_bytes: Size of the optimizer state, in bytes per device.
      tokens: Tokens per step.
      flops_per_token: Model FLOPs per token.
      causal_flops_per_token: The same without the half of attention that the causal mask saves.
      program: The compiled step.
      audit: Audit of the program's transfers.
      timeline: Estimate of the program's time.
      seconds: Time that the dry run itself took, in seconds.
    """

    config: Config
    tried: Config
    smaller: dict[str, Any]
    needed: int
    topology: str
    chip: Chip
    mesh: dict[str, int]
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    tokens: int
    flops_per_token: float
    causal_flops_per_token: float
    program: CompiledProgram
    audit: Audit
    timeline: Timeline
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the step that was requested fits the memory of the chips."""
        return not self.smaller

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.program.coords)

    @property
    def tokens_per_second(self) -> float:
        """Estimated throughput of all devices together, in tokens per second."""
        return self.tokens / self.timeline.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs of a step as a share of what the chips could do in its time."""
        return self.flops_per_token * self.tokens_per_second / (self.devices * self.chip.flops)

    @property
    def causal_mfu(self) -> float:
        """The same without the half of attention that the causal mask saves."""
        return self.mfu * self.causal_flops_per_token / self.flops_per_token

    @property
    def hardware_utilization(self) -> float:
        """Hardware FLOPs utilization: the products of the compiled step, recomputed ones included, likewise."""
        assert self.timeline.flops is not None
        return self.timeline.flops / (self.timeline.seconds * self.chip.flops)

    @property
    def exposed_share(self) -> float:
        """Share of the step in which the slowest device waits for other devices."""
        return self.timeline.exposed / self.timeline.seconds

    def memory(self) -> dict[str, int]:
        """Returns the memory of a device in bytes, by use."""
        kinds = self.program.bytes_by_kind
        batch = max(0, kinds["arguments"] - self.parameter_bytes - self.optimizer_bytes)
        return {
            "parameters": self.parameter_bytes,
            "optimizer state": self.optimizer_bytes,
            "activations and gradients": kinds["temporaries"],
            "batch and outputs": batch + kinds["outputs"],
            "code": kinds["code"],
        }

    def figures(self) -> dict[str, Any]:
        """Returns the figures of report.json; all sizes are in bytes per device."""
        t = self.timeline
        return {
            "topology": self.topology,
            "mesh": self.mesh,
            "fits": self.fits,
            "bytes_needed": self.needed,
            "bytes_available": round(self.chip.hbm_bytes),
            "estimates_are_of": dict(self.smaller),
            "bytes_by_kind": self.program.bytes_by_kind | {"aliased": self.program.memory["alias_size_in_bytes"]},
            "bytes_by_use": self.memory(),
            "parameters": self.parameters,
            "estimated_step_seconds": t.seconds,
            "estimated_tokens_per_second": self.tokens_per_second,
            "estimated_mfu": self.mfu,
            "estimated_causal_mfu": self.causal_mfu,
            "estimated_hardware_utilization": self.hardware_utilization,
            "seconds_taken_from": dict(t.slowest.sources),
            "exposed_share": self.exposed_share,
            "model_flops_per_token": self.flops_per_token,
            "model_flops": FORMULA,
            "basis": t.basis,
            "known_error": t.known_error,
            "notes": list(t.notes),
            "audit_ok": self.audit.ok,
        }


def render(report: DryRun) -> str:
    """Formats the report as text."""
    shape = " x ".join(f"{name} {size}" for name, size in report.mesh.items())
    lines = [
        f"dry run    {report.devices} devices of {report.topology}, as {shape}; {report.parameters:,} parameters; "
        f"compiled and read in {report.seconds:.0f} s, nothing was run",
        *_memory_lines(report),
        *_speed_lines(report),
        *_audit_lines(report.audit),
    ]
    return "\n".join(lines)


def _memory_lines(report: DryRun) -> list[str]:
    kinds = report.program.bytes_by_kind
    lines = [
        f"memory     {'fits' if report.fits else 'does not fit'}: {gib(report.needed)} per device for batch "
        f"{report.config.data.batch_size} x {report.config.data.sequence_length} tokens; "
        f"{gib(report.chip.hbm_bytes)} are available"
    ]
    state = f"parameters {gib(report.parameter_bytes)} and optimizer state {gib(report.optimizer_bytes)}"
    if not report.fits:
        options = " ".join(f"--{name} {value}" for name, value in report.smaller.items())
        lines.append(f"fits       with {options}: {gib(kinds['total'])} per device. All figures below are of that step")
        if batch := _largest_batch(report):
            lines.append(f"           by extrapolation, batches up to --data.batch_size {batch} would fit, too")
    aliased = report.program.memory["alias_size_in_bytes"]
    lines += [
        f"           arguments {gib(kinds['arguments'])} ({state}; {gib(aliased)} of these are donated to the outputs)",
        f"           further outputs {gib(kinds['outputs'])}, temporaries {gib(kinds['temporaries'])} (activations, "
        f"gradients), code {gib(kinds['code'])}",
    ]
    return lines


def _largest_batch(report: DryRun) -> int | None:
    """Extrapolates the largest batch that fits, assuming that only temporaries other than gradients grow with it."""
    if set(report.smaller) != {"data.batch_size"}:
        return None
    fixed = report.program.bytes_by_kind["total"] - report.program.bytes_by_kind["temporaries"] + report.parameter_bytes
    shards = batch_shards(report.mesh) * report.tried.data.microbatches
    sequences = report.tried.data.batch_size // shards
    per_sequence = (report.program.bytes_by_kind["total"] - fixed) / sequences
    return int((report.chip.hbm_bytes - fixed) / per_sequence) * shards if per_sequence > 0 else None


def _speed_lines(report: DryRun) -> list[str]:
    t = report.timeline
    d = t.slowest
    lines = [
        f"step       {time_text(t.seconds)} estimated: work {d.compute / t.seconds:.1%}, waiting for other devices "
        f"{report.exposed_share:.1%}, for its own memory {d.memory / t.seconds:.1%}",
        f"speed      {report.tokens_per_second:,.0f} tokens/s, {report.tokens_per_second / report.devices:,.0f} per "
        f"device; MFU {report.causal_mfu:.1%} of {report.chip.flops / 1e12:g} TFLOP/s (with half of attention, "
        f"as it is causal; {report.mfu:.1%} with all of it)",
        f"           hardware FLOPs utilization {report.hardware_utilization:.1%}: products of the compiled step, "
        "recomputed ones included",
        f"           model FLOPs: {report.flops_per_token:.4g} per token = {FORMULA}",
    ]
    for part, seconds in Phases(report.program).waits(t)[:LISTED]:
        if seconds > 1e-3 * t.seconds:
            lines.append(f"           waits {time_text(seconds)} ({seconds / t.seconds:.1%}) in {part}")
    notes = [f"           note: {note}" for note in t.notes]
    shares = (f"{name} {t.slowest.sources[name] / t.seconds:.1%}" for name in SOURCES if t.slowest.sources.get(name))
    lines.append(f"           taken from: {', '.join(shares)}")
    return [*lines, f"basis      {t.basis}", f"           known error: {t.known_error}", *notes]


def _audit_lines(audit: Audit) -> list[str]:
    moving = [p for p in audit.pairs if p.communicates]
    total = sum(p.runs * p.transfer for p in moving)
    hidden = sum(p.runs * min(p.inside, p.transfer) for p in moving)
    counts = collections.Counter(f.code for f in audit.findings)
    lines = [
        f"audit      {'ok' if audit.ok else 'NOT OK'}: {sum(p.runs for p in moving):,} transfers per step, "
        f"{sum(p.runs * p.bytes for p in moving) / GIB:,.1f} GiB, {time_text(total)} on their links"
        + (f", {hidden / total:.0%} of it hidden behind work" if total else "")
    ]
    for code, count in list(counts.items())[: 2 * LISTED]:
        worst = next(f for f in audit.findings if f.code == code)
        source = f" ({_relative(worst.source)})" if worst.source else ""
        lines.append(f"           {worst.severity} {code} x{count}: {worst.message}{source}")
        lines.append(f"               remedy: {worst.remedy}")
    return lines


def _relative(source: str) -> str:
    """Returns a source location relative to the current directory, if it lies in there."""
    return source.removeprefix(os.getcwd() + os.sep)


def gib(count: float) -> str:
    return f"{count / GIB:,.4g} GiB" if count >= 0.1 * GIB else f"{count / (1 << 20):,.3g} MiB"


def time_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
