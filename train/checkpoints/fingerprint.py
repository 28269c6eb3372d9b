"""A checksum of every array of a state, which detects a checkpoint that can be read but holds other values.

The checksum is the sum of the elements' bits as unsigned integers, modulo 2**32. Such a sum does not depend on the
order of its terms, so the fingerprint is the same on every mesh. It detects any single damaged element; it is no
protection against deliberate changes.
"""

from typing import Any

import jax
import jax.numpy as jnp


def fingerprint(state: Any) -> dict[str, int]:
    """Computes the checksum of each array, {"params.layers.kernel": checksum, ...}, and waits for the devices."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    return {name: int(total) for name, total in zip(names, jax.device_get(_sums(leaves)), strict=True)}


@jax.jit
def _sums(leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.sum(_bits(leaf), dtype=jnp.uint32) for leaf in leaves)


def _bits(leaf: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
