"""Attention of one block of queries with one block of keys, written in JAX: it runs on every
device.

`flaxasync.kernels.attention_block` defines what a block kernel computes, the shapes of its
arguments, and the softmax's carry. Where q is float64, everything that is float32 there is float64
here.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from flaxasync.kernels.attention_block import (
    LOG2_E,
    LOWEST,
    BlockOperands,
    Carry,
    Gradients,
    Product,
    Scores,
)
from flaxasync.mesh import vary_like
from flaxasync.ops.matmul.products import accumulator_dtype
from flaxasync.ring import Index


def initial_carry(q: Array) -> Carry:
    """Returns the carry before the first product."""
    *heads, s, d = q.shape
    dtype = accumulator_dtype(q)
    lowest = jnp.full((*heads, 1, s), LOWEST, dtype)
    zeros = jnp.zeros((*heads, 1, s), dtype)
    return vary_like(
        (jnp.zeros((*heads, s, d), dtype), lax.concatenate([lowest, zeros], len(heads))), q
    )


def finish(carry: Carry, dtype: DTypeLike) -> tuple[Array, Array]:
    """Returns the output [b, n, g, s, d], and log2 of the sum of 2**score [b, n, g, s], after the
    last product.
    """
    acc, stats = carry
    highest = stats[..., 0, :]
    weights = stats[..., 1, :]
    return (acc / weights[..., None]).astype(dtype), highest + jnp.log2(weights)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The product in JAX, one tile of scores at a time, so that memory does not grow with the
    square of the rows.
    """

    # the rows of q and of kv in a tile, at most; fewer where that divides the rows better
    tile: int = 512

    def forward(self, operands: BlockOperands, product: Product, carry: Carry) -> Carry:
        add = functools.partial(_add_tile, operands)
        return _for_each_tile(product, self.tile, operands.scores, add, carry)

    def backward(
        self,
        operands: BlockOperands,
        do: Array,
        rows: Array,
        product: Product,
        gradients: Gradients,
    ) -> Gradients:
        add = functools.partial(_add_gradient_tile, operands, do, rows)
        return _for_each_tile(product, self.tile, operands.scores, add, gradients)


def where_needed[T](product: Product, compute: Callable[[T], T], value: T) -> T:
    """Returns `compute(value)`, or `value`, without computing, where no row of the product attends
    to another.
    """
    if product.needed is None or isinstance(product.needed, bool):
        if product.needed is False:
            return value
        return compute(value)
    return lax.cond(product.needed, compute, lambda value: value, value)


def tile_rows(rows: int, limit: int) -> int:
    """Returns the largest divisor of `rows` up to `limit`, or `rows` where no divisor is near the
    limit.
    """
    divisor = next(tile for tile in range(min(rows, limit), 0, -1) if rows % tile == 0)
    if divisor * 8 > min(rows, limit):
        return divisor
    return rows


def _for_each_tile[T](
    product: Product, limit: int, scores: Scores, add: Callable[[Product, T], T], value: T
) -> T:
    """Calls `add` with every tile of a product, which is a smaller product."""
    q_rows = tile_rows(product.q_rows, limit)
    k_rows = tile_rows(product.k_rows, limit)
    q_count = product.q_rows // q_rows
    k_count = product.k_rows // k_rows
    if q_count == k_count == 1:
        return add(dataclasses.replace(product, needed=None), value)

    def turn(index: Index, value: T) -> T:
        i = index // k_count
        j = index % k_count
        q_start = product.q_start + i * q_rows
        k_start = product.k_start + j * k_rows
        if product.masked:
            needed = scores.mask.reaches(q_start, q_rows, k_start, k_rows)
        else:
            needed = None
        q_block = product.q_block * q_count + i
        k_block = product.k_block * k_count + j
        tile = Product(q_block, q_rows, q_start, k_block, k_rows, k_start, product.masked, needed)
        return add(tile, value)

    return lax.fori_loop(0, q_count * k_count, turn, value)


def _add_tile(operands: BlockOperands, tile: Product, carry: Carry) -> Carry:
    """Adds the scores of a tile to the carry of its queries."""
    scores, q, kv, _ = operands

    def add(carry: Carry) -> Carry:
        acc, stats = carry
        k, v = _take(kv, tile.k_block, tile.k_rows)
        s = _product(scores, _SCORES, k, _take(q, tile.q_block, tile.q_rows)) * (
            scores.scale * LOG2_E
        )
        s = _masked(operands, tile, s)
        before = stats[..., 0, :]
        weights = stats[..., 1, :]
        highest = jnp.maximum(before, jnp.max(s, axis=2))  # LOWEST where a whole row is masked
        p = jnp.exp2(s - highest[:, :, None])
        shrink = jnp.exp2(before - highest)
        weights = shrink * weights + jnp.sum(p, axis=2)
        acc = shrink[..., None] * acc + _product(scores, _OF_QUERIES, v, p.astype(v.dtype))
        return acc, jnp.stack([highest, weights], axis=-2)

    acc, stats = carry
    carry_tile = (
        _take(acc, tile.q_block, tile.q_rows),
        _take(stats, tile.q_block, tile.q_rows, axis=-1),
    )
    acc_tile, stats_tile = where_needed(tile, add, carry_tile)
    return _put(acc, acc_tile, tile.q_block), _put(stats, stats_tile, tile.q_block, axis=-1)


def _add_gradient_tile(
    operands: BlockOperands, do: Array, rows: Array, tile: Product, gradients: Gradients
) -> Gradients:
    """Adds what a tile contributes to dq of its queries, and to dkv of its keys and values."""
    scores, q, kv, _ = operands

    def add(gradients: Gradients) -> Gradients:
        dq, dkv = gradients
        k, v = _take(kv, tile.k_block, tile.k_rows)
        q_tile = _take(q, tile.q_block, tile.q_rows)
        do_tile = _take(do, tile.q_block, tile.q_rows)
        rows_tile = _take(rows, tile.q_block, tile.q_rows, axis=-1)
        log_sum_exp = rows_tile[:, :, None, :, 0]
        overlap = rows_tile[:, :, None, :, 1]
        exponent = _product(scores, _SCORES, k, q_tile) * (scores.scale * LOG2_E) - log_sum_exp
        p = jnp.exp2(_masked(operands, tile, exponent))
        ds = (p * (_product(scores, _SCORES, v, do_tile) - overlap)).astype(q.dtype)
        dv = _product(scores, _OF_KEYS, p.astype(do.dtype), do_tile)
        dk = _product(scores, _OF_KEYS, ds, q_tile)
        return dq + _product(scores, _OF_QUERIES, k, ds), dkv + jnp.stack([dk, dv])

    dq, dkv = gradients
    tiles = _take(dq, tile.q_block, tile.q_rows), _take(dkv, tile.k_block, tile.k_rows)
    dq_tile, dkv_tile = where_needed(tile, add, tiles)
    return _put(dq, dq_tile, tile.q_block), _put(dkv, dkv_tile, tile.k_block)


def _masked(operands: BlockOperands, tile: Product, exponents: Array) -> Array:
    """Returns exponents [b, n, t, g, s], and minus infinity where a row does not attend to another.

    They are masked before exp2, whose infinity would be NaN in a second derivative.
    """
    allowed = None
    if tile.masked:
        q = tile.q_start + jnp.arange(tile.q_rows)[None]
        k = tile.k_start + jnp.arange(tile.k_rows)[:, None]
        allowed = operands.scores.mask.allows(q, k)[None, None, :, None]
    if operands.segments is not None:
        of_q, of_k = operands.segments
        q_ids = _take(of_q, tile.q_block, tile.q_rows, axis=-1)
        k_ids = _take(of_k, tile.k_block, tile.k_rows, axis=-1)
        same = (k_ids[:, :, None] == q_ids[:, None, :])[:, None, :, None]
        if allowed is None:
            allowed = same
        else:
            allowed = allowed & same
    if allowed is None:
        return exponents
    return jnp.where(allowed, exponents, -jnp.inf)


# Scores and their weights are [b, n, t, g, s], k and v [b, n, t, d], and q [b, n, g, s, d]. All
# five products make or read scores in this order, so only smaller arrays are transposed.
_SCORES = "bntd,bngsd->bntgs"
_OF_QUERIES = "bntd,bntgs->bngsd"
_OF_KEYS = "bntgs,bngsd->bntd"


def _product(scores: Scores, formula: str, x: Array, y: Array) -> Array:
    dtype = accumulator_dtype(x)
    return jnp.einsum(formula, x, y, precision=scores.precision, preferred_element_type=dtype)


def _take(x: Array, block: Index, rows: int, axis: int = -2) -> Array:
    """Returns a block of `rows` rows."""
    if x.shape[axis] == rows:
        return x
    return lax.dynamic_slice_in_dim(x, block * rows, rows, axis=axis)


def _put(x: Array, rows: Array, block: Index, axis: int = -2) -> Array:
    """Returns x with other rows in a block."""
    count = rows.shape[axis]
    if x.shape[axis] == count:
        return rows
    return lax.dynamic_update_slice_in_dim(x, rows, block * count, axis=axis)
