"""The rules of the collective matmuls, forward and backward. They assume valid input, cast to vary over the same axes.

R devices lie on the ring; each holds m rows of what is sharded by rows, n or k columns of what is sharded by columns.

all_gather_matmul        x [..., m, k]     w [k, n]   y [..., R*m, n]
    forward   y  = all_gather(x) @ w
              dx = reduce_scatter(dy @ w.T)             the dual ring
              dw = all_gather(x).T @ dy                 x travels again
matmul_reduce_scatter    x [..., R*m, k]   w [k, n]   y [..., m, n]
    forward   y  = reduce_scatter(x @ w)
              dx = all_gather(dy) @ w.T                 the dual ring
              dw = x.T @ all_gather(dy)                 on the same trip of dy
matmul_all_reduce        x [..., m, k]     w [k, n]   y [..., m, n]
    forward   y  = all_reduce(x @ w)
              dx = dy @ w.T                             no communication
              dw = x.T @ dy                             no communication

Saved for the backward pass are x and w as they were given, shards both; nothing gathered is saved. Several w share one
trip of x, and several products are summed before they travel.

A ring multiplies each block where it is and writes each block of y once: y begins as `_unwritten`, not as zeros, and
the TPU compiler then writes every product straight into its rows of y.

A dw is summed over the blocks in one of two ways. all_gather_matmul adds each product to dw while the next block of x
travels: nothing else is there to hide that trip behind. matmul_reduce_scatter has dx for that; it keeps the blocks of
dy to the end of the rule and multiplies once, since each addition reads and writes a float32 dw (docs/design.md).

`fused_rules` has the same rules as single TPU kernels.

The algebra follows Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models" (ASPLOS 2023).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync import mesh
from flaxasync.mesh import cast_to_varying
from flaxasync.ops.dtypes import sum_dtype
from flaxasync.ring import Ring, ring_gather, ring_reduce


@dataclasses.dataclass(frozen=True)
class Op:
    """The static half of a call."""

    ring: Ring
    precision: Any
    reduce_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_gather_matmul(op: Op, x: Array, ws: tuple[Array, ...]) -> tuple[Array, ...]:
    rows = x.shape[-2] * lax.axis_size(op.ring.axis_name)
    shapes = [(*x.shape[:-2], rows, w.shape[1]) for w in ws]
    ys = tuple(_like(_unwritten(shape, x), *ws) for shape in shapes)

    def write(block: Array, row: Any, ys: tuple[Array, ...]) -> tuple[Array, ...]:
        products = [dot(block, w, op.precision).astype(y.dtype) for w, y in zip(ws, ys, strict=True)]
        return tuple(
            lax.dynamic_update_slice_in_dim(y, product, row, axis=-2) for y, product in zip(ys, products, strict=True)
        )

    with jax.named_scope("all_gather_matmul"):
        return ring_gather(op.ring, x, ys, write)


def _all_gather_matmul_fwd(op: Op, x: Array, ws: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple]:
    return all_gather_matmul(op, x, ws), (x, ws)


def _all_gather_matmul_bwd(op: Op, saved: tuple, dys: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    x, ws = saved
    with jax.named_scope("all_gather_matmul_dx"):
        dx = _reduce_products(op, dys, ws, rows=x.shape[-2], transposed=True)

    def add(block: Array, row: Any, dws: tuple[Array, ...]) -> tuple[Array, ...]:
        count = block.shape[-2]
        return tuple(dw + outer(block, _rows(dy, row, count), op.precision) for dw, dy in zip(dws, dys, strict=True))

    with jax.named_scope("all_gather_matmul_dw"):
        dws = ring_gather(op.ring, x, tuple(_sum_like(w, x, *dys) for w in ws), add)
    return dx, tuple(dw.astype(w.dtype) for dw, w in zip(dws, ws, strict=True))


all_gather_matmul.defvjp(_all_gather_matmul_fwd, _all_gather_matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_reduce_scatter(op: Op, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> Array:
    with jax.named_scope("matmul_reduce_scatter"):
        return _reduce_products(op, xs, ws, rows=xs[0].shape[-2] // lax.axis_size(op.ring.axis_name))


def _matmul_reduce_scatter_fwd(op: Op, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> tuple[Array, tuple]:
    return matmul_reduce_scatter(op, xs, ws), (xs, ws)


def _matmul_reduce_scatter_bwd(op: Op, saved: tuple, dy: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    xs, ws = saved
    dxs = tuple(_like(_unwritten(x.shape, x), dy) for x in xs)
    gathered = _unwritten((*xs[0].shape[:-1], dy.shape[-1]), dy)

    def use(block: Array, row: Any, carry: tuple) -> tuple:
        dxs, gathered = carry
        products = [dot(block, w, op.precision, transposed=True).astype(x.dtype) for x, w in zip(xs, ws, strict=True)]
        dxs = tuple(lax.dynamic_update_slice_in_dim(dx, p, row, axis=-2) for dx, p in zip(dxs, products, strict=True))
        return dxs, lax.dynamic_update_slice_in_dim(gathered, block, row, axis=-2)

    with jax.named_scope("matmul_reduce_scatter_dx"):
        dxs, gathered = ring_gather(op.ring, dy, (dxs, gathered), use)
    with jax.named_scope("matmul_reduce_scatter_dw"):
        return dxs, tuple(outer(x, gathered, op.precision).astype(w.dtype) for x, w in zip(xs, ws, strict=True))


matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_fwd, _matmul_reduce_scatter_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_all_reduce(op: Op, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> Array:
    with jax.named_scope("matmul_all_reduce"):
        axis_name, size, rows = op.ring.axis_name, lax.axis_size(op.ring.axis_name), xs[0].shape[-2]
        if op.ring.transport is None:
            return lax.psum(_sum_of_products(xs, ws, op).astype(_travel_dtype(op, xs)), axis_name).astype(xs[0].dtype)
        share = -(-rows // size)
        padding = [(0, 0, 0)] * (xs[0].ndim - 2) + [(0, share * size - rows, 0), (0, 0, 0)]
        padded = tuple(lax.pad(x, jnp.zeros((), x.dtype), padding) for x in xs) if share * size != rows else xs
        y_shard = _reduce_products(op, padded, ws, rows=share)
        y = lax.all_gather(y_shard, axis_name, axis=y_shard.ndim - 2, tiled=True, to="invarying")
        return lax.slice_in_dim(y, 0, rows, axis=-2)


def _matmul_all_reduce_fwd(op: Op, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> tuple[Array, tuple]:
    return matmul_all_reduce(op, xs, ws), (xs, ws)


def _matmul_all_reduce_bwd(op: Op, saved: tuple, dy: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    xs, ws = saved
    if op.ring.axis_name not in jax.typeof(xs[0]).mat.varying:
        # check_vma=False: no type says that y is the same everywhere, and shard_map hands each device its share of dy.
        dy = lax.psum(dy, op.ring.axis_name)
    dxs = tuple(dot(dy, w, op.precision, transposed=True).astype(x.dtype) for x, w in zip(xs, ws, strict=True))
    return dxs, tuple(outer(x, dy, op.precision).astype(w.dtype) for x, w in zip(xs, ws, strict=True))


matmul_all_reduce.defvjp(_matmul_all_reduce_fwd, _matmul_all_reduce_bwd)


def _reduce_products(op: Op, xs: tuple, ws: tuple, *, rows: int, transposed: bool = False) -> Array:
    """reduce_scatter(sum of x @ w), or of x @ w.T; of x's dtype."""

    def produce(row: Any, count: int) -> Array:
        return _sum_of_products(tuple(_rows(x, row, count) for x in xs), ws, op, transposed=transposed)

    return ring_reduce(op.ring, rows, produce, _travel_dtype(op, xs)).astype(xs[0].dtype)


def _sum_of_products(xs: tuple, ws: tuple, op: Op, *, transposed: bool = False) -> Array:
    products = [dot(x, w, op.precision, transposed=transposed) for x, w in zip(xs, ws, strict=True)]
    return functools.reduce(jnp.add, products)


def dot(x: Array, w: Array, precision: Any = None, *, transposed: bool = False) -> Array:
    """x @ w, or x @ w.T, accumulated in float32."""
    contracting = ((x.ndim - 1,), (1 if transposed else 0,))
    return lax.dot_general(x, w, (contracting, ((), ())), precision=precision, preferred_element_type=sum_dtype(x))


def outer(x: Array, dy: Array, precision: Any = None) -> Array:
    """x.T @ dy over all rows of all batches, accumulated in float32."""
    rows = tuple(range(x.ndim - 1))
    return lax.dot_general(x, dy, ((rows, rows), ((), ())), precision=precision, preferred_element_type=sum_dtype(x))


def _rows(x: Array, row: Any, count: int) -> Array:
    return lax.dynamic_slice_in_dim(x, row, count, axis=-2)


def _travel_dtype(op: Op, xs: tuple) -> jnp.dtype:
    return jnp.dtype(op.reduce_dtype or xs[0].dtype)


def _like(value: Array, *others: Array) -> Array:
    """`value`, cast to vary over every axis that any of `others` varies over."""
    return cast_to_varying(value, frozenset().union(*(jax.typeof(other).mat.varying for other in others)))


def _unwritten(shape: tuple[int, ...], x: Array) -> Array:
    """An array of x's dtype that is written before it is read.

    For a TPU `lax.empty` allocates and writes nothing. Elsewhere it is zeros: a constant, which XLA hoists out of a
    scan over layers and copies in every turn. A value that is at hand is spread once, where it is needed.
    """
    if mesh.platform() in ("tpu", None):
        return _like(lax.empty(shape, x.dtype), x)
    return lax.broadcast(lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim)), shape)


def _sum_like(w: Array, *others: Array) -> Array:
    return _like(jnp.zeros(w.shape, sum_dtype(w)), w, *others)
