"""Arrays of several shapes and dtypes as the rows of one, so that they travel in one transfer.

libtpu 0.0.52 schedules at most five permutes in flight. A block of a mixture and the sum behind it
have seven arrays in each direction: sent one by one, those beyond the fifth waited until the
products beside them were over.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree


def pack(tree: PyTree, features: int, dtype: jnp.dtype) -> Array:
    """Returns all leaves as rows of unsigned integers [rows, features] with the size of `dtype`.

    A leaf [n, features] of such a size is n of the rows as it is. Integers, because floats that are
    no numbers may be changed on their way.
    """
    word = _word(dtype)
    return lax.concatenate([_to_rows(leaf, features, word) for leaf in jax.tree.leaves(tree)], 0)


def unpack(rows: Array, like: PyTree) -> Any:
    """Returns what was packed, a tree with the shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    start = 0
    found = []
    for leaf in leaves:
        count = _rows(leaf, rows.shape[1], rows.dtype)
        found.append(_from_rows(lax.slice_in_dim(rows, start, start + count), leaf))
        start += count
    return jax.tree.unflatten(structure, found)


def _word(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{8 * dtype.itemsize}")


def _rows(leaf: Any, features: int, word: jnp.dtype) -> int:
    return -(-leaf.size * leaf.dtype.itemsize // (features * word.itemsize))


def _to_rows(leaf: Array, features: int, word: jnp.dtype) -> Array:
    if leaf.shape[1:] == (features,) and leaf.dtype.itemsize == word.itemsize:
        return lax.bitcast_convert_type(leaf, word)
    flat = leaf.reshape(-1)
    narrow = word.itemsize // leaf.dtype.itemsize
    if narrow > 1:
        flat = jnp.pad(flat, (0, -flat.size % narrow)).reshape(-1, narrow)
    flat = lax.bitcast_convert_type(flat, word).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % features)).reshape(-1, features)


def _from_rows(rows: Array, leaf: Any) -> Array:
    if rows.shape == leaf.shape and rows.dtype.itemsize == leaf.dtype.itemsize:
        return lax.bitcast_convert_type(rows, leaf.dtype)
    flat = rows.reshape(-1)
    wide = leaf.dtype.itemsize // rows.dtype.itemsize
    if wide > 1:
        flat = flat.reshape(-1, wide)
    return lax.bitcast_convert_type(flat, leaf.dtype).reshape(-1)[: leaf.size].reshape(leaf.shape)
