"""The collective matmuls as a ring of blocks ("xla", "pallas", "stateful") or one collective operation ("none").

A ring multiplies each block in place and writes each block of the output once. The output begins as uninitialised
memory and not as zeros, so the TPU compiler writes each product straight into its rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from flaxasync import mesh
from flaxasync.mesh import cast_to_varying
from flaxasync.ops.dtypes import accumulator_dtype
from flaxasync.ops.matmul import products
from flaxasync.ops.matmul.products import Arrays
from flaxasync.ring import Index, Ring, ring_gather, ring_reduce


@dataclasses.dataclass(frozen=True)
class RingExecutor:
    """Sends blocks around a ring and multiplies one while the next travels; see `flaxasync.ops.matmul.vjp.Executor`.

    Attributes:
      ring: How blocks travel.
      precision: The precision of the matmuls.
      reduce_dtype: The dtype of partial sums while they travel; None for that of the operands.
    """

    ring: Ring
    precision: lax.PrecisionLike = None
    reduce_dtype: DTypeLike | None = None

    @property
    def axis_name(self) -> str:
        return self.ring.axis_name

    def gather(
        self, x: Array, ws: Arrays, *, transposed: bool = False, keep: bool = False
    ) -> tuple[Arrays, Array | None]:
        rows = x.shape[-2] * lax.axis_size(self.axis_name)

        def output(columns: int) -> Array:
            return _uninitialised((*x.shape[:-2], rows, columns), x)

        def write(block: Array, row: Index, carry: Any) -> Any:
            ys, gathered = carry
            blocks = [products.dot(block, w, self.precision, transposed=transposed).astype(x.dtype) for w in ws]
            ys = tuple(_write_rows(y, y_block, row) for y, y_block in zip(ys, blocks, strict=True))
            return ys, _write_rows(gathered, block, row) if keep else None

        ys = tuple(_vary_like(output(w.shape[0 if transposed else 1]), *ws) for w in ws)
        return ring_gather(self.ring, x, (ys, output(x.shape[-1]) if keep else None), write)

    def reduce(self, xs: Arrays, ws: Arrays, *, transposed: bool = False) -> Array:
        rows = xs[0].shape[-2] // lax.axis_size(self.axis_name)

        def produce(row: Index, count: int) -> Array:
            blocks = tuple(lax.dynamic_slice_in_dim(x, row, count, axis=-2) for x in xs)
            return products.sum_of_products(blocks, ws, self.precision, transposed=transposed)

        return ring_reduce(self.ring, rows, produce, self._travel_dtype(xs[0])).astype(xs[0].dtype)

    def all_reduce(self, xs: Arrays, ws: Arrays) -> Array:
        if self.ring.transport is None:
            partial_sum = products.sum_of_products(xs, ws, self.precision)
            return lax.psum(partial_sum.astype(self._travel_dtype(xs[0])), self.axis_name).astype(xs[0].dtype)
        return products.scatter_then_gather(lambda xs: self.reduce(xs, ws), xs, self.axis_name)

    def weight_gradient(self, x: Array, dys: Arrays) -> Arrays:
        def add(block: Array, row: Index, dws: Arrays) -> Arrays:
            def product(dy: Array) -> Array:
                rows = lax.dynamic_slice_in_dim(dy, row, block.shape[-2], axis=-2)
                return products.weight_gradient(block, rows, self.precision)

            return tuple(dw + product(dy) for dw, dy in zip(dws, dys, strict=True))

        zeros = tuple(jnp.zeros((x.shape[-1], dy.shape[-1]), accumulator_dtype(x)) for dy in dys)
        dws = ring_gather(self.ring, x, tuple(_vary_like(zero, x, *dys) for zero in zeros), add)
        return tuple(dw.astype(x.dtype) for dw in dws)

    def _travel_dtype(self, x: Array) -> jnp.dtype:
        return jnp.dtype(self.reduce_dtype or x.dtype)


def _write_rows(x: Array, block: Array, row: Index) -> Array:
    return lax.dynamic_update_slice_in_dim(x, block, row, axis=-2)


def _vary_like(value: Array, *others: Array) -> Array:
    """Casts `value` to vary over each mesh axis that any of `others` varies over."""
    return cast_to_varying(value, frozenset().union(*(jax.typeof(other).mat.varying for other in others)))


def _uninitialised(shape: tuple[int, ...], x: Array) -> Array:
    """Returns an array of x's dtype that will be written before it is read.

    For a TPU `lax.empty` allocates and writes nothing. Elsewhere `lax.empty` is zeros: a constant, which XLA hoists out
    of a scan over layers and then copies in every turn. So elsewhere one element of x is broadcast where it is needed.
    """
    if mesh.platform() in ("tpu", None):
        return _vary_like(lax.empty(shape, x.dtype), x)
    return lax.broadcast(lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim)), shape)
