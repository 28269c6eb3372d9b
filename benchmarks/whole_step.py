"""The whole training step of the Llama presets: automatic sharding and flaxasync, estimated without
a TPU.

    python benchmarks/whole_step.py --programs DIR --write docs/scaling.md     each step takes minutes to compile
    python benchmarks/whole_step.py --programs DIR --only v6e                  the steps on some chips

docs/scaling.md says what is compared. "automatic" is the program of benchmarks/recipes.py with its
flags. It sends to the host what the recipes send or, where memory is large, keeps the results of
all products. Times and memory are predictions, with kernels that are played. DIR keeps what was
compiled.
"""

import dataclasses
import math
import pathlib
from typing import Literal

import jax

from benchmarks import recipes
from benchmarks.programs import compile_once
from benchmarks.recipes import FLAGS, PROJECTIONS, WITHOUT_COLLECTIVE_MATMUL, Recipe
from benchmarks.table import write_rows
from configs.llama_8b import llama_8b
from configs.llama_70b import llama_70b
from flaxasync import check
from flaxasync.check.estimate.phases import Phases
from flaxasync.check.units import time_text
from flaxasync.ops.trust import trusting
from models.config import Remat
from train.config import Config, replace_options
from train.metrics.output import gib
from train.step.flags import added, flags_of, parse
from train.step.mesh import mesh_over
from train.step.products import model_flops_per_token
from train.step.trainer import Trainer

PRESETS = {"8B": llama_8b, "70B": llama_70b}
OURS = "flaxasync"
AUTOMATIC = "automatic"
HEADER = (
    "model",
    "chips",
    "program",
    "data x fsdp x model",
    "remat",
    "fsdp overlap",
    "tokens a chip",
    "memory",
    "step",
    "MFU",
    "exposed",
    "longest wait",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of ours; see `TransformerConfig` for remat, overlap (fsdp_overlap) and kept
    (gathered_mib).
    """

    topology: str
    mesh: tuple[int, int, int]  # sizes of the axes data, fsdp and model
    sequences: int  # of each chip
    length: int  # of a sequence, in tokens
    remat: Remat = "layer"
    overlap: Literal["xla", "prefetch_pallas"] = "xla"
    kept: int = 0
    model: Literal["8B", "70B"] = "8B"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights and moments
    kind: Literal["int8"] | None = None  # of all products of the decoder layers, gradients too
    flags: str = ""  # beside those of `--xla.flags auto`


# On v5e and v5p libtpu takes the flags of v6e except the limit of scoped vector memory, which is
# that of the chip.
V5P = FLAGS.replace("98304", "49152") + WITHOUT_COLLECTIVE_MATMUL
LEAN = "xla_tpu_scheduler_percent_shared_memory_limit=75"  # a schedule for less memory
CASES: tuple[Case | Recipe, ...] = (
    Case("v6e:4x4", (1, 4, 4), 1, 4096, overlap="prefetch_pallas", kept=128),
    Case("v6e:4x4", (1, 16, 1), 3, 8192, "offload", "prefetch_pallas"),
    recipes.RECIPES[1],
    Case("v6e:2x4", (1, 8, 1), 3, 8192, "offload", "prefetch_pallas"),
    recipes.RECIPES[0],
    Case(
        "v6e:4x8",
        (1, 32, 1),
        2,
        8192,
        "offload_most",
        "prefetch_pallas",
        0,
        "70B",
        "bfloat16",
        flags=LEAN,
    ),
    recipes.RECIPES[4],
    Case("v5p:2x2x2", (1, 8, 1), 2, 8192, remat="cheap"),
    Case("v5p:2x2x2", (1, 8, 1), 2, 8192, remat="cheap", overlap="prefetch_pallas"),
    Recipe(
        "8B", "v5p:2x2x2", math.nan, 2, offloaded=(), saved=(*PROJECTIONS, "gate", "up"), flags=V5P
    ),
    Case("v5e:4x4", (1, 4, 4), 1, 4096, overlap="prefetch_pallas"),
    Case("v5e:4x4", (1, 4, 4), 1, 4096, overlap="prefetch_pallas", kind="int8"),
    Recipe("8B", "v5e:4x4", math.nan, 1, length=4096),
)


def config_of(case: Case) -> Config:
    data, fsdp, model = case.mesh
    options = {
        "mesh.data": data,
        "mesh.fsdp": fsdp,
        "mesh.model": model,
        "model.remat": case.remat,
        "model.fsdp_overlap": case.overlap,
        "model.gathered_mib": case.kept,
        "model.param_dtype": case.dtype,
        "model.quantization": case.kind,
        "model.quantization_backward": case.kind,
        "model.quantization_weights": case.kind,
        "data.batch_size": case.sequences * math.prod(case.mesh),
        "data.sequence_length": case.length,
        "data.microbatches": 1,
    }
    return replace_options(PRESETS[case.model](), options)


def compiled(case: Case, folder: pathlib.Path) -> check.CompiledProgram:
    config = config_of(case)
    mesh = mesh_over(check.topology_devices(case.topology), config.mesh, case.topology)
    with (
        added(parse(case.flags)),
        flags_of(config, case.topology.partition(":")[0]),
        jax.set_mesh(mesh),
        trusting("predicted"),
    ):
        trainer = Trainer(config, mesh)
        arguments = trainer.abstract_state(), *trainer.abstract_batch()
        return compile_once(folder, f"{case}", case.topology, trainer.train_step, *arguments)


def row(case: Case | Recipe, folder: pathlib.Path) -> tuple[str, ...]:
    if isinstance(case, Recipe):
        program, timeline, _ = recipes.predicted(case, folder)
        named = (AUTOMATIC, f"1x{case.chips}x1", "dots" if case.saved else "offload", "xla")
    else:
        program = compiled(case, folder)
        timeline = check.timeline(program, kernels="play")
        overlap = f"{case.overlap}, {case.kept} MiB kept" if case.kept else case.overlap
        named = (
            f"{OURS}, {case.kind}" if case.kind else OURS,
            "x".join(map(str, case.mesh)),
            case.remat,
            overlap,
        )
    seconds = timeline.seconds
    tokens = case.sequences * case.length
    name = "70B" if "70B" in str(case) else "8B"
    flops = tokens * model_flops_per_token(PRESETS[name]().model, case.length)
    mfu = flops / (seconds * check.CHIPS[program.chip].flops)
    waits = Phases(program).waits(timeline)
    return (
        name,
        case.topology,
        *named,
        f"{case.sequences} x {case.length}",
        gib(program.bytes_by_kind["total"]),
        time_text(seconds),
        f"{mfu:.1%}",
        f"{timeline.exposed / seconds:.1%}",
        waits[0][0] if waits else "-",
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write_rows(__doc__, "whole step", HEADER, CASES, row)
