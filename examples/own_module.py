"""A user's own nnx.Module of flaxasync's layers, trained for a few steps on simulated devices.

JAX_PLATFORMS=cpu python examples/own_module.py
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa


class Block(nnx.Module):
    """A residual block: column-parallel, an activation, row-parallel."""

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.up = fa.nn.ColumnParallelLinear(features, hidden, rngs=rngs)
        self.down = fa.nn.RowParallelLinear(hidden, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


def main() -> float:
    """Fits the block to a rotation of its input; returns the last loss."""
    jax.config.update("jax_num_cpu_devices", 8)
    with jax.set_mesh(fa.make_mesh((2, 4), ("data", "model"))):
        block = Block(64, 256, rngs=nnx.Rngs(0))
        x = jax.device_put(
            jax.random.normal(jax.random.key(0), (8, 32, 64)), P("data", "model", None)
        )

        @nnx.jit
        def step(block: Block, x: jax.Array) -> jax.Array:
            loss, grads = nnx.value_and_grad(
                lambda block: jnp.mean((block(x) - jnp.roll(x, 1, axis=-1)) ** 2)
            )(block)
            params = jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(block, nnx.Param), grads)
            nnx.update(block, params)
            return loss

        for i in range(100):
            loss = step(block, x)
            if i % 20 == 0:
                print(f"step {i:3d}  loss {loss:.4f}")
        print(f"step {i:3d}  loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
