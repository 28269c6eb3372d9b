"""A training step in plain JAX, which uses nothing of flaxasync, and one planted regression of each
kind.

The layers are scanned. Their kernels are sharded over both axes of a 2 x 4 mesh, so each layer
gathers them over "data" (fully sharded) and sums its result over "model" (tensor parallel). Each
regression is one line of `block`, which ends with a comment that has its name; `line_of` finds the
line.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from flaxasync.check import HLO_ONLY, CompiledProgram, compile_for, topology_mesh

LAYERS, ROWS, WIDTH, HIDDEN = 4, 2048, 1024, 4096
TOPOLOGY = "v5e:2x4"


def block(plant, carry, kernels):
    """A residual MLP with a gate."""
    x, before = carry
    up, gate, down = kernels["up"], kernels["gate"], kernels["down"]
    if plant == "gather":
        rows = P("data", None)
        # planted: gather
        hidden = lax.with_sharding_constraint(jax.nn.gelu(x @ gate) * (x @ up), rows)
    else:
        hidden = jax.nn.gelu(x @ gate) * (x @ up)
    if plant == "callback":
        jax.debug.print("{}", hidden[0, 0])  # planted: callback
    if plant == "overlap":
        hidden, down = lax.optimization_barrier((hidden, down))  # planted: overlap
    if plant == "dtype":
        # planted: dtype
        out = jnp.dot(hidden, down, preferred_element_type=jnp.float32).astype(x.dtype)
    else:
        out = jnp.dot(hidden, down)
    if plant == "copy":
        return (x + out + before, x), None  # planted: copy
    return (x + out, before), None


def renamed(state, weights):
    """The same with other names of variables and parameters, and with independent operations in
    another order.
    """
    rows, unused = state
    narrow, product = weights["narrow"], rows @ weights["wide"]
    activation = jax.nn.gelu(rows @ weights["side"])
    return (jnp.dot(product * activation, narrow) + rows, unused), None


def step(layer, kernels, x, y):
    def loss(kernels):
        (out, _), _ = lax.scan(layer, (x, jnp.zeros_like(x)), kernels)
        return jnp.mean((out - y).astype(jnp.float32) ** 2)

    value, gradient = jax.value_and_grad(loss)(kernels)
    return jax.tree.map(lambda p, g: (p - 0.01 * g).astype(p.dtype), kernels, gradient), value


def compiled(plant: str = "") -> CompiledProgram:
    """Returns the step, compiled for a TPU, with one of the regressions if it is named."""
    mesh = topology_mesh(TOPOLOGY, (2, 4), ("data", "model"))
    wide = array((LAYERS, WIDTH, HIDDEN), mesh, P(None, "data", "model"))
    narrow = array((LAYERS, HIDDEN, WIDTH), mesh, P(None, "model", "data"))
    x = array((ROWS, WIDTH), mesh, P("data", None))
    if plant == "renamed":
        layer, kernels = renamed, {"wide": wide, "side": wide, "narrow": narrow}
    else:
        layer, kernels = functools.partial(block, plant), {"up": wide, "gate": wide, "down": narrow}
    fn = functools.partial(step, layer)
    fn.__name__ = "step"
    with jax.set_mesh(mesh):
        return compile_for(
            TOPOLOGY, jax.jit(fn, donate_argnums=0), kernels, x, x, compiler_options=HLO_ONLY
        )


def line_of(plant: str) -> str:
    """Returns the "file:line" of a planted regression: of its comment, or of the line below one that
    stands alone.
    """
    file = pathlib.Path(__file__)
    (number,) = [
        n + line.strip().startswith("#")
        for n, line in enumerate(file.read_text().splitlines(), 1)
        if line.endswith(f"# planted: {plant}")
    ]
    return f"{file.relative_to(pathlib.Path.cwd())}:{number}"
