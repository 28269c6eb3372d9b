"""The dtype in which sums are accumulated."""

import jax
import jax.numpy as jnp


def accumulator_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the dtype for sums of many products of `x`: float32, or float64 where `x` is float64."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
