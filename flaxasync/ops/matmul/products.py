"""The local products of a collective matmul, and the all-reduce that both executors build from a
reduce-scatter.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from flaxasync.ops.quantization import Operand, Quantized, values_of

type Arrays = tuple[Array, ...]
type Operands = tuple[Operand, ...]


def accumulator_dtype(x: Operand) -> jnp.dtype:
    """Returns the dtype for sums of many products of `x`: int32 of integers, float64 of float64,
    else float32.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def dot(
    x: Operand,
    w: Operand,
    precision: lax.PrecisionLike = None,
    *,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """Returns x @ w, or x @ w.T, in the dtype in which it is accumulated; of quantised operands, in
    that of scales. With `dtype` it is rounded to that dtype as it is written.
    """
    contracting = ((x.ndim - 1,), (1 if transposed else 0,))
    sums = lax.dot_general(
        values_of(x),
        values_of(w),
        (contracting, ((), ())),
        precision=None if isinstance(x, Quantized) else precision,
        preferred_element_type=dtype or accumulator_dtype(values_of(x)),
    )
    if isinstance(x, Quantized) and isinstance(w, Quantized):
        of_columns = lax.broadcast_to_rank(w.scales, sums.ndim)
        return sums.astype(x.scales.dtype) * x.scales[..., None] * of_columns
    return sums


def sum_of_products(
    xs: Operands, ws: Operands, precision: lax.PrecisionLike = None, *, transposed: bool = False
) -> Array:
    """Returns the sum of x @ w, or of x @ w.T, over all pairs."""
    products = [dot(x, w, precision, transposed=transposed) for x, w in zip(xs, ws, strict=True)]
    return functools.reduce(jnp.add, products)


def weight_gradient(x: Operand, dy: Operand, precision: lax.PrecisionLike = None) -> Array:
    """Returns x.T @ dy over all rows of all batches, in the dtype in which it is accumulated, or
    that of scales.

    Operands that are quantised are those of `weight_operands`.
    """
    return scaled_columns(sums_over_rows(values_of(x), values_of(dy), precision), x, dy)


def sums_over_rows(x: Array, dy: Array, precision: lax.PrecisionLike = None) -> Array:
    """Returns x.T @ dy over all rows of all batches, in the dtype in which it is accumulated."""
    rows_of_x = rows_of_dy = tuple(range(x.ndim - 1))
    if x.dtype.itemsize == 1:
        # On v5e XLA multiplies 8-bit values at twice the rate only if the left operand's rows lie
        # along lanes.
        x = row_major(row_major(merge_batches(x)).T)
        dy = merge_batches(dy)
        rows_of_x = (1,)
        rows_of_dy = (0,)
    dimensions = ((rows_of_x, rows_of_dy), ((), ()))
    return lax.dot_general(
        x, dy, dimensions, precision=precision, preferred_element_type=accumulator_dtype(x)
    )


def scaled_columns(sums: Array, x: Operand, dy: Operand) -> Array:
    """Returns x.T @ dy, of whose values these are the sums [k, n]. Without scales they are the
    result.
    """
    if not isinstance(x, Quantized) or not isinstance(dy, Quantized):
        return sums
    return sums.astype(x.scales.dtype) * x.scales[:, None] * dy.scales[None]


def weight_gradients(x: Operand, dys: Operands, precision: lax.PrecisionLike = None) -> Arrays:
    """Returns x.T @ dy for each dy, in x's dtype, over all rows of all batches.

    Narrow dys are joined, so that one product reads x once. Joining them moves them twice, so wide
    ones are not.
    """
    widths = [dy.shape[-1] for dy in dys]
    if (len(dys) - 1) * x.shape[-1] <= 2 * sum(widths):
        return tuple(weight_gradient(x, dy, precision).astype(x.dtype) for dy in dys)
    joined = jax.tree.map(lambda *parts: lax.concatenate(parts, parts[0].ndim - 1), *dys)
    dw = weight_gradient(x, joined, precision).astype(x.dtype)
    return tuple(lax.split(dw, widths, axis=1))


def local_weight_gradients(
    local: Sequence[tuple[Operand, Operands]], precision: lax.PrecisionLike
) -> Arrays:
    """Returns x.T @ dy for each (x, dys) and each of its dys; see `Executor.reduce`."""
    return tuple(dw for x, dys in local for dw in weight_gradients(x, dys, precision))


def by_device(x: Array, size: int) -> Array:
    """Returns x [..., R*m, k] as [R, ..., m, k]: the rows that each device of a ring of R owns."""
    *batch, rows, k = x.shape
    axis = len(batch)
    return jnp.moveaxis(x.reshape(*batch, size, rows // size, k), axis, 0)


def in_order(x: Array) -> Array:
    """Returns x [R, ..., m, k] as [..., R*m, k]; see `by_device`."""
    size, *batch, rows, k = x.shape
    return jnp.moveaxis(x, 0, len(batch)).reshape(*batch, size * rows, k)


def rows_like[T: Operand](x: T, gathered: Operand) -> T:
    """Returns x [..., R*m, n] with its rows as `Executor.gather` returns them: `gathered` [..., k]
    has merged the batches, or has the rows by device, [R, ..., m, k].
    """
    if gathered.ndim > x.ndim:
        return jax.tree.map(lambda array: by_device(array, gathered.shape[0]), x)
    return jax.tree.map(lambda array: array.reshape(*gathered.shape[:-1], array.shape[-1]), x)


def merge_batches[T: Operand](x: T) -> T:
    """Returns x [..., rows, k] as [rows, k]."""
    leading = x.ndim - 1
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[leading:]), x)


def scatter_then_gather(
    reduce: Callable[[Operands, Operands], tuple[Array, Arrays]],
    xs: Operands,
    ws: Operands,
    axis_name: str,
) -> Array:
    """Returns the all-reduce of what `reduce` of an executor reduce-scatters; rows are padded to a
    multiple of the ring.

    Where the ring does not divide the rows of a batch, the batches are merged first, so that one of
    them is padded.
    """
    size = lax.axis_size(axis_name)
    *batch, rows, _ = xs[0].shape
    if batch and rows % size and xs[0].size:
        merged = scatter_then_gather(reduce, tuple(map(merge_batches, xs)), ws, axis_name)
        return merged.reshape(*batch, rows, merged.shape[-1])

    def pad(x: Array) -> Array:
        padding = [(0, -rows % size if dim == len(batch) else 0, 0) for dim in range(x.ndim)]
        return lax.pad(x, jnp.zeros((), x.dtype), padding)

    y_shard, _ = reduce(jax.tree.map(pad, xs) if rows % size else xs, ws)
    y = lax.all_gather(y_shard, axis_name, axis=y_shard.ndim - 2, tiled=True, to="invarying")
    return lax.slice_in_dim(y, 0, rows, axis=-2)


def row_major(x: Array) -> Array:
    """Returns x with its last dimension along lanes. XLA would put a transposition off, and compute
    in its layout.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
