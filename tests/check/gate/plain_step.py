"""A training step of plain Flax NNX, which uses nothing of flaxasync, and one planted regression of each kind.

The layers are scanned. Their kernels are sharded over both axes of a 2 x 4 mesh, so each layer gathers them over "data"
(fully sharded) and sums its result over "model" (tensor parallel). Each regression is one line of `Block`, which ends
with a comment that has its name; `line_of` finds the line.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import HLO_ONLY, CompiledProgram, compile_for, topology_mesh

LAYERS, ROWS, WIDTH, HIDDEN = 4, 2048, 1024, 4096
TOPOLOGY = "v5e:2x4"


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)


class Block(nnx.Module):
    """A residual MLP with a gate."""

    def __init__(self, plant: str, rngs: nnx.Rngs):
        self.plant = plant
        self.up = linear(WIDTH, HIDDEN, rngs)
        self.gate = linear(WIDTH, HIDDEN, rngs)
        self.down = linear(HIDDEN, WIDTH, rngs)

    def __call__(self, carry):
        x, before = carry
        if self.plant == "gather":
            rows = P("data", None)
            hidden = lax.with_sharding_constraint(nnx.gelu(self.gate(x)) * self.up(x), rows)  # planted: gather
        else:
            hidden = nnx.gelu(self.gate(x)) * self.up(x)
        kernel = self.down.kernel[...]
        if self.plant == "callback":
            jax.debug.print("{}", hidden[0, 0])  # planted: callback
        if self.plant == "overlap":
            hidden, kernel = lax.optimization_barrier((hidden, kernel))  # planted: overlap
        if self.plant == "dtype":
            out = jnp.dot(hidden, kernel, preferred_element_type=jnp.float32).astype(x.dtype)  # planted: dtype
        else:
            out = jnp.dot(hidden, kernel)
        if self.plant == "copy":
            return x + out + before, x  # planted: copy
        return x + out, before


class Renamed(nnx.Module):
    """The same with other names of variables and parameters, and with independent operations in another order."""

    def __init__(self, plant: str, rngs: nnx.Rngs):
        self.narrow = linear(HIDDEN, WIDTH, rngs)
        self.side = linear(WIDTH, HIDDEN, rngs)
        self.wide = linear(WIDTH, HIDDEN, rngs)

    def __call__(self, state):
        rows, unused = state
        weights = self.narrow.kernel[...]
        product = self.wide(rows)
        activation = nnx.gelu(self.side(rows))
        inner = product * activation
        return jnp.dot(inner, weights) + rows, unused


class Model(nnx.Module):
    def __init__(self, plant: str, rngs: nnx.Rngs):
        block = Renamed if plant == "renamed" else Block
        self.blocks = nnx.vmap(functools.partial(block, plant))(rngs.split(LAYERS))

    def __call__(self, x):
        layers = nnx.scan(lambda carry, block: block(carry), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return layers((x, jnp.zeros_like(x)), self.blocks)[0]


def step(graph, state, x, y):
    def loss(state):
        return jnp.mean((nnx.merge(graph, state)(x) - y).astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: (p - 0.01 * g).astype(p.dtype), state, gradient), value


def compiled(plant: str = "", fn=step) -> CompiledProgram:
    """Returns the step, compiled for a TPU, with one of the regressions if it is named."""
    mesh = topology_mesh(TOPOLOGY, (2, 4), ("data", "model"))
    graph, state = nnx.split(nnx.eval_shape(lambda: Model(plant, nnx.Rngs(0))))

    def placed(leaf):
        spec = P(None, "model", "data") if leaf.shape[1] == HIDDEN else P(None, "data", "model")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(placed, state)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", None)))
    step_of_graph = functools.partial(fn, graph)
    step_of_graph.__name__ = "step"
    with jax.set_mesh(mesh):
        return compile_for(TOPOLOGY, jax.jit(step_of_graph, donate_argnums=0), state, x, x, compiler_options=HLO_ONLY)


def line_of(plant: str) -> str:
    """Returns the "file:line" of a planted regression."""
    file = pathlib.Path(__file__)
    (number,) = [n for n, line in enumerate(file.read_text().splitlines(), 1) if line.endswith(f"# planted: {plant}")]
    return f"{file.relative_to(pathlib.Path.cwd())}:{number}"
