"""The collective matmuls as a ring of blocks ("xla", "pallas", "stateful") or one collective
("none", "exchange").

A ring multiplies each block in place and writes each block of the output once. The output begins as
uninitialised memory and not as zeros, so the TPU compiler writes each product straight into its
rows.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from flaxasync import mesh
from flaxasync.kernels.engine.call import available
from flaxasync.kernels.engine.operands import DTYPES, LANES, sublanes
from flaxasync.kernels.exchange import exchange, vmem_bytes
from flaxasync.mesh import vary_like
from flaxasync.ops.costs.collective_matmul import exchange_steps
from flaxasync.ops.costs.cost import Shape
from flaxasync.ops.execution import cannot_serve
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

        def write(block: Operand, row: Index, carry: Any) -> Any:
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

        found = tuple(
            dw for x, dys in local for dw in products.weight_gradients(x, dys, self.precision)
        )
        return ring_reduce(self.ring, rows, produce, self._travel_dtype(xs[0])).astype(
            xs[0].dtype
        ), found

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        if self.ring.transport is None:
            partial_sum = products.sum_of_products(xs, ws, self.precision)
            return lax.psum(partial_sum.astype(self._travel_dtype(xs[0])), self.axis_name).astype(
                xs[0].dtype
            )
        return products.scatter_then_gather(lambda xs: self.reduce(xs, ws)[0], xs, self.axis_name)

    def weight_gradient(self, x: Operand, dys: Operands) -> Arrays:
        travelling = values_of(x) if isinstance(dys[0], Quantized) else x

        def add(block: Operand, row: Index, sums: Arrays) -> Arrays:
            block = dequantize(block)

            def product(dy: Operand) -> Array:
                rows = lax.dynamic_slice_in_dim(values_of(dy), row, block.shape[-2], axis=-2)
                return products.sums_over_rows(block, rows, self.precision)

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


@dataclasses.dataclass(frozen=True)
class ExchangeExecutor(RingExecutor):
    """Sums few rows with a kernel in which all devices send to all others; their gradients need no
    communication.
    """

    def all_reduce(self, xs: Operands, ws: Operands) -> Array:
        partial_sum = products.sum_of_products(xs, ws, self.precision).astype(
            self._travel_dtype(xs[0])
        )
        return _exchange_all(partial_sum, self.axis_name, lax.axis_size(self.axis_name)).astype(
            xs[0].dtype
        )


def check_exchange(
    op: str,
    axis_name: str,
    size: int,
    shapes: Sequence[Shape],
    dtype: DTypeLike,
    reduce_dtype: DTypeLike | None,
) -> None:
    """Raises NotImplementedError if the kernel cannot serve a call of `op` on `size` TPUs."""
    instead = "use backend='none'"
    travels = jnp.dtype(reduce_dtype or dtype)
    x, w = shapes
    if size == 1:
        raise cannot_serve(
            op, "exchange", f"sends to other devices: got an axis {axis_name!r} of size 1", instead
        )
    if travels.name not in DTYPES:
        raise cannot_serve(
            op, "exchange", f"has kernels for {' and '.join(DTYPES)}: got {travels.name}", instead
        )
    nbytes = math.prod(x[:-1]) * w[1] * travels.itemsize
    need = vmem_bytes(size, nbytes, exchange_steps(size, nbytes))
    if need > available():
        limit = (
            f"has all sums in vector memory, {available() / 2**20:.0f} MiB: got "
            f"{need / 2**20:.0f} MiB"
        )
        raise cannot_serve(op, "exchange", limit, f"give it fewer rows, or {instead}")


def _exchange_all(x: Array, axis_name: str, size: int) -> Array:
    """Returns the sum of an array [..., m, n] over the devices on an axis.

    The kernel takes whole hardware tiles. So fewer rows than a tile has are laid out as one tile's
    rows, and zeros are appended to what is not whole.
    """
    if not x.size:
        # nothing is sent; the result's type does not vary over the axis
        return lax.psum(x, axis_name)
    count = exchange_steps(size, x.size * x.dtype.itemsize)
    height, width = _layout(x.shape, x.dtype)
    unit = LANES * (size if count == 2 else 1)
    padded = -(-width // unit) * unit
    if height * width == x.size:
        laid = jnp.pad(x.reshape(height, width), ((0, 0), (0, padded - width)))
        return exchange(laid, axis_name, steps=count)[:, :width].reshape(x.shape)
    laid = jnp.pad(x.reshape(-1), (0, height * padded - x.size)).reshape(height, padded)
    return exchange(laid, axis_name, steps=count).reshape(-1)[: x.size].reshape(x.shape)


def _layout(shape: Shape, dtype: DTypeLike) -> tuple[int, int]:
    """Returns the rows and columns of an array [..., m, n] in whole rows of hardware tiles."""
    unit = sublanes(dtype)
    rows = math.prod(shape[:-1])
    return (rows, shape[-1]) if rows % unit == 0 else (unit, -(-math.prod(shape) // unit))


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
