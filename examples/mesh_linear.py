"""A model of two layers on a mesh of rows and features, 2 x 4 simulated devices, trained for a few
steps.

JAX_PLATFORMS=cpu python examples/mesh_linear.py
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa


class Model(nnx.Module):
    """Two Dense layers and a residual connection; inputs are sharded by rows over x and by features
    over y.
    """

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs):
        self.up = fa.nn.MeshLinear(features, hidden, rngs=rngs)
        self.down = fa.nn.MeshLinear(hidden, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(self.up(x))  # sharded by rows alone, as the output of every such layer
        return x + jax.reshard(self.down(jax.reshard(hidden, P("x", "y"))), P("x", "y"))


def main() -> float:
    """Fits the model to a rotation of its input; returns the last loss."""
    jax.config.update("jax_num_cpu_devices", 8)
    with jax.set_mesh(fa.make_mesh((2, 4), ("x", "y"))):
        model = Model(64, 256, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(0), (256, 64))
        target, x = (jax.device_put(array, P("x", "y")) for array in (jnp.roll(x, 1, axis=-1), x))

        @nnx.jit
        def step(model: Model, x: jax.Array, target: jax.Array) -> jax.Array:
            loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - target) ** 2))(
                model
            )
            params = jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(model, nnx.Param), grads)
            nnx.update(model, params)
            return loss

        for i in range(100):
            loss = step(model, x, target)
            if i % 20 == 0:
                print(f"step {i:3d}  loss {loss:.4f}")
        print(f"step {i:3d}  loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
