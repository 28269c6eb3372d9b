"""What the layers compute on their local shards, inside shard_map: products, biases and casts of
parameters.

Each parameter is first cast, in its own dtype, to vary over the mesh axes of the input. The
transpose of that cast is the one sum of its gradient over the data axes, in the dtype of the
parameter.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from flaxasync import mesh
from flaxasync.mesh import vary_alike, vary_like
from flaxasync.nn import fully_sharded
from flaxasync.nn.options import Settings
from flaxasync.nn.uneven_shares import Shares
from flaxasync.ops import choose
from flaxasync.ops.matmul.api import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from flaxasync.ops.matmul.products import dot
from flaxasync.ops.matmul.vjp import multiply
from flaxasync.ops.quantization import Operand, Quantized, check_chip

# kernel, an `Operand` that is quantised only where the layer has a quantization, and bias
type Linear = tuple[Any, Array | None]


@dataclasses.dataclass(frozen=True)
class Part:
    """How the kernel and the bias of a Dense layer are stored, and which part of them a device
    computes with.
    """

    kernel: P
    bias: P | None
    shares: Shares  # of dimension `dim` of the kernel, and of the bias where that is 1
    dim: int = 1


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call of a layer that is made of Dense layers. Hashable."""

    settings: Settings  # with the dtype of the computation
    parts: tuple[Part, ...]  # one for each Dense layer
    # whether the layer's axis shards the rows of its activations, where their features are whole
    rows_sharded: bool

    @property
    def specs(self) -> tuple[tuple[P, P | None], ...]:
        """How the kernel and the bias of each Dense layer are stored."""
        return tuple((part.kernel, part.bias) for part in self.parts)

    def take(
        self, x: Array, linears: Sequence[Linear], dtype: DTypeLike | None = None
    ) -> list[Linear]:
        """Returns the parameters with which this device computes; see `take_part`."""
        parts = zip(self.parts, linears, strict=True)
        return [self.take_part(x, *each, dtype) for each in parts]

    def take_part(
        self, x: Array, part: Part, linear: Linear, dtype: DTypeLike | None = None
    ) -> Linear:
        """Returns the parameters of one Dense layer with which this device computes.

        Those that are fully sharded are gathered in `dtype`, that of the computation where it is
        None, or in 8 bits.
        """
        kernel, bias = linear
        settings = self.settings
        axis_name = settings.axis_name
        in_dtype = dtype or settings.dtype
        quantization = None
        if part.shares.whole:
            quantization = settings.quantization
        kernel = fully_sharded.gather(kernel, part.kernel, x, axis_name, in_dtype, quantization)
        if bias is not None:
            bias = fully_sharded.gather(bias, part.bias, x, axis_name, in_dtype)
        kernel = part.shares.take(kernel, axis_name, part.dim)
        if bias is not None and part.dim == 1:
            bias = part.shares.take(bias, axis_name, 0)
        return kernel, bias


def column(
    x: Array, linears: Sequence[Linear], settings: Settings, *, rows_sharded: bool
) -> tuple[Array, ...]:
    """Multiplies one input with several column-parallel kernels [k, n]: all rows, this device's
    columns of each.
    """
    x, kernels = operands(x, linears, settings)
    ys = column_product(settings, rows_sharded=rows_sharded)(x, kernels)
    return tuple(finish(y, bias, settings) for y, (_, bias) in zip(ys, linears, strict=True))


def row(x: Array, linear: Linear, settings: Settings, *, rows_sharded: bool) -> Array:
    """Multiplies this device's columns of x with its rows of a kernel, and sums over all devices:
    its rows, or all.
    """
    x, (kernel,) = operands(x, (linear,), settings)
    y = row_product(settings, rows_sharded=rows_sharded)(x, kernel)
    return finish(y, linear[1], settings)


def operands(
    x: Array, linears: Sequence[Linear], settings: Settings
) -> tuple[Array, tuple[Operand, ...]]:
    """Returns an input and kernels in the dtype of the computation; see `cast`."""
    x = x.astype(settings.dtype)
    return x, tuple(cast(kernel, x, settings.dtype) for kernel, _ in linears)


def column_product(
    settings: Settings, *, rows_sharded: bool
) -> Callable[[Array, tuple[Operand, ...]], Any]:
    """Returns the function (x, kernels) -> products that `column` applies: an op, or the products
    of one device.
    """
    if needs_one_product(settings):
        return functools.partial(_gather_and_multiply, settings, rows_sharded)
    if not rows_sharded:
        return functools.partial(_multiply_all_rows, settings)
    return functools.partial(
        all_gather_matmul,
        axis_name=settings.axis_name,
        gathered_bytes=settings.gathered_bytes,
        **settings.of_products(),
    )


def row_product(settings: Settings, *, rows_sharded: bool) -> Callable[[Array, Operand], Array]:
    """Returns the function (x, kernel) -> product that `row` applies: an op, or a product and a
    sum.
    """
    if needs_one_product(settings):
        return functools.partial(_multiply_and_sum, settings, rows_sharded)
    if rows_sharded:
        op = matmul_reduce_scatter
    else:
        op = matmul_all_reduce
    return functools.partial(op, axis_name=settings.axis_name, **settings.of_products())


def cast(parameter: Operand, x: Array, dtype: DTypeLike | None) -> Any:
    """Returns a parameter that varies over the mesh axes over which `x` varies, in the dtype of the
    computation.

    One that was quantised before it was gathered stays as it is.
    """
    parameter = vary_like(parameter, x)
    if isinstance(parameter, Quantized):
        return parameter
    return parameter.astype(dtype)


def _multiply_all_rows(settings: Settings, x: Array, kernels: tuple[Operand, ...]) -> list[Array]:
    """Returns the products of rows that every device has."""
    choose.check_backend("all_gather_matmul", settings.backend)
    return [_local_product(x, kernel, settings) for kernel in kernels]


def _gather_and_multiply(
    settings: Settings, rows_sharded: bool, x: Array, kernels: tuple[Operand, ...]
) -> list[Array]:
    """Returns the products of all rows, which are gathered first if they are sharded."""
    rows = x
    if rows_sharded:
        rows = lax.all_gather(x, settings.axis_name, axis=x.ndim - 2, tiled=True)
    return [_multiply(rows, kernel, settings) for kernel in kernels]


def _multiply_and_sum(settings: Settings, rows_sharded: bool, x: Array, kernel: Operand) -> Array:
    y = _multiply(x, kernel, settings)
    if rows_sharded:
        return lax.psum_scatter(y, settings.axis_name, scatter_dimension=y.ndim - 2, tiled=True)
    return lax.psum(y, settings.axis_name)


def _local_product(x: Array, kernel: Operand, settings: Settings) -> Array:
    """Returns x @ kernel where every device has all rows."""
    if settings.quantization is None:
        return dot(x, kernel, settings.precision).astype(settings.dtype)
    check_chip("a Dense layer", settings.quantization, mesh.chip())
    x, kernel = vary_alike((x, kernel))
    return multiply(settings.quantization, settings.precision, x, kernel)


def _multiply(x: Array, kernel: Operand, settings: Settings) -> Array:
    """Returns x @ kernel by the function that the layer was given, called as `nnx.Linear` calls it.

    Both operands are cast to vary alike, so that a VJP rule of that function may multiply them with
    its cotangent.
    """
    x, kernel = vary_alike((x, kernel))
    more: dict[str, Any] = {"precision": settings.precision, "out_sharding": None}
    if settings.preferred_element_type is not None:
        more["preferred_element_type"] = settings.preferred_element_type
    y = settings.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), **more)
    if y.shape != (*x.shape[:-1], kernel.shape[1]):
        raise ValueError(
            f"dot_general returned {list(y.shape)} for {list(x.shape)} and {list(kernel.shape)}, "
            f"the operands of one device: needed {[*x.shape[:-1], kernel.shape[1]]}; it must be a "
            "local product, without collectives"
        )
    return y


def needs_one_product(settings: Settings) -> bool:
    """Says whether one product of all rows is needed: by the caller's function, or in a dtype that
    the ops lack.

    The ops return the dtype of their operands, which is that of the computation.
    """
    preferred = settings.preferred_element_type
    wider = (
        preferred is not None and jnp.dtype(preferred).itemsize > jnp.dtype(settings.dtype).itemsize
    )
    if wider and settings.quantization is not None:
        raise NotImplementedError(
            f"preferred_element_type={jnp.dtype(preferred).name} is wider than the computation in "
            f"{jnp.dtype(settings.dtype).name}, the dtype of quantised products: leave one of the "
            "two out"
        )
    if wider and settings.backend not in (None, "none"):
        raise NotImplementedError(
            f"preferred_element_type={jnp.dtype(preferred).name} is wider than the computation in "
            f"{jnp.dtype(settings.dtype).name}, and backend={settings.backend!r} returns the "
            "latter: use backend='none' or None, or leave preferred_element_type out"
        )
    return wider or settings.dot_general is not lax.dot_general


def finish(y: Array, bias: Array | None, settings: Settings) -> Array:
    """Adds the bias, and returns the dtype that the caller prefers; that of a local product stays
    as it is.
    """
    biased = y
    if bias is not None:
        of_features = cast(bias, y, settings.dtype).astype(y.dtype)
        biased = y + lax.broadcast_to_rank(of_features, y.ndim)
    if needs_one_product(settings):
        return biased
    return biased.astype(settings.preferred_element_type or settings.dtype)
