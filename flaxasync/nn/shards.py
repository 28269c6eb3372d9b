"""What the layers do on their local shards, inside shard_map: products, biases and casts of parameters.

Every parameter is cast to vary over the axes of the input before anything else is done with it, in its own dtype. The
transpose of that cast is the one sum of its gradient over the data axes, in the parameter's dtype.
"""

import dataclasses
from typing import Any

import jax
from jax import Array, lax

from flaxasync.mesh import cast_to_varying
from flaxasync.nn.placement import Layout
from flaxasync.ops.dtypes import sum_dtype
from flaxasync.ops.matmul import api as collective_matmul

type Linear = tuple[Array, Array | None]  # kernel, bias


@dataclasses.dataclass(frozen=True)
class Options:
    """What a layer's products have in common."""

    axis_name: str
    dtype: Any
    backend: str | None
    precision: Any


def column(x: Array, linears: tuple[Linear, ...], options: Options, *, rows_sharded: bool) -> tuple[Array, ...]:
    """Column-parallel products of one input with several kernels [k, n]: all rows, this device's columns of each."""
    x = x.astype(options.dtype)
    kernels = tuple(cast(kernel, x, options.dtype) for kernel, _ in linears)
    if rows_sharded:
        ys = collective_matmul.all_gather_matmul(
            x, kernels, options.axis_name, backend=options.backend, precision=options.precision
        )
    else:
        ys = tuple(_dot(x, kernel, options) for kernel in kernels)
    return tuple(_add(y, bias, options) for y, (_, bias) in zip(ys, linears, strict=True))


def row(x: Array, linear: Linear, options: Options, *, layout: Layout) -> Array:
    """A row-parallel product: this device's columns of x with its rows of the kernel, summed over all devices."""
    kernel, bias = linear
    x = x.astype(options.dtype)
    op = {
        "sequence": collective_matmul.matmul_reduce_scatter,
        "replicated": collective_matmul.matmul_all_reduce,
    }[layout]
    y = op(x, cast(kernel, x, options.dtype), options.axis_name, backend=options.backend, precision=options.precision)
    return _add(y, bias, options)


def cast(parameter: Array, x: Array, dtype: Any) -> Array:
    """A parameter made to vary over the axes that `x` varies over, in the dtype of the computation."""
    return cast_to_varying(parameter, jax.typeof(x).mat.varying).astype(dtype)


def _dot(x: Array, kernel: Array, options: Options) -> Array:
    y = lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=options.precision,
        preferred_element_type=sum_dtype(x),
    )
    return y.astype(options.dtype)


def _add(y: Array, bias: Array | None, options: Options) -> Array:
    return y if bias is None else y + cast(bias, y, options.dtype)
