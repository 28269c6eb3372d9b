"""Backend "exchange" of `matmul_all_reduce`: one product, then a kernel in which all devices send to all others.

It is for few rows, such as those of single tokens, whose sums are bound by latency. The kernel takes whole hardware
tiles. So fewer rows than a tile has are laid out as one tile's rows, and zeros are appended to what is not whole.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from flaxasync.kernels.engine.call import available
from flaxasync.kernels.engine.operands import DTYPES, LANES, sublanes
from flaxasync.kernels.exchange import exchange, vmem_bytes
from flaxasync.ops.costs.cost import Shape
from flaxasync.ops.costs.few_rows import steps
from flaxasync.ops.execution import cannot_serve
from flaxasync.ops.matmul import products
from flaxasync.ops.matmul.products import Arrays
from flaxasync.ops.matmul.ring import RingExecutor


@dataclasses.dataclass(frozen=True)
class ExchangeExecutor(RingExecutor):
    """Sums with one kernel; see `flaxasync.ops.matmul.vjp.Executor`. The gradients need no communication."""

    def all_reduce(self, xs: Arrays, ws: Arrays) -> Array:
        partial_sum = products.sum_of_products(xs, ws, self.precision).astype(self._travel_dtype(xs[0]))
        return exchange_all(partial_sum, self.axis_name, lax.axis_size(self.axis_name)).astype(xs[0].dtype)


def exchange_all(x: Array, axis_name: str, size: int) -> Array:
    """Returns the sum of an array [..., m, n] over the devices on an axis."""
    if not x.size:
        return lax.psum(x, axis_name)  # nothing is sent; the result's type does not vary over the axis
    count, (height, width) = steps(size, x.size * x.dtype.itemsize), _layout(x.shape, x.dtype)
    unit = LANES * (size if count == 2 else 1)
    padded = -(-width // unit) * unit
    if height * width == x.size:
        laid = jnp.pad(x.reshape(height, width), ((0, 0), (0, padded - width)))
        return exchange(laid, axis_name, steps=count)[:, :width].reshape(x.shape)
    laid = jnp.pad(x.reshape(-1), (0, height * padded - x.size)).reshape(height, padded)
    return exchange(laid, axis_name, steps=count).reshape(-1)[: x.size].reshape(x.shape)


def check_exchange(
    op: str, axis_name: str, size: int, shapes: Sequence[Shape], dtype: DTypeLike, reduce_dtype: DTypeLike | None
) -> None:
    """Raises NotImplementedError if the kernel cannot serve a call of `op` on `size` TPUs."""
    instead, travels = "use backend='none'", jnp.dtype(reduce_dtype or dtype)
    x, w = shapes
    if size == 1:
        raise cannot_serve(op, "exchange", f"sends to other devices: got an axis {axis_name!r} of size 1", instead)
    if travels.name not in DTYPES:
        raise cannot_serve(op, "exchange", f"has kernels for {' and '.join(DTYPES)}: got {travels.name}", instead)
    nbytes = math.prod(x[:-1]) * w[1] * travels.itemsize
    need = vmem_bytes(size, nbytes, steps(size, nbytes))
    if need > available():
        limit = f"has all sums in vector memory, {available() / 2**20:.0f} MiB: got {need / 2**20:.0f} MiB"
        raise cannot_serve(op, "exchange", limit, f"give it fewer rows, or {instead}")


def _layout(shape: Shape, dtype: DTypeLike) -> tuple[int, int]:
    """Returns the rows and columns of an array [..., m, n] in whole rows of hardware tiles."""
    unit, rows = sublanes(dtype), math.prod(shape[:-1])
    return (rows, shape[-1]) if rows % unit == 0 else (unit, -(-math.prod(shape) // unit))
