"""A tensor-parallel MLP as a jitted NNX layer, simulated with every backend, and XLA's own estimates beside it.

    python benchmarks/player_layers.py                        prints both tables; no TPU
    python benchmarks/player_layers.py --write docs/player.md also puts them between the markers there

The MLP has batch 8, sequence 2048, width 8192 and hidden width 28672 in bf16. It runs forward, with activations sharded
over the sequence before and after. "automatic" is the same MLP in jnp, left to XLA. Nothing here ran on a TPU: every
time is a prediction, and no measurement of these programs is known.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.table import print_table, write_between_markers
from flaxasync.check import CompiledProgram, compile_for, parse, topology_mesh, topology_size
from flaxasync.check.player import Result, play_dump, played_chip
from flaxasync.check.player.result import Phase

BATCH, SEQUENCE, MODEL, HIDDEN = 8, 2048, 8192, 28672
BACKENDS = ("none", "xla", "pallas")
TOPOLOGIES = ("v5e:2x2", "v5e:2x4")
WINDOWED = ("v5e:2x4", "v6e:2x4")  # the topologies on which "automatic" is simulated
KINDS = {  # the kinds of fusions that XLA writes itself
    "matmul": "matmul fusions, matrix unit busy for 90 % or more",
    "passes": "passes over HBM",
    "within VMEM": "passes within VMEM",
}


@dataclasses.dataclass(frozen=True)
class Estimated:
    """A simulated fusion, and the compiler's own estimate of it, in seconds for all of its executions."""

    phase: Phase
    estimate: float

    @property
    def ratio(self) -> float:
        return self.phase.seconds / self.estimate

    @property
    def kind(self) -> str:
        """One of KINDS; "" for a small matmul, or one that waits for HBM."""
        if self.phase.matrix_busy:
            return "matmul" if self.phase.matrix_busy > 0.9 * self.phase.seconds else ""
        return "passes" if any("hbm" in kind for kind in self.phase.bytes) else "within VMEM"


def play_layer(
    topology: str, make: Callable[[], nnx.Module], shape: tuple[int, int, int], *, backward: bool = False
) -> tuple[Result, CompiledProgram]:
    """Simulates a jitted NNX layer on a ring of all devices of a topology.

    Args:
      topology: The chip and its grid: "v5e:2x4", ...
      make: Makes the layer, for the axis "model".
      shape: The shape of its input, [batch, rows, features], of which the rows are sharded.
      backward: Whether to compute the gradients with respect to parameters and input, instead of the output.

    Returns:
      The result, and the compiled program.
    """
    mesh = topology_mesh(topology, (topology_size(topology),), ("model",), axis_types=(AxisType.Explicit,))

    def abstract(value: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def loss(state: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.square(forward(state, x).astype(jnp.float32)).sum()

    with jax.set_mesh(mesh):
        graph, state = nnx.split(nnx.eval_shape(make))
        state = jax.tree.map(abstract, state, nnx.get_partition_spec(state))
        x = abstract(jax.ShapeDtypeStruct(shape, jnp.bfloat16), P(None, "model", None))

        def forward(state: nnx.State, x: jax.Array) -> jax.Array:
            return nnx.merge(graph, state)(x)

        return play_program(topology, jax.jit(jax.grad(loss, argnums=(0, 1)) if backward else forward), state, x)


def play_automatic(topology: str) -> tuple[Result, CompiledProgram]:
    """Simulates the MLP in jnp as XLA partitions it, which makes windowed einsums of large matmuls."""
    mesh = topology_mesh(topology, (topology_size(topology),), ("model",))
    shapes = {(BATCH, SEQUENCE, MODEL): P(None, "model", None), (MODEL, HIDDEN): P(None, "model"),
              (HIDDEN, MODEL): P("model", None)}  # fmt: skip
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in shapes.items()]
    rows = NamedSharding(mesh, P(None, "model", None))
    return play_program(topology, jax.jit(lambda x, up, down: jax.nn.silu(x @ up) @ down, out_shardings=rows), *arrays)


def estimated(result: Result, program: CompiledProgram) -> list[Estimated]:
    """Returns the fusions of the slowest device that the compiler has estimated, in the order in which they ran."""
    clock = played_chip(result.topology).clock
    cycles = {
        i.name: i.estimated_cycles
        for computation in parse(program.text).computations.values()
        for i in computation.instructions
        if i.opcode == "fusion" and i.estimated_cycles
    }
    return [Estimated(p, p.runs * cycles[p.name] / clock) for p in result.slowest.phases if p.name in cycles]


def play_program(
    topology: str, fn: Callable, *arguments: Any, compiler_options: Mapping[str, Any] | None = None
) -> tuple[Result, CompiledProgram]:
    """Simulates a jitted function. Returns the result, and the compiled program."""
    with tempfile.TemporaryDirectory(prefix="flaxasync-") as folder:
        program = compile_for(topology, fn, *arguments, keep_dumps=folder, compiler_options=compiler_options)
        return play_dump(folder, topology=topology, coords=program.coords), program


def main() -> None:
    """Prints the tables; writes them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="put the tables between the markers of this file")
    chosen = parser.parse_args()
    results: dict[tuple[str, str], tuple[Result, CompiledProgram]] = {}
    for topology in TOPOLOGIES:
        for backend in BACKENDS:

            def make(backend: str = backend) -> nnx.Module:
                return fa.nn.ParallelMLP(MODEL, HIDDEN, gated=False, backend=backend, rngs=nnx.Rngs(0))

            results[topology, f'backend="{backend}"'] = play_layer(topology, make, (BATCH, SEQUENCE, MODEL))
    results |= {(topology, "automatic"): play_automatic(topology) for topology in WINDOWED}
    rows = []
    for (topology, name), (result, _) in results.items():
        analytic = sum(p.analytic for p in result.slowest.phases)
        rows.append(
            (topology, name, f"{result.seconds * 1e3:.2f}", f"{result.exposed * 1e3:.2f}",
             f"{result.share_of_peak:.0%}", f"ring model ({analytic})" if analytic else "bundles")
        )  # fmt: skip
    layers = print_table(("topology", "MLP", "simulated ms", "exposed ms", "of peak", "collectives"), rows)
    print()
    found = [e for (topology, _), one in results.items() if topology.startswith("v5e") for e in estimated(*one)]
    rows = []
    for kind, label in KINDS.items():
        ratios = sorted(e.ratio for e in found if e.kind == kind)
        quarters = [f"{ratios[round(share * (len(ratios) - 1))]:.2f}" for share in (0, 0.25, 0.5, 0.75, 1)]
        rows.append((label, str(len(ratios)), *quarters))
    header = ("what XLA wrote", "how many", "least", "a quarter below", "median", "a quarter above", "most")
    estimates = print_table(header, rows)
    if chosen.write:
        write_between_markers(chosen.write, "player layers", layers)
        write_between_markers(chosen.write, "player estimates", estimates)


if __name__ == "__main__":
    main()
