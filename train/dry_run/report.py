"""The report of a dry run, as figures and as text."""

import collections
import dataclasses
from typing import Any

import jax
import numpy as np

from flaxasync import check
from flaxasync.check.estimate.phases import Phases
from flaxasync.check.estimate.timeline import SOURCES
from train.config import Config
from train.step.products import FORMULA, model_flops_per_token
from train.step.trainer import TrainState

GIB = 1 << 30
LISTED = 5  # number of causes of waits, and of kinds of findings, that the text names


@dataclasses.dataclass(frozen=True)
class DryRun:
    """One compiled training step: the step that was requested or, if that does not fit, a smaller one."""

    config: Config  # as requested
    tried: Config  # what the program was compiled from
    smaller: dict[str, Any]  # the options in which the two differ; empty if the requested step fits
    needed: int  # memory that the requested step needs, in bytes per device
    topology: str
    mesh: dict[str, int]
    state: TrainState  # abstract, of the tried configuration
    program: check.CompiledProgram
    audit: check.Audit
    timeline: check.Timeline

    def figures(self) -> dict[str, Any]:
        """Returns the figures of report.json; all sizes are in bytes per device."""
        t, program, model = self.timeline, self.program, self.tried.model
        chip, length = check.CHIPS[program.chip], self.tried.data.sequence_length
        kinds = program.bytes_by_kind
        params, optimizer = bytes_per_device(self.state.params), bytes_per_device(self.state.opt_state)
        tokens_per_second = self.tried.data.batch_size * length / t.seconds
        peak = len(program.coords) * chip.flops
        return {
            "topology": self.topology,
            "mesh": self.mesh,
            "fits": not self.smaller,
            "bytes_needed": self.needed,
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
            "estimated_causal_mfu": model_flops_per_token(model, length, causal=True) * tokens_per_second / peak,
            "estimated_hardware_utilization": (t.flops or 0) / (t.seconds * chip.flops),
            "seconds_taken_from": dict(t.slowest.sources),
            "exposed_share": t.exposed / t.seconds,
            "model_flops_per_token": model_flops_per_token(model, length),
            "model_flops": FORMULA,
            "basis": t.basis,
            "known_error": t.known_error,
            "notes": list(t.notes),
            "audit_ok": self.audit.ok,
        }

    def render(self) -> str:
        """Formats the report as text."""
        f, t, data = self.figures(), self.timeline, self.config.data
        sizes = {name: gib(count) for name, count in (f["bytes_by_kind"] | f["bytes_by_use"]).items()}
        chips, chip = len(self.program.coords), check.CHIPS[self.program.chip]
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        names = ("tokens_per_second", "mfu", "causal_mfu", "hardware_utilization")
        speed, mfu, causal, hardware = (f[f"estimated_{name}"] for name in names)
        lines = [
            f"dry run    {chips} devices of {self.topology}, as {shape}; {f['parameters']:,} parameters",
            f"memory     {'fits' if f['fits'] else 'does not fit'}: {gib(self.needed)} per device for batch "
            f"{data.batch_size} x {data.sequence_length} tokens; {gib(chip.hbm_bytes)} are available",
        ]
        if self.smaller:
            options = " ".join(f"--{name} {value}" for name, value in self.smaller.items())
            lines.append(f"fits       with {options}: {sizes['total']} per device. All figures below are of that step")
        lines += [
            f"           arguments {sizes['arguments']} (parameters {sizes['parameters']} and optimizer state "
            f"{sizes['optimizer state']}; {sizes['aliased']} of these are donated to the outputs)",
            f"           further outputs {sizes['outputs']}, temporaries {sizes['temporaries']} (activations, "
            f"gradients), code {sizes['code']}",
            f"step       {time_text(t.seconds)} estimated: work {t.compute / t.seconds:.1%}, waiting for other devices "
            f"{f['exposed_share']:.1%}, for its own memory {t.slowest.memory / t.seconds:.1%}; nothing was run",
            f"speed      {speed:,.0f} tokens/s, {speed / chips:,.0f} per device; MFU {causal:.1%} of "
            f"{chip.flops / 1e12:g} TFLOP/s (with half of attention, as it is causal; {mfu:.1%} with all of it)",
            f"           hardware FLOPs utilization {hardware:.1%} of the compiled step, recomputed products included",
            f"           model FLOPs: {f['model_flops_per_token']:.4g} per token = {FORMULA}",
        ]
        for part, seconds in Phases(self.program).waits(t)[:LISTED]:
            if seconds > 1e-3 * t.seconds:
                lines.append(f"           waits {time_text(seconds)} ({seconds / t.seconds:.1%}) in {part}")
        shares = [f"{name} {t.slowest.sources[name] / t.seconds:.1%}" for name in SOURCES if name in t.slowest.sources]
        lines += [
            f"           taken from: {', '.join(shares)}",
            f"basis      {t.basis}",
            f"           known error: {t.known_error}",
            *(f"           note: {note}" for note in t.notes),
            *_audit_lines(self.audit),
        ]
        return "\n".join(lines)


def _audit_lines(audit: check.Audit) -> list[str]:
    moving = [pair for pair in audit.pairs if pair.communicates]
    total = sum(pair.runs * pair.transfer for pair in moving)
    hidden = sum(pair.runs * min(pair.inside, pair.transfer) for pair in moving)
    lines = [
        f"audit      {'ok' if audit.ok else 'NOT OK'}: {sum(pair.runs for pair in moving):,} transfers per step, "
        f"{gib(sum(pair.runs * pair.bytes for pair in moving))}, {time_text(total)} on their links"
        + (f", {hidden / total:.0%} of it hidden behind work" if total else "")
    ]
    counts = collections.Counter(finding.code for finding in audit.findings)
    worst = {finding.code: finding for finding in reversed(audit.findings)}  # the first of each code
    for code, count in list(counts.items())[:LISTED]:
        lines.append(f"           {worst[code].severity} {code} x{count}: {worst[code].message}")
        lines.append(f"               remedy: {worst[code].remedy}")
    return lines


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree occupy on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def gib(count: float) -> str:
    return f"{count / GIB:,.4g} GiB" if count >= 0.1 * GIB else f"{count / (1 << 20):,.3g} MiB"


def time_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
