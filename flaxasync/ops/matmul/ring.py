"""The collective matmuls as a ring of blocks ("xla", "pallas", "stateful") or one collective
operation ("none").

A ring multiplies each block in place and writes each block of the output once. The output begins as
uninitialised memory and not as zeros, so the TPU compiler writes each product straight into its
rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from flaxasync import mesh
from flaxasync.mesh import vary_like
from flaxasync.ops.matmul import products
from flaxasync.ops.matmul.products import Arrays, Operands, accumulator_dtype
from flaxasync.ops.quantization import Operand, Quantization, Quantized, dequantize, values_of
from flaxasync.ring import Index, Ring, ring_gather, ring_reduce


@dataclasses.dataclass(frozen=True)
class RingExecutor:
    """Sends blocks around a ring and multiplies one while the next travels; see
    `flaxasync.ops.matmul.vjp.Executor`.
    """

    ring: Ring
    precision: lax.PrecisionLike = None
    # of partial sums while they travel; None for that of the operands
    reduce_dtype: DTypeLike | None = None
    quantization: Quantization | None = None

    @property
    def axis_name(self) -> str:
        return self.ring.axis_name

    def gather(
        self, x: Operand, ws: Operands, *, transposed: bool = False, keep: bool = False
    ) -> tuple[Arrays, Operand | None]:
        rows = x.shape[-2] * lax.axis_size(self.axis_name)
        axis = x.ndim - 2
        like, *_ = jax.tree.leaves(x)

        def output(columns: int) -> Array:
            return uninitialised((*x.shape[:-2], rows, columns), like, x.dtype)

        def all_rows(array: Array) -> Array:
            return uninitialised((*array.shape[:axis], rows, *array.shape[axis + 1 :]), array)

        def write(block: Operand, row: Index, carry: PyTree) -> Any:
            def write_rows(x: Array, block: Array) -> Array:
                return lax.dynamic_update_slice_in_dim(x, block, row, axis=axis)

            ys, gathered = carry
            blocks = tuple(
                products.dot(block, w, self.precision, transposed=transposed).astype(x.dtype)
                for w in ws
            )
            ys = jax.tree.map(write_rows, ys, blocks)
            return ys, jax.tree.map(write_rows, gathered, block) if keep else None

        ys = tuple(vary_like(output(w.shape[0 if transposed else 1]), *ws) for w in ws)
        return ring_gather(self.ring, x, (ys, jax.tree.map(all_rows, x) if keep else None), write)

    def reduce(
        self,
        xs: Operands,
        ws: Operands,
        local: Sequence[tuple[Operand, Operands]] = (),
        *,
        transposed: bool = False,
    ) -> tuple[Array, Arrays]:
        rows = xs[0].shape[-2] // lax.axis_size(self.axis_name)
        axis = xs[0].ndim - 2

        def produce(row: Index, count: int) -> Array:
            blocks = jax.tree.map(
                lambda array: lax.dynamic_slice_in_dim(array, row, count, axis=axis), xs
            )
            return products.sum_of_products(blocks, ws, self.precision, transposed=transposed)

        found = products.local_weight_gradients(local, self.precision)
        y = ring_reduce(self.ring, rows, produce, self._travel_dtype(xs[0]))
        return y.astype(xs[0].dtype), found

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        if self.ring.transport is None:
            partial_sum = products.sum_of_products(xs, ws, self.precision)
            return lax.psum(partial_sum.astype(self._travel_dtype(xs[0])), self.axis_name).astype(
                xs[0].dtype
            )
        return products.scatter_then_gather(self.reduce, xs, ws, self.axis_name)

    def weight_gradient(self, x: Operand, dys: Operands) -> Arrays:
        travelling = x
        if isinstance(dys[0], Quantized):
            travelling = values_of(x)

        def add(block: Operand, row: Index, sums: Arrays) -> Arrays:
            rows_of_x = dequantize(block)

            def product(dy: Operand) -> Array:
                rows = lax.dynamic_slice_in_dim(values_of(dy), row, block.shape[-2], axis=-2)
                return products.sums_over_rows(rows_of_x, rows, self.precision)

            return tuple(sum_ + product(dy) for sum_, dy in zip(sums, dys, strict=True))

        zeros = tuple(
            jnp.zeros((x.shape[-1], dy.shape[-1]), accumulator_dtype(travelling)) for dy in dys
        )
        sums = ring_gather(
            self.ring, travelling, tuple(vary_like(zero, x, *dys) for zero in zeros), add
        )
        return tuple(
            products.scaled_columns(sum_, x, dy).astype(x.dtype)
            for sum_, dy in zip(sums, dys, strict=True)
        )

    def _travel_dtype(self, x: Operand) -> jnp.dtype:
        return jnp.dtype(self.reduce_dtype or x.dtype)


def uninitialised(shape: tuple[int, ...], x: Array, dtype: DTypeLike | None = None) -> Array:
    """Returns an array, by default of x's dtype, that will be written before it is read.

    For a TPU `lax.empty` allocates and writes nothing. Elsewhere `lax.empty` is zeros: a constant,
    which XLA hoists out of a scan over layers and then copies in every turn. So elsewhere one
    element of x is broadcast where it is needed.
    """
    dtype = dtype or x.dtype
    if mesh.platform() in ("tpu", None):
        return vary_like(lax.empty(shape, dtype), x)
    if not x.size:
        return vary_like(jnp.zeros(shape, dtype), x)
    element = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    return lax.broadcast(element.astype(dtype), shape)
