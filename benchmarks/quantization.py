"""The MLP of the 8B preset in bfloat16 and in 8 bits, forward and with all gradients, on eight TPUs: estimated.

    python benchmarks/quantization.py --programs DIR --write docs/quantization.md     each takes minutes to compile
    python benchmarks/quantization.py --programs DIR --only v6e

Times are those of `fa.check.timeline` of the compiled programs, with kernels that are played; nothing runs on a TPU.
Gathered rows are kept where `fa.plan` predicts a gain. DIR keeps what was compiled.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

import flaxasync as fa
from benchmarks.programs import compile_once
from benchmarks.step import BATCH, SEQUENCE, architecture, layer_program, mesh_of
from benchmarks.table import write_rows
from flaxasync import check
from flaxasync.ops.trust import trusting

HEADER = ("topology", "products", "backend", "estimated ms", "work ms", "exposed ms")
KEPT = 128 * 2**20  # bytes of gathered rows


@dataclasses.dataclass(frozen=True)
class Case:
    topology: str
    backend: str
    quantization: fa.Quantization | None

    @property
    def products(self) -> str:
        if self.quantization is None:
            return "bfloat16"
        return f"{self.quantization.forward}, {'dx too' if self.quantization.backward else 'gradients in bfloat16'}"


FORWARD, BOTH = fa.Quantization("int8"), fa.Quantization("int8", "int8")
CASES = tuple(
    Case(topology, *form)
    for topology in ("v5e:2x4", "v6e:2x4")
    for form in (("fused", None), ("fused", FORWARD), ("fused", BOTH), ("xla", None), ("xla", FORWARD), ("xla", BOTH))
)


def row(case: Case, folder: pathlib.Path) -> tuple[str, ...]:
    model = architecture("llama_8b", "flaxasync")
    mesh = mesh_of(check.topology_devices(case.topology), "flaxasync", model)

    def make() -> nnx.Module:
        return fa.nn.ParallelMLP(
            model.width, model.mlp_width, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, backend=case.backend,
            quantization=case.quantization, gathered_bytes=KEPT, rngs=nnx.Rngs(0),
        )  # fmt: skip

    with jax.set_mesh(mesh), trusting("predicted"):
        shape = jax.ShapeDtypeStruct((BATCH, SEQUENCE, model.width), jnp.bfloat16)
        fn, arguments = layer_program(make, shape, mesh)
        program = compile_once(folder, f"{case}", case.topology, fn, *arguments)
    timeline = check.timeline(program, kernels="play")
    times = (f"{seconds * 1e3:.2f}" for seconds in (timeline.seconds, timeline.compute, timeline.exposed))
    return case.topology, case.products, case.backend, *times


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write_rows(__doc__, "eight bits", HEADER, CASES, row)
