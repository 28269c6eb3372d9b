"""Attention of one block of queries with one block of keys, written in JAX: it runs on every device.

`flaxasync.kernels.attention_block` defines what a block kernel computes, the shapes of its arguments, and the softmax's
carry. Where q is float64, everything that is float32 there is float64 here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.attention_block import LOG2_E, LOWEST, Carry, Gradients, Mask, Product, Scores, Segments
from flaxasync.mesh import cast_to_varying
from flaxasync.ops.dtypes import accumulator_dtype
from flaxasync.ring import Index


def initial_carry(q: Array) -> Carry:
    """Returns the carry before the first product."""
    *heads, s, d = q.shape
    dtype = accumulator_dtype(q)
    lowest, zeros = jnp.full((*heads, 1, s), LOWEST, dtype), jnp.zeros((*heads, 1, s), dtype)
    axes = jax.typeof(q).mat.varying
    acc = jnp.zeros((*heads, s, d), dtype)
    return cast_to_varying(acc, axes), cast_to_varying(lax.concatenate([lowest, zeros], len(heads)), axes)


def finish(carry: Carry, dtype: Any) -> tuple[Array, Array]:
    """Returns the output [b, n, g, s, d], and log2 of the sum of 2**score [b, n, g, s], after the last product."""
    acc, stats = carry
    highest, weights = stats[..., 0, :], stats[..., 1, :]
    return (acc / weights[..., None]).astype(dtype), highest + jnp.log2(weights)


def where_needed[T](product: Product, compute: Callable[[T], T], value: T) -> T:
    """Returns `compute(value)`, or `value`, without computing, where no row of the product attends to another."""
    if product.needed is None or isinstance(product.needed, bool):
        return value if product.needed is False else compute(value)
    return lax.cond(product.needed, compute, lambda value: value, value)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The product in JAX, one tile of scores at a time, so that memory does not grow with the square of the rows.

    Attributes:
      tile: The rows of q and of kv in a tile, at most; fewer where that divides the rows better.
      name: The name of the kernel.
    """

    tile: int = 512
    name: str = "reference"

    def forward(self, scores: Scores, q: Array, kv: Array, segments: Segments, product: Product, carry: Carry) -> Carry:
        tiles = _Tiles(self.tile, product)

        def of_queries(i: Index, carry: Carry) -> Carry:
            acc, stats = carry
            q_tile = tiles.q(q, i, axis=-2)

            def with_keys(j: Index, carry: Carry) -> Carry:
                def add(carry: Carry) -> Carry:
                    return _add_tile(scores, tiles, i, j, q_tile, kv, segments, carry)

                return tiles.where_reached(scores.mask, i, j, add, carry)

            local = (tiles.q(acc, i, axis=-2), tiles.q(stats, i, axis=-1))
            local = _loop(tiles.k_count, with_keys, local)
            return tiles.put_q(acc, local[0], i, axis=-2), tiles.put_q(stats, local[1], i, axis=-1)

        return _loop(tiles.q_count, of_queries, carry)

    def backward(
        self,
        scores: Scores,
        q: Array,
        kv: Array,
        segments: Segments,
        do: Array,
        rows: Array,
        product: Product,
        gradients: Gradients,
    ) -> Gradients:
        tiles = _Tiles(self.tile, product)

        def of_keys(j: Index, gradients: Gradients) -> Gradients:
            dq, dkv = gradients

            def with_queries(i: Index, gradients: Gradients) -> Gradients:
                def add(gradients: Gradients) -> Gradients:
                    return _add_gradient_tile(scores, tiles, i, j, q, kv, segments, do, rows, gradients)

                return tiles.where_reached(scores.mask, i, j, add, gradients)

            dq, dkv_tile = _loop(tiles.q_count, with_queries, (dq, tiles.k(dkv, j, axis=-2)))
            return dq, tiles.put_k(dkv, dkv_tile, j, axis=-2)

        return _loop(tiles.k_count, of_keys, gradients)


def tile_rows(rows: int, limit: int) -> int:
    """Returns the largest divisor of `rows` up to `limit`, or `rows` where no divisor is near the limit."""
    divisor = next(tile for tile in range(min(rows, limit), 0, -1) if rows % tile == 0)
    return divisor if divisor * 8 > min(rows, limit) else rows


class _Tiles:
    """The tiles of a product: where each one lies among the rows, and at which positions of the sequence."""

    def __init__(self, limit: int, product: Product):
        self._product = product
        self._q_rows, self._k_rows = tile_rows(product.q_rows, limit), tile_rows(product.k_rows, limit)
        self.q_count, self.k_count = product.q_rows // self._q_rows, product.k_rows // self._k_rows

    def q(self, x: Array, i: Index, *, axis: int) -> Array:
        """Returns the rows of tile i of the queries."""
        return _slice(x, self._product.q_block * self.q_count + i, self._q_rows, axis)

    def k(self, x: Array, j: Index, *, axis: int) -> Array:
        """Returns the rows of tile j of the keys and values."""
        return _slice(x, self._product.k_block * self.k_count + j, self._k_rows, axis)

    def put_q(self, x: Array, tile: Array, i: Index, *, axis: int) -> Array:
        return _put(x, tile, self._product.q_block * self.q_count + i, self._q_rows, axis)

    def put_k(self, x: Array, tile: Array, j: Index, *, axis: int) -> Array:
        return _put(x, tile, self._product.k_block * self.k_count + j, self._k_rows, axis)

    def starts(self, i: Index, j: Index) -> tuple[Any, Any]:
        """Returns the positions of the first row of tile i of the queries and of tile j of the keys."""
        return self._product.q_start + i * self._q_rows, self._product.k_start + j * self._k_rows

    def where_reached[T](self, mask: Mask, i: Index, j: Index, compute: Callable[[T], T], value: T) -> T:
        """Returns `compute(value)`, or `value` for a tile of a masked product that no row needs."""
        if not self._product.masked or self.q_count == self.k_count == 1:
            return compute(value)
        q, k = self.starts(i, j)
        return lax.cond(mask.reaches(q, self._q_rows, k, self._k_rows), compute, lambda value: value, value)

    def allowed(self, mask: Mask, segments: Segments, i: Index, j: Index) -> Array | None:
        """Returns which rows attend to which, [b or 1, 1, t, 1, s]; None where all do."""
        allowed = None
        if self._product.masked:
            q, k = self.starts(i, j)
            q_row, k_row = jnp.arange(self._q_rows), jnp.arange(self._k_rows)[:, None]
            allowed = mask.allows(q + q_row, k + k_row)[None, None, :, None]
        if segments is not None:
            q_ids, k_ids = self.q(segments[0], i, axis=-1), self.k(segments[1], j, axis=-1)
            same = (k_ids[:, :, None] == q_ids[:, None, :])[:, None, :, None]
            allowed = same if allowed is None else allowed & same
        return allowed


def _add_tile(
    scores: Scores, tiles: _Tiles, i: Index, j: Index, q: Array, kv: Array, segments: Segments, carry: Carry
) -> Carry:
    acc, stats = carry
    k, v = tiles.k(kv, j, axis=-2)
    s = _scores(scores, k, q) * (scores.scale * LOG2_E)
    allowed = tiles.allowed(scores.mask, segments, i, j)
    if allowed is not None:
        s = jnp.where(allowed, s, -jnp.inf)
    before, weights = stats[..., 0, :], stats[..., 1, :]
    highest = jnp.maximum(before, jnp.max(s, axis=2))  # LOWEST where a whole row is masked
    p = jnp.exp2(s - highest[:, :, None])
    shrink = jnp.exp2(before - highest)
    weights = shrink * weights + jnp.sum(p, axis=2)
    acc = shrink[..., None] * acc + _weighted(scores, v, p)
    return acc, jnp.stack([highest, weights], axis=-2)


def _add_gradient_tile(
    scores: Scores,
    tiles: _Tiles,
    i: Index,
    j: Index,
    q: Array,
    kv: Array,
    segments: Segments,
    do: Array,
    rows: Array,
    gradients: Gradients,
) -> Gradients:
    dq, dkv = gradients
    k, v = tiles.k(kv, j, axis=-2)
    q_tile, do_tile, rows_tile = tiles.q(q, i, axis=-2), tiles.q(do, i, axis=-2), tiles.q(rows, i, axis=-1)
    log_sum_exp, overlap = rows_tile[:, :, None, :, 0], rows_tile[:, :, None, :, 1]
    exponent = _scores(scores, k, q_tile) * (scores.scale * LOG2_E) - log_sum_exp
    allowed = tiles.allowed(scores.mask, segments, i, j)
    if allowed is not None:  # before exp2, whose infinity would be NaN in a second derivative
        exponent = jnp.where(allowed, exponent, -jnp.inf)
    p = jnp.exp2(exponent)
    ds = p * (_scores(scores, v, do_tile) - overlap)
    dv, dk = _summed(scores, p, do_tile), _summed(scores, ds, q_tile)
    dq_tile = tiles.q(dq, i, axis=-2) + _weighted(scores, k, ds)
    return tiles.put_q(dq, dq_tile, i, axis=-2), dkv + jnp.stack([dk, dv])


# Scores are [b, n, t, g, s]. All five products make them or read them in this order, so only smaller arrays are
# transposed.


def _scores(scores: Scores, k: Array, q: Array) -> Array:
    """Multiplies every row of k [b, n, t, d] with every row of q [b, n, g, s, d]: [b, n, t, g, s]."""
    return _dot(k, q, ((3,), (4,)), scores)


def _weighted(scores: Scores, v: Array, p: Array) -> Array:
    """Sums the rows of v [b, n, t, d] with the weights p [b, n, t, g, s]: [b, n, g, s, d]."""
    return jnp.moveaxis(_dot(v, p.astype(v.dtype), ((2,), (2,)), scores), 2, -1)


def _summed(scores: Scores, p: Array, q: Array) -> Array:
    """Sums the rows of q [b, n, g, s, d] with the weights p [b, n, t, g, s]: [b, n, t, d]."""
    return _dot(p.astype(q.dtype), q, ((3, 4), (2, 3)), scores)


def _dot(x: Array, y: Array, contracting: tuple[tuple[int, ...], tuple[int, ...]], scores: Scores) -> Array:
    numbers = (contracting, ((0, 1), (0, 1)))
    return lax.dot_general(x, y, numbers, precision=scores.precision, preferred_element_type=accumulator_dtype(x))


def _loop[T](count: int, body: Callable[[Index, T], T], value: T) -> T:
    return body(0, value) if count == 1 else lax.fori_loop(0, count, body, value)


def _slice(x: Array, index: Index, count: int, axis: int) -> Array:
    if x.shape[axis] == count:
        return x
    return lax.dynamic_slice_in_dim(x, index * count, count, axis=axis)


def _put(x: Array, tile: Array, index: Index, count: int, axis: int) -> Array:
    if x.shape[axis] == count:
        return tile
    return lax.dynamic_update_slice_in_dim(x, tile, index * count, axis=axis)
