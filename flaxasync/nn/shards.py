"""What the layers compute on their local shards, inside shard_map: products, biases and casts of parameters.

Each parameter is first cast, in its own dtype, to vary over the mesh axes of the input. The transpose of that cast is
the one sum of its gradient over the data axes, in the dtype of the parameter.
"""

from typing import Any

import jax
from jax import Array
from jax.typing import DTypeLike

from flaxasync.mesh import cast_to_varying
from flaxasync.nn.options import LayerSettings
from flaxasync.nn.placement import Layout
from flaxasync.ops.matmul.api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from flaxasync.ops.matmul.products import dot

type Linear = tuple[Array, Array | None]  # kernel, bias


def column(x: Array, linears: tuple[Linear, ...], settings: LayerSettings, *, rows_sharded: bool) -> tuple[Array, ...]:
    """Multiplies one input with several column-parallel kernels [k, n]: all rows, this device's columns of each.

    The dtype in `settings` is that of the computation; it is not None.
    """
    x = x.astype(settings.dtype)
    kernels = tuple(cast(kernel, x, settings.dtype) for kernel, _ in linears)
    ys: Any
    if rows_sharded:
        ys = all_gather_matmul(x, kernels, settings.axis_name, backend=settings.backend, precision=settings.precision)
    else:
        ys = tuple(dot(x, kernel, settings.precision).astype(settings.dtype) for kernel in kernels)
    return tuple(_add(y, bias, settings) for y, (_, bias) in zip(ys, linears, strict=True))


def row(x: Array, linear: Linear, settings: LayerSettings, *, layout: Layout) -> Array:
    """Multiplies this device's columns of x with its rows of a kernel, and sums over all devices."""
    kernel, bias = linear
    x = x.astype(settings.dtype)
    op = {"sequence": matmul_reduce_scatter, "replicated": matmul_all_reduce}[layout]
    kernel = cast(kernel, x, settings.dtype)
    y = op(x, kernel, settings.axis_name, backend=settings.backend, precision=settings.precision)
    return _add(y, bias, settings)


def cast(parameter: Array, x: Array, dtype: DTypeLike | None) -> Array:
    """Returns a parameter that varies over the mesh axes over which `x` varies, in the dtype of the computation."""
    return cast_to_varying(parameter, jax.typeof(x).mat.varying).astype(dtype)


def _add(y: Array, bias: Array | None, settings: LayerSettings) -> Array:
    return y if bias is None else y + cast(bias, y, settings.dtype)
