"""A mesh of 2 x 2 chips, and a small matmul on it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import topology_mesh


@pytest.fixture(scope="session")
def mesh():
    return topology_mesh("v5e:2x2", (2, 2), ("x", "y"))


@pytest.fixture(scope="session")
def matmul(mesh):
    """A jitted matmul and its two arguments."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", "y")))
    w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", None)))
    return jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None))), x, w
