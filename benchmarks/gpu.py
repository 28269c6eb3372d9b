"""Layers on GPUs that are not there: flaxasync beside XLA's automatic sharding, with the flags that
others set.

    python benchmarks/gpu.py                              all rows, in some minutes
    python benchmarks/gpu.py --write docs/gpu.md          also writes the table of that file
    python benchmarks/gpu.py --only "h100:8, MLP"         rows whose description has this text

With fsdp, ours has the flag that train/run.py sets, and so has one automatic form.

Each row is a part of a decoder layer of llama_8b in bfloat16, forward and backward, whose gradient
begins with its own result, so that the backward pass waits for the forward pass as in training.
XLA's compiler for GPUs compiles it, and `fa.check.timeline` predicts it: nothing is run. "Empty"
are transfers without a product beside them, of all transfers between devices.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.plain_transformer import Layout, PlainLayer
from benchmarks.programs import array, split_layer
from benchmarks.step import architecture
from benchmarks.table import command_line, print_table, without_repeats, write_between_markers
from flaxasync import check
from flaxasync.check.hlo import gpu_calls
from models.config import TransformerConfig
from models.layer import DecoderLayer
from train.step.flags import WITH_FSDP

OURS = "flaxasync"
# Of XLA's own collective matmul, that of two streams is refused by the compiler's own verifier.
WINDOWED = {
    "xla_gpu_threshold_for_windowed_einsum_mib": 0,
    "xla_gpu_multi_streamed_windowed_einsum": False,
}
# those that NVIDIA's page on MaxText recommends, as far as this version of XLA has them
MAXTEXT = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**30,
    "xla_gpu_all_gather_combine_threshold_bytes": 2**30,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_enable_while_loop_double_buffering": True,
}
FORMS: dict[str, Mapping[str, Any]] = {
    OURS: {},
    "automatic": {},
    "automatic, windowed einsum": WINDOWED,
    "automatic, MaxText's flags": MAXTEXT,
}
HEADER = ("program", "topology", "form", "predicted ms", "exposed ms", "empty", "temporaries GiB")


@dataclasses.dataclass(frozen=True)
class Case:
    """A part of a layer, or several layers, on a topology."""

    topology: str
    part: str  # "MLP", "attention", or "layer"
    batch: int  # sequences
    sequence: int
    layers: int = 1
    fsdp: int = 1  # devices that share out the weights, beside those of the model axis
    backend: str | None = None  # of flaxasync; None for what it chooses

    def __str__(self) -> str:
        return f"{self.topology}, {self.name}"

    @property
    def name(self) -> str:
        count = ""
        if self.layers > 1:
            count = f"{self.layers} layers, "
        return f"{count}{self.part}, {self.batch} x {self.sequence}"

    @property
    def forms(self) -> Mapping[str, Mapping[str, Any]]:
        """The forms that are compiled, and the flags of each. With fsdp, ours has the flag of
        train/run.py.
        """
        if self.fsdp == 1:
            return FORMS
        return {**FORMS, OURS: WITH_FSDP, "automatic, two at once": WITH_FSDP}


CASES = (
    Case("h100:8", "MLP", 4, 4096),
    Case("h100:8", "attention", 4, 4096),
    Case("h100:8", "layer", 4, 4096),
    Case("h100:8", "layer", 1, 8192),
    Case("h100:8", "layer", 1, 1024),
    Case("h100:2x8", "layer", 8, 4096, layers=4, fsdp=2),
    Case("a100:8", "layer", 4, 4096),
    Case("b200:8", "layer", 4, 4096),
)


class Layers(nnx.Module):
    """A part of a layer, or layers one after another."""

    def __init__(self, case: Case, form: str, config: TransformerConfig, rngs: nnx.Rngs):
        axis = None
        if case.fsdp > 1:
            axis = "fsdp"
        made: list[Any] = []
        for _ in range(case.layers):
            if form == OURS:
                made.append(DecoderLayer(config, fsdp_axis=axis, backend=case.backend, rngs=rngs))
            else:
                layout = Layout(batch=("fsdp",), fsdp=axis, flash=True)
                made.append(PlainLayer(config, layout=layout, rngs=rngs))
        names = {"MLP": "mlp", "attention": "attention"}
        if case.part in names:
            made = [getattr(layer, names[case.part]) for layer in made]
        self.made = nnx.List(made)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.made:
            x = layer(x)
        return x


def mesh_of(case: Case, form: str) -> Mesh:
    size = check.topology_size(case.topology)
    kind = AxisType.Auto
    if form == OURS:
        kind = AxisType.Explicit
    shape = (case.fsdp, size // case.fsdp)
    return check.topology_mesh(case.topology, shape, ("fsdp", "model"), axis_types=(kind, kind))


def compiled(case: Case, form: str) -> check.CompiledProgram:
    """Compiles a case in one of `FORMS`."""
    config = architecture("llama_8b", "flaxasync")
    mesh = mesh_of(case, form)
    with jax.set_mesh(mesh):
        graph, state = split_layer(lambda: Layers(case, form, config, nnx.Rngs(0)), mesh)
        shape = (case.batch, case.sequence, config.width)
        x = array(shape, mesh, P("fsdp", "model", None), jnp.bfloat16)

        def step(state: Any, x: jax.Array) -> tuple[Any, ...]:
            y, backward = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
            return y, *backward(y)

        of_state = jax.tree.map(lambda leaf: leaf.sharding, state)
        jitted = jax.jit(step, out_shardings=(x.sharding, of_state, x.sharding))
        return check.compile_for(case.topology, jitted, state, x, compiler_options=case.forms[form])


def transfers(program: check.CompiledProgram) -> tuple[int, int]:
    """Returns how many transfers between devices have no product beside them, and how many there
    are.
    """
    module = check.parse(program.text)
    products = {
        i.name for i in module.instructions if gpu_calls.product_of(i) or gpu_calls.is_attention(i)
    }
    report = check.audit(program)
    moving = [pair for pair in report.pairs if pair.communicates]
    beside = sum(any(work.instruction in products for work in pair.work) for pair in moving)
    held = sum(finding.code == "synchronous-collective" for finding in report.findings)
    return len(moving) - beside + held, len(moving) + held


def row(case: Case, form: str) -> Sequence[str]:
    try:
        program = compiled(case, form)
    except RuntimeError as error:
        return (
            case.name,
            case.topology,
            form,
            f"refused: {str(error).splitlines()[0][:60]}",
            "",
            "",
            "",
        )
    found = check.timeline(program)
    empty, count = transfers(program)
    return (
        case.name,
        case.topology,
        form,
        f"{found.seconds * 1e3:.2f}",
        f"{found.exposed * 1e3:.2f}",
        f"{empty} of {count}",
        f"{program.bytes_by_kind['temporaries'] / 2**30:.2f}",
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with this text")
    chosen = parser.parse_args()
    rows = []
    for case in CASES:
        for form in case.forms:
            if chosen.only in f"{case}, {form}":
                rows.append(row(case, form))
                print(*rows[-1], flush=True)
    table = print_table(HEADER, without_repeats(rows, columns=2))
    write_between_markers(chosen.write, "gpu", table)


if __name__ == "__main__":
    main()
