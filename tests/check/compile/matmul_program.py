"""A small matmul on a mesh of 2 x 2, for the tests that compile it."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def matmul(mesh):
    """Returns a jitted matmul and its two arguments."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", "y")))
    w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", None)))
    return jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None))), x, w
