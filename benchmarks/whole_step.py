"""The whole training step of the 8B preset: automatic sharding and flaxasync, estimated without a TPU.

    python benchmarks/whole_step.py --programs DIR                      all steps; each takes minutes to compile
    python benchmarks/whole_step.py --programs DIR --only v6e --limit 1 compiles one more of v6e, and prints what it has
    python benchmarks/whole_step.py --programs DIR --limit 0 --write docs/scaling.md

docs/scaling.md says what is compared. "automatic" is the decoder of benchmarks/plain_transformer.py, which has no
policy of rematerialization that is like "cheap". FLAGS has the sets of XLA's flags that are tried.

Times and memory are predictions: those of `fa.check.timeline` and of libtpu for the compiled step. Every distinct
Pallas kernel of a step, ours and that of attention in both programs, is played once, alone; with --kernels estimate it
takes what its own cost estimate says. Nothing has run on a TPU. DIR keeps what was compiled: nothing in it is compiled
again with the same configuration, JAX, libtpu and sources of the package.
"""

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import pathlib
import pickle
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float, Int

from benchmarks.plain_transformer import Layout, PlainTransformer
from benchmarks.programs import COMPILE_SECONDS, array
from benchmarks.table import command_line, print_table, write_between_markers
from configs.llama_8b import llama_8b
from flaxasync import check
from flaxasync.check.estimate.phases import Phases
from flaxasync.ops.trust import trusting
from models.config import Remat
from train.config import Config
from train.metrics.output import gib, time_text
from train.step.mesh import FSDP, mesh_over
from train.step.products import model_flops_per_token
from train.step.trainer import Trainer, TrainState

AUTOMATIC, OURS = "automatic", "flaxasync"
BATCH = 16
SEQUENCE = {"v5e": 4096, "v6e": 4096, "v5p": 8192}
WINDOWED = {  # XLA's own collective matmuls
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "0",
    "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
    "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
}
ASYNCHRONOUS = {  # libtpu refuses this fusion on v6e: it supports it on v5e alone
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}
FLAGS: dict[str, dict[str, str]] = {"": {}, "windowed": WINDOWED, "asynchronous": ASYNCHRONOUS}
ROOT = pathlib.Path(__file__).resolve().parents[1]
OUR_SOURCES = ("flaxasync/kernels", "flaxasync/nn", "flaxasync/ops", "flaxasync/transport", "models")
HEADER = ("chips", "program", "data x fsdp x model", "remat", "fsdp overlap", "flags", "memory", "step", "MFU",
          "exposed", "longest wait")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One step to compile; see `TransformerConfig` for remat, overlap (fsdp_overlap) and kept (gathered_mib)."""

    topology: str
    program: str  # AUTOMATIC or OURS
    mesh: tuple[int, int, int]  # sizes of the axes data, fsdp and model
    remat: Remat = "layer"
    flags: str = ""  # a key of FLAGS
    overlap: Literal["xla", "prefetch_pallas"] = "xla"
    kept: int = 0


CASES = (
    Case("v6e:4x4", OURS, (1, 4, 4)),
    Case("v6e:4x4", OURS, (1, 4, 4), overlap="prefetch_pallas"),
    Case("v6e:4x4", OURS, (1, 4, 4), overlap="prefetch_pallas", kept=128),
    Case("v6e:4x4", AUTOMATIC, (1, 16, 1)),
    Case("v6e:4x4", AUTOMATIC, (1, 16, 1), remat="dots"),
    Case("v6e:4x4", AUTOMATIC, (1, 4, 4)),
    Case("v5p:2x2x2", OURS, (1, 8, 1), remat="cheap"),
    Case("v5p:2x2x2", OURS, (1, 8, 1), remat="cheap", overlap="prefetch_pallas"),
    Case("v5p:2x2x2", AUTOMATIC, (1, 8, 1)),
    Case("v5p:2x2x2", AUTOMATIC, (1, 8, 1), remat="dots"),
    Case("v5e:4x4", OURS, (1, 4, 4), overlap="prefetch_pallas"),
    Case("v5e:4x4", AUTOMATIC, (1, 16, 1)),
    Case("v5e:4x4", AUTOMATIC, (1, 4, 4)),
    Case("v5e:4x4", AUTOMATIC, (1, 4, 4), flags="windowed"),
    Case("v5e:4x4", AUTOMATIC, (1, 16, 1), flags="asynchronous"),
)


class AutomaticTransformer(PlainTransformer):
    """The plain decoder with a loss whose logits stay split over the vocabulary."""

    def loss(self, tokens: Int[Array, "B L"], targets: Int[Array, "B L"]) -> Float[Array, ""]:
        """Returns the mean cross-entropy of the targets; it picks their logits without an index, which XLA gathers."""
        logits = self(tokens).astype(jnp.float32)
        vocabulary = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
        picked = jnp.sum(jnp.where(vocabulary == targets[..., None], logits, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


class AutomaticTrainer(Trainer):
    """The training step of a run with the plain decoder, on a mesh of Auto axes."""

    def _build(self, key: jax.Array) -> Any:
        fsdp = FSDP if self._mesh.shape.get(FSDP, 1) > 1 else None
        layout = Layout(("data", FSDP) if FSDP in self._mesh.shape else ("data",), fsdp, flash=True)
        return AutomaticTransformer(self._config.model, layout=layout, rngs=nnx.Rngs(params=key))

    def abstract_state(self) -> TrainState:
        """Returns the state with the shardings that annotate the parameters; moments are sharded as these are."""
        model = nnx.eval_shape(lambda: self._build(jax.random.key(0)))
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.split(model)[1]))
        by_name = {jax.tree_util.keystr(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}

        def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            name = jax.tree_util.keystr(path)
            spec = next((spec for parameter, spec in by_name.items() if name.endswith(parameter)), jax.P())
            return array(leaf.shape, self._mesh, spec, leaf.dtype)

        return jax.tree_util.tree_map_with_path(place, self._jitted_init.eval_shape(self._config.seed))


def config_of(case: Case) -> Config:
    config = llama_8b()
    data, fsdp, model = case.mesh
    length = SEQUENCE[case.topology.partition(":")[0]]
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, data=data, fsdp=fsdp, model=model),
        model=dataclasses.replace(config.model, remat=case.remat, fsdp_overlap=case.overlap, gathered_mib=case.kept),
        data=dataclasses.replace(config.data, batch_size=BATCH, sequence_length=length, microbatches=1),
    )


def mesh_of(program: str, config: Config, devices: Sequence[Any], kind: str) -> Mesh:
    mesh = mesh_over(devices, config.mesh, kind)
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return mesh if program == OURS else Mesh(mesh.devices, mesh.axis_names, axis_types=auto)


def compiled(case: Case, file: pathlib.Path) -> check.CompiledProgram | dict[str, Any]:
    """Compiles a step, or reads it from a file; returns the program, or the memory that it needs and does not have."""
    if file.exists():
        with gzip.open(file, "rb") as stream:
            return pickle.load(stream)
    config = config_of(case)
    mesh = mesh_of(case.program, config, check.topology_devices(case.topology), case.topology)
    found: check.CompiledProgram | dict[str, Any]
    with jax.set_mesh(mesh), trusting("predicted"):
        trainer = (Trainer if case.program == OURS else AutomaticTrainer)(config, mesh)
        state, batch = trainer.abstract_state(), trainer.abstract_batch()
        options = {**check.HLO_ONLY, **FLAGS[case.flags]}
        try:
            found = check.compile_for(
                case.topology, trainer.train_step, state, *batch, timeout=COMPILE_SECONDS, compiler_options=options
            )
        except check.HbmError as error:
            found = {"memory": error.needed}
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wb") as stream:
        pickle.dump(found, stream)
    return found


def estimated(case: Case, program: check.CompiledProgram, kernels: Literal["play"] | None) -> dict[str, Any]:
    """Returns the memory of a compiled step and the estimate of its time."""
    config, timeline = config_of(case), check.timeline(program, kernels=kernels)
    tokens = config.data.batch_size * config.data.sequence_length
    flops = tokens * model_flops_per_token(config.model, config.data.sequence_length)
    return {
        "memory": program.bytes_by_kind["total"],
        "seconds": timeline.seconds,
        "exposed": timeline.exposed,
        "mfu": flops / (timeline.seconds * len(program.coords) * check.CHIPS[program.chip].flops),
        "waits": Phases(program).waits(timeline)[:8],
    }


def row(case: Case, found: dict[str, Any]) -> tuple[str, ...]:
    overlap = f"{case.overlap}, {case.kept} MiB kept" if case.kept else case.overlap
    mesh = "x".join(map(str, case.mesh))
    named = (case.topology, case.program, mesh, case.remat, overlap, case.flags or "-")
    if "seconds" not in found:
        return (*named, f"{gib(found['memory'])} (too much)", "-", "-", "-", "-")
    longest = found["waits"][0][0] if found["waits"] else "-"
    exposed = f"{found['exposed'] / found['seconds']:.1%}"
    return (*named, gib(found["memory"]), time_text(found["seconds"]), f"{found['mfu']:.1%}", exposed, longest)


def file_of(case: Case, folder: pathlib.Path) -> pathlib.Path:
    """Returns the file of a program: by its case, its configuration and flags, the compiler, and our own sources."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
    content = [dataclasses.asdict(config_of(case)), FLAGS[case.flags], versions]
    if case.program == OURS:
        sources = (file for folder in OUR_SOURCES for file in sorted(ROOT.joinpath(folder).rglob("*.py")))
        content.append(hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest())
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    named = re.sub(r"[^\w.]+", "-", " ".join(map(str, dataclasses.astuple(case))))
    return folder / f"{named}-{digest}.pickle.gz"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--programs", type=pathlib.Path, required=True, metavar="DIR", help="folder of compiled steps")
    parser.add_argument("--only", default="", metavar="TEXT", help="only steps whose file has a name with this text")
    parser.add_argument("--limit", type=int, default=len(CASES), metavar="N", help="compile N steps at most")
    parser.add_argument("--kernels", choices=("play", "estimate"), default="play", help="how kernels are timed")
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for case in CASES:
        file = file_of(case, chosen.programs)
        if chosen.only not in file.name or not (file.exists() or chosen.limit > 0):
            continue
        chosen.limit -= not file.exists()
        found = compiled(case, file)
        if isinstance(found, check.CompiledProgram):
            found = estimated(case, found, "play" if chosen.kernels == "play" else None)
        rows.append(row(case, found))
        print(*rows[-1], flush=True)
    write_between_markers(chosen.write, "whole step", print_table(HEADER, rows))


if __name__ == "__main__":
    main()
