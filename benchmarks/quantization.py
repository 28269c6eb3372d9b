"""The MLP and the whole decoder layer of the 8B preset in bfloat16 and in 8 bits, on eight TPUs:
estimated.

    python benchmarks/quantization.py --programs DIR --write docs/quantization.md     each takes minutes to compile
    python benchmarks/quantization.py --programs DIR --only v6e

Both are forward and with all gradients. Times are those of `fa.check.timeline` of the compiled
programs, with kernels that are played; nothing runs on a TPU. Gathered rows are kept where
`fa.plan` predicts a gain. The ops of the layer choose their backends. DIR keeps what was compiled.
"""

import dataclasses
import itertools
import pathlib
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

import flaxasync as fa
from benchmarks.programs import compile_once
from benchmarks.step import BATCH, KEPT, SEQUENCE, architecture, layer_program, mesh_of
from benchmarks.table import write_rows
from flaxasync import check
from flaxasync.ops.trust import trusting
from models.layer import DecoderLayer

HEADER = ("topology", "part", "products", "backend", "estimated ms", "work ms", "exposed ms")
type Kind = Literal["int8"] | None
PRODUCTS: dict[str, tuple[Kind, Kind, Kind]] = {
    "bfloat16": (None, None, None),
    "int8": ("int8", None, None),
    "int8, dx too": ("int8", "int8", None),
    "int8, dx and dw too": ("int8", "int8", "int8"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    topology: str
    part: str  # "MLP" or "layer"
    products: str
    backend: str | None


CASES = tuple(
    Case(topology, *form)
    for topology in ("v5e:2x4", "v6e:2x4")
    for form in (
        *itertools.product(["MLP"], PRODUCTS, ["fused", "xla"]),
        *itertools.product(["layer"], PRODUCTS, [None]),
    )
)


def row(case: Case, folder: pathlib.Path) -> tuple[str, ...]:
    kind, backward, weights = PRODUCTS[case.products]
    model = dataclasses.replace(
        architecture("llama_8b", KEPT),
        quantization=kind,
        quantization_backward=backward,
        quantization_weights=weights,
    )
    mesh = mesh_of(check.topology_devices(case.topology), KEPT, model)

    def make() -> nnx.Module:
        if case.part == "layer":
            return DecoderLayer(model, backend=case.backend, rngs=nnx.Rngs(0))
        return fa.nn.ParallelMLP(
            model.width,
            model.mlp_width,
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
            backend=case.backend,
            quantization=kind and fa.Quantization(kind, backward, weights=weights),
            gathered_bytes=model.gathered_bytes,
            rngs=nnx.Rngs(0),
        )

    with jax.set_mesh(mesh), trusting("predicted"):
        shape = jax.ShapeDtypeStruct((BATCH, SEQUENCE, model.width), jnp.bfloat16)
        fn, arguments = layer_program(make, shape, mesh)
        program = compile_once(folder, f"{case}", case.topology, fn, *arguments)
    timeline = check.timeline(program, kernels="play")
    times = (
        f"{seconds * 1e3:.2f}" for seconds in (timeline.seconds, timeline.compute, timeline.exposed)
    )
    return case.topology, case.part, case.products, case.backend or "(none named)", *times


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write_rows(__doc__, "eight bits", HEADER, CASES, row)
