"""In which dtype sums are kept."""

import jax
import jax.numpy as jnp


def sum_dtype(x: jax.Array) -> jnp.dtype:
    """Of sums of many products of `x`: float32, and float64 where `x` is."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
