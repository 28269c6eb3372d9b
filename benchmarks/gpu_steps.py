"""Our training step of models that others measured on H100, on their mesh and batch, predicted
without a GPU.

    python benchmarks/gpu_steps.py --programs DIR --write docs/gpu.md   takes ten minutes
    python benchmarks/gpu_steps.py --programs DIR --only "llama 7B"

The steps are those of `train/run.py --dry-run`, in the form that it chooses. DIR keeps its reports;
delete one to make it again. The measured programs are of other frameworks, and their GPUs have
other limits of power: the rows of torchtitan are from H100 of 500 W with memory of 2.4 TB/s.
"""

import dataclasses
import math
import pathlib

import jax

from benchmarks.dry_runs import kept_report
from benchmarks.table import write_rows
from flaxasync.hardware import shape_of_gpus
from train.metrics.output import gib

HEADER = (
    "model",
    "GPUs",
    "fsdp x model",
    "tokens of a GPU",
    "measured by",
    "measured s",
    "flaxasync, predicted s",
    "form",
    "memory",
    "exposed",
    "MFU",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that was measured."""

    name: str
    topology: str
    model: int  # devices of the model axis; the others share out the weights
    batch: int  # sequences of all GPUs
    sequence: int
    seconds: float
    source: str
    changes: tuple[tuple[str, int], ...] = ()  # of the preset llama_8b

    @property
    def gpus(self) -> int:
        """The GPUs of all hosts."""
        return math.prod(shape_of_gpus(self.topology) or ())


def of_rate(tokens_per_second: float, batch: int, sequence: int, gpus: int) -> float:
    """Returns the seconds of a step from the rate of each GPU."""
    return batch * sequence / gpus / tokens_per_second


# NVIDIA JAX-Toolbox, docs/frameworks/maxtext/README.md; torchtitan, benchmarks/
# llama3_h100_202412_torchtitan.md (FSDP and torch.compile) and
# asyncTP_llama3_h100_2025-06_torchtitan.md (asynchronous TP in bfloat16).
STEPS = (
    Step(
        "llama 7B",
        "h100:8",
        1,
        16,
        4096,
        0.721,
        "MaxText, NVIDIA",
        (("model.mlp_width", 11008), ("model.kv_heads", 32), ("model.vocab_size", 32000)),
    ),
    Step("llama 8B", "h100:8", 1, 16, 8192, of_rate(6667, 16, 8192, 8), "torchtitan"),
    Step(
        "llama 8B",
        "h100:8x8",
        8,
        96,
        8192,
        of_rate(4809.4, 96, 8192, 64),
        "torchtitan, asynchronous TP",
    ),
)


def options_of(step: Step) -> dict[str, int]:
    """Returns what the run of a step has in place of the options of llama_8b."""
    return {
        "mesh.data": 1,
        "mesh.fsdp": step.gpus // step.model,
        "mesh.model": step.model,
        "data.batch_size": step.batch,
        "data.sequence_length": step.sequence,
        **dict(step.changes),
    }


def row(step: Step, programs: pathlib.Path) -> tuple[str, ...]:
    report = kept_report(programs, step.name, step.topology, options_of(step))
    form = report["form"]
    return (
        step.name,
        step.topology,
        f"{step.gpus // step.model} x {step.model}",
        f"{step.batch * step.sequence // step.gpus:,}",
        step.source,
        f"{step.seconds:.3f}",
        f"{report['estimated_step_seconds']:.3f}",
        f"{form['remat']}, {form['fsdp_overlap']}",
        gib(report["bytes_needed"]),
        f"{report['exposed_share']:.1%}",
        f"{report['estimated_causal_mfu']:.1%}",
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write_rows(__doc__, "gpu steps", HEADER, STEPS, row)
