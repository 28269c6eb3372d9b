"""A tensor-parallel MLP, forward and with all gradients, on every backend, predicted without a TPU.

    python benchmarks/tp_mlp.py [--write docs/kernels/layers.md]      on v5e:2x4: half an hour on two cores

The MLP is y = silu(x @ up) @ down in bfloat16. Its input and output are sharded over the sequence,
and its hidden features over the same eight devices. The backend "automatic" is the same formula in
jax.numpy, which XLA partitions with its default options. "Gradients" means one program that
computes sum(y^2) and its gradients with respect to x, up and down.

A * marks a program that had to be compiled with synchronous collectives.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array, play_or_synchronize, split_layer
from benchmarks.table import command_line, print_table, write_between_markers
from flaxasync import hardware
from flaxasync.check import topology_devices, topology_size
from flaxasync.check.player.errors import PlayerError

TOPOLOGY = "v5e:2x4"
VARIANTS = ("automatic", "none", "xla", "pallas", "fused")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of an MLP with x [batch, sequence, model], up [model, hidden] and down [hidden,
    model].
    """

    batch: int = 8
    sequence: int = 2048
    model: int = 8192
    hidden: int = 28672

    def __str__(self) -> str:
        return f"B{self.batch} S{self.sequence} D{self.model} F{self.hidden}"

    def ideal_ms(self, topology: str, *, backward: bool) -> float:
        """Returns the time of all matmuls at the peak of the data sheet: two forward, four
        backward.
        """
        flops = 2 * self.batch * self.sequence * self.model * self.hidden * (6 if backward else 2)
        return flops / topology_size(topology) / hardware.chip(topology).flops * 1e3


LARGER = Shape(sequence=4096)
NARROWER = Shape(model=4096)
ROWS = [(Shape(), variant) for variant in VARIANTS]
ROWS += [(shape, variant) for shape in (LARGER, NARROWER) for variant in ("automatic", "fused")]


def program(
    variant: str, shape: Shape, mesh: Mesh, *, backward: bool
) -> tuple[Callable, Sequence[Any]]:
    """Makes the function of a variant, of the parameters and x, and these without values, for the
    ambient mesh.
    """
    rows = P(None, "model", None)
    x = array((shape.batch, shape.sequence, shape.model), mesh, rows)
    if variant == "automatic":
        state: Any = [
            array((shape.model, shape.hidden), mesh, P(None, "model")),
            array((shape.hidden, shape.model), mesh, P("model", None)),
        ]

        def forward(state: Any, x: jax.Array) -> jax.Array:
            up, down = state
            return jax.lax.with_sharding_constraint(
                jax.nn.silu(x @ up) @ down, NamedSharding(mesh, rows)
            )

    else:

        def make() -> nnx.Module:
            return fa.nn.ParallelMLP(
                shape.model, shape.hidden, gated=False, backend=variant, rngs=nnx.Rngs(0)
            )

        graph, state = split_layer(make, mesh, jnp.bfloat16)

        def forward(state: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graph, state)(x)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return jnp.square(forward(state, x).astype(jnp.float32)).sum()

    shardings = jax.tree.map(lambda v: v.sharding, (state, x))
    if backward:
        out = NamedSharding(mesh, P()), shardings
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), out_shardings=out), (state, x)
    return jax.jit(forward, out_shardings=shardings[1]), (state, x)


def ring(devices: Sequence[Any], variant: str) -> Mesh:
    kind = AxisType.Auto if variant == "automatic" else AxisType.Explicit
    return fa.make_mesh((len(devices),), ("model",), devices=devices, axis_types=(kind,))


def row(variant: str, shape: Shape) -> tuple[str, ...]:
    """Makes a row of the table: for each program its total, the excess over the ideal time, and the
    longest wait.
    """
    cells: list[str] = []
    for backward in (False, True):
        mesh = ring(topology_devices(TOPOLOGY), variant)
        try:
            with jax.set_mesh(mesh):
                fn, arguments = program(variant, shape, mesh, backward=backward)
                result, _, mark = play_or_synchronize(TOPOLOGY, fn, *arguments)
        except PlayerError as error:
            print(
                f"{shape}, {variant}, {'gradients' if backward else 'forward'}: not played: {error}"
            )
            cells += ["-", "-", "-"]
        else:
            total = result.seconds * 1e3
            ideal = shape.ideal_ms(TOPOLOGY, backward=backward)
            wait = max((p.exposed for p in result.slowest.phases), default=0.0) / result.seconds
            cells += [f"{total:.2f}{mark}", f"{total / ideal - 1:+.0%}", f"{wait:.1%}"]
    return (str(shape), variant, *cells)


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    rows = [row(variant, shape) for shape, variant in ROWS]
    columns = "ms", "above ideal", "longest wait"
    header = [f"{which} {column}" for which in ("forward", "gradients") for column in columns]
    write_between_markers(chosen.write, "tp mlp", print_table(("MLP", "backend", *header), rows))


if __name__ == "__main__":
    main()
