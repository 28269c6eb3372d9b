"""What the layers compute on their local shards, inside shard_map: products, biases and casts of parameters.

Each parameter is first cast, in its own dtype, to vary over the mesh axes of the input. The transpose of that cast is
the one sum of its gradient over the data axes, in the dtype of the parameter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from flaxasync.mesh import cast_to_varying
from flaxasync.nn import fully_sharded
from flaxasync.nn.options import LayerSettings, LinearSettings
from flaxasync.nn.placement import Layout
from flaxasync.nn.shares import Shares
from flaxasync.ops.matmul.api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from flaxasync.ops.matmul.mlp import Activation, parallel_mlp
from flaxasync.ops.matmul.products import dot

type Linear = tuple[Array, Array | None]  # kernel, bias
type Stored = tuple[P, P | None]  # how the two are stored


def gather(linear: Linear, stored: Stored, x: Array, settings: LayerSettings) -> Linear:
    """Returns a kernel and a bias as a layer needs them, from their shards; see `flaxasync.nn.fully_sharded`.

    The dtype in `settings` is that of the computation; it is not None.
    """
    (kernel, bias), (kernel_spec, bias_spec) = linear, stored
    kernel = fully_sharded.gather(kernel, kernel_spec, x, settings.axis_name, settings.dtype)
    if bias is not None:
        bias = fully_sharded.gather(bias, bias_spec, x, settings.axis_name, settings.dtype)
    return kernel, bias


def column(x: Array, linears: tuple[Linear, ...], settings: LinearSettings, *, rows_sharded: bool) -> tuple[Array, ...]:
    """Multiplies one input with several column-parallel kernels [k, n]: all rows, this device's columns of each.

    The dtype in `settings` is that of the computation; it is not None.
    """
    ys: Sequence[Array] = bind_columns(x, linears, settings, rows_sharded=rows_sharded)()
    return tuple(finish(y, bias, settings) for y, (_, bias) in zip(ys, linears, strict=True))


def bind_columns(
    x: Array, linears: tuple[Linear, ...], settings: LinearSettings, *, rows_sharded: bool
) -> Callable[[], Any]:
    """Returns the function of the products of `column` without biases. Its caller calls it, as that of `bind`."""
    x = x.astype(settings.dtype)
    kernels = tuple(cast(kernel, x, settings.dtype) for kernel, _ in linears)
    if multiplies_locally(settings):
        rows = lax.all_gather(x, settings.axis_name, axis=x.ndim - 2, tiled=True) if rows_sharded else x
        return lambda: [_multiply(rows, kernel, settings) for kernel in kernels]
    if not rows_sharded:
        return lambda: [dot(x, kernel, settings.precision).astype(settings.dtype) for kernel in kernels]
    return functools.partial(
        all_gather_matmul, x, kernels, settings.axis_name, backend=settings.backend, precision=settings.precision,
        gathered_bytes=settings.gathered_bytes,
    )  # fmt: skip


def row(x: Array, linear: Linear, settings: LinearSettings, *, layout: Layout) -> Array:
    """Multiplies this device's columns of x with its rows of a kernel, and sums over all devices."""
    kernel, bias = linear
    x = x.astype(settings.dtype)
    kernel = cast(kernel, x, settings.dtype)
    if multiplies_locally(settings):
        y = _multiply(x, kernel, settings)
        if layout == "sequence":
            y = lax.psum_scatter(y, settings.axis_name, scatter_dimension=y.ndim - 2, tiled=True)
        else:
            y = lax.psum(y, settings.axis_name)
    else:
        op = {"sequence": matmul_reduce_scatter, "replicated": matmul_all_reduce}[layout]
        y = op(x, kernel, settings.axis_name, backend=settings.backend, precision=settings.precision)
    return finish(y, bias, settings)


def mlp(
    x: Array, columns: tuple[Linear, ...], down: Linear, activation: Activation, settings: LinearSettings
) -> Array | None:
    """Applies an MLP to this device's rows of x.

    Returns None where something lies between its ops; then `column`, the activation and `row` do the same.
    """
    biases = [bias for _, bias in columns if bias is not None]
    if biases or multiplies_locally(settings) or settings.preferred_element_type not in (None, settings.dtype):
        return None
    x = x.astype(settings.dtype)
    ws, w_down = tuple(cast(kernel, x, settings.dtype) for kernel, _ in columns), cast(down[0], x, settings.dtype)
    y = parallel_mlp(
        x, ws, w_down, settings.axis_name, activation, backend=settings.backend, precision=settings.precision,
        gathered_bytes=settings.gathered_bytes,
    )  # fmt: skip
    return finish(y, down[1], settings)


def take_columns(linear: Linear, shares: Shares, axis_name: str) -> Linear:
    """Returns this device's columns of a kernel and of its bias."""
    kernel, bias = linear
    return shares.take(kernel, axis_name, 1), None if bias is None else shares.take(bias, axis_name, 0)


def take_rows(linear: Linear, shares: Shares, axis_name: str) -> Linear:
    """Returns this device's rows of a kernel, and the bias, which every device has whole."""
    kernel, bias = linear
    return shares.take(kernel, axis_name, 0), bias


def cast(parameter: Array, x: Array, dtype: DTypeLike | None) -> Array:
    """Returns a parameter that varies over the mesh axes over which `x` varies, in the dtype of the computation."""
    return cast_to_varying(parameter, jax.typeof(x).mat.varying).astype(dtype)


def _multiply(x: Array, kernel: Array, settings: LinearSettings) -> Array:
    """Returns x @ kernel by the function that the layer was given, called as `nnx.Linear` calls it.

    Both operands are cast to vary alike, so that a VJP rule of that function may multiply them with its cotangent.
    """
    varying = jax.typeof(x).mat.varying | jax.typeof(kernel).mat.varying
    x, kernel = cast_to_varying(x, varying), cast_to_varying(kernel, varying)
    more: dict[str, Any] = {"precision": settings.precision, "out_sharding": None}
    if settings.preferred_element_type is not None:
        more["preferred_element_type"] = settings.preferred_element_type
    y = settings.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), **more)
    if y.shape != (*x.shape[:-1], kernel.shape[1]):
        raise ValueError(
            f"dot_general returned {list(y.shape)} for {list(x.shape)} and {list(kernel.shape)}, the operands of one "
            f"device: needed {[*x.shape[:-1], kernel.shape[1]]}; it must be a local product, without collectives"
        )
    return y


def multiplies_locally(settings: LinearSettings) -> bool:
    """Says whether one product of all rows is needed: by the caller's function, or in a dtype that the ops lack.

    The ops return the dtype of their operands, which is that of the computation.
    """
    preferred = settings.preferred_element_type
    wider = preferred is not None and jnp.dtype(preferred).itemsize > jnp.dtype(settings.dtype).itemsize
    if wider and settings.backend not in (None, "none"):
        raise NotImplementedError(
            f"preferred_element_type={jnp.dtype(preferred).name} is wider than the computation in "
            f"{jnp.dtype(settings.dtype).name}, and backend={settings.backend!r} returns the latter: use "
            "backend='none' or None, or leave preferred_element_type out"
        )
    return wider or settings.dot_general is not lax.dot_general


def finish(y: Array, bias: Array | None, settings: LinearSettings) -> Array:
    """Adds the bias, and returns the dtype that the caller prefers; that of a local product stays as it is."""
    y = y if bias is None else y + cast(bias, y, settings.dtype).astype(y.dtype)
    return y if multiplies_locally(settings) else y.astype(settings.preferred_element_type or settings.dtype)
