"""Column- and row-parallel Dense layers: `nnx.Linear` with its kernel split over a mesh axis.

A column-parallel layer followed by a row-parallel one is the tensor-parallel pair. Between the two,
activations are sharded by features; around them, by rows of the sequence, so that norms and
residuals are split too.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, Unpack

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn import shards
from flaxasync.nn.fully_sharded import StoredLayer, check_sharded, stored_parameter
from flaxasync.nn.options import (
    ConfiguredProducts,
    LinearOptions,
    Settings,
    fixed_setting,
    settings_of,
)
from flaxasync.nn.out_sharding import OutSharding, layout_for, output_spec, shard_output
from flaxasync.nn.placement import (
    Layout,
    Placement,
    check_divides,
    check_output_layout,
    on_all_devices,
    place,
)
from flaxasync.nn.shards import Call, Linear, Part
from flaxasync.nn.uneven_shares import Shares


class DenseLayer(StoredLayer):
    """The parameters of `nnx.Linear`, under its names and in its global shapes, so that its
    checkpoints load.
    """

    names = ("kernel", "bias")
    stored: tuple[P, P | None]
    shares: Shares
    dim: ClassVar[int] = 1  # the dimension of the kernel that is shared out
    use_bias, kernel_init, bias_init = map(fixed_setting, ("use_bias", "kernel_init", "bias_init"))

    def _add_parameters(
        self,
        layer: str,
        shape: tuple[int, int],
        shares: Shares,
        needed: tuple[P, P],
        settings: Settings,
        rngs: nnx.Rngs,
    ) -> None:
        """Draws the kernel and the bias, which the layer needs sharded as `needed` says."""
        self.settings = settings
        self.shares = shares
        self.in_features, self.out_features = shape
        kernel = settings.kernel_init(rngs.params(), shape, settings.param_dtype)
        self.kernel, kernel_spec = stored_parameter(
            layer, "kernel", kernel, settings, needed[0], settings.kernel_metadata
        )
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        bias_spec = None
        if settings.use_bias:
            bias = settings.bias_init(rngs.params(), shape[1:], settings.param_dtype)
            self.bias, bias_spec = stored_parameter(
                layer, "bias", bias, settings, needed[1], settings.bias_metadata
            )
        self.stored = kernel_spec, bias_spec

    @property
    def part(self) -> Part:
        """How the parameters are stored, and which part of them a device computes with."""
        return Part(*self.stored, self.shares, self.dim)


class _ParallelLinear(DenseLayer, ConfiguredProducts):
    layout: Layout = "replicated"
    pad: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        shares: Shares | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        layer = type(self).__name__
        shape = (in_features, out_features)
        settings = settings_of(layer, options)
        size = shape[self.dim]
        axis_name = settings.axis_name
        if shares is None and not self.pad:
            check_divides(layer, axis_name, **{("in_features", "out_features")[self.dim]: size})
        shares = shares or Shares.equal(size, mesh_axis_size(layer, axis_name))
        if self.dim:
            bias_spec = shares.spec(axis_name, shape[1:], 0)
        else:
            bias_spec = P(None)
        needed = shares.spec(axis_name, shape, self.dim), bias_spec
        self._add_parameters(layer, shape, shares, needed, settings, rngs)

    def __call__(
        self, inputs: Float[Array, "*batch s in"], out_sharding: OutSharding = None
    ) -> Float[Array, "*batch s out"]:
        """Applies the layer. `out_sharding` says how the output is to be sharded, if not as the
        layer documents.

        Raises:
          ValueError: The input has other features, is sharded as this layer does not take it, or,
            for a row-parallel layer, has rows that cannot be shared out equally.
        """
        axis_name = self.settings.axis_name
        spec = output_spec(type(self).__name__, out_sharding, axis_name)
        apply, args = self.mapped(inputs, layout_for(spec, inputs.ndim, axis_name, self.layout))
        return shard_output(apply(*args), spec)

    def mapped(self, x: Array, layout: Layout) -> tuple[Callable[..., Array], tuple]:
        """Returns the function that applies the layer, and its arguments; see `Placement.mapped`.

        `layout` is that of the output of a row-parallel layer.
        """
        name = type(self).__name__
        linear = self.parameters()
        features = self.in_features
        return _mapped(name, x, features, linear, self.settings, self.part, layout, self.pad)


class ColumnParallelLinear(_ParallelLinear):
    """A Dense layer whose devices each hold a share of the output features.

    ```
    x       [..., s, in]     sharded by rows over axis_name, or the same on all of its devices
    kernel  [in, out]        sharded by columns: [in, out/R] a device
    y       [..., s, out]    all rows, sharded by features

    forward  y        = x @ kernel + bias
    backward dx       = dy @ kernel.T                  summed over axis_name
             dkernel  = x.T @ dy                       summed over the axes that shard the batch
    ```

    If x is sharded by rows, this is `flaxasync.all_gather_matmul`: some rows travel while others
    are multiplied.

    Args:
      out_features: The features of the output; a multiple of the axis, unless `pad`.
      pad: Whether out_features need not be a multiple of the axis. The output is then padded to the
        next multiple. The padding gets the lowest values, so it never wins an argmax. The kernel
        keeps its shape [in, out], and every call fetches it by an all-to-all. For logits,
        `softmax_cross_entropy` leaves the padding out (`vocab_size`).
      shares: For layers that pad in other ways; see `flaxasync.nn.uneven_shares`.
      **options: See `flaxasync.nn.LinearOptions`. If you give `in_spec`, its rows dimension names
        `axis_name`, or no axis where every device has all rows.

    Raises:
      ValueError: The axis does not divide out_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        pad: bool = False,
        shares: Shares | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        self.pad = pad
        super().__init__(in_features, out_features, shares=shares, rngs=rngs, **options)


class RowParallelLinear(_ParallelLinear):
    """A Dense layer whose devices each hold a share of the input features.

    ```
    x       [..., s, in]     all rows, sharded by features over axis_name
    kernel  [in, out]        sharded by rows: [in/R, out] a device; every device has the whole bias
    y       [..., s, out]    layout="sequence": sharded by rows; "replicated": the same on all devices of axis_name

    forward  y        = x @ kernel + bias              summed over axis_name
    backward dx       = dy @ kernel.T
             dkernel  = x.T @ dy                       summed over the axes that shard the batch
    ```

    This is `flaxasync.matmul_reduce_scatter` ("sequence") or `flaxasync.matmul_all_reduce`
    ("replicated"): some partial sums travel while others are computed.

    Args:
      in_features: The features of the input; a multiple of the axis.
      layout: How the rows of the output lie: "sequence" or "replicated".
      shares: For layers that pad their input; see `flaxasync.nn.uneven_shares`.
      **options: See `flaxasync.nn.LinearOptions`. If you give `in_spec`, its features dimension
        must name `axis_name`.

    Raises:
      ValueError: The axis does not divide in_features, or the layout is unknown.
    """

    dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        layout: Layout = "sequence",
        shares: Shares | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        super().__init__(in_features, out_features, shares=shares, rngs=rngs, **options)
        self.layout: Layout = check_output_layout("RowParallelLinear", layout)


class WholeLinear(DenseLayer):
    """A Dense layer that is the same on all devices of its axis. Other axes may store its
    parameters.
    """

    def __init__(
        self, layer: str, in_features: int, out_features: int, settings: Settings, rngs: nnx.Rngs
    ):
        shares = Shares.equal(out_features, devices=1)
        needed = (P(None, None), P(None))
        self._add_parameters(layer, (in_features, out_features), shares, needed, settings, rngs)


class ColumnParallelProjections(nnx.Module):
    """Several column-parallel Dense layers that share one gather of their input.

    ```python
    qkv = fa.nn.ColumnParallelProjections(64, {"query": 64, "key": 32, "value": 32}, rngs=rngs)
    q, k, v = qkv(x)
    ```

    `out_features` has the features of each output by its name, and the layers draw their parameters
    in that order. Each layer is an attribute: qkv.query is a `ColumnParallelLinear`, whose options
    and errors these are.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        *,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        if not out_features:
            raise ValueError(
                "ColumnParallelProjections needs one output or more, by its name: got none"
            )
        self.names = tuple(out_features)
        for name, features in out_features.items():
            setattr(self, name, ColumnParallelLinear(in_features, features, rngs=rngs, **options))

    def __call__(
        self, inputs: Float[Array, "*batch s in"], out_sharding: OutSharding = None
    ) -> tuple[Float[Array, "*batch s out"], ...]:
        """Applies the layers, and returns their outputs in the order of their names, all sharded
        alike.
        """
        layers = [getattr(self, name) for name in self.names]
        check_no_adapter("ColumnParallelProjections", *layers)
        settings = layers[0].settings
        features = layers[0].in_features
        spec = output_spec("ColumnParallelProjections", out_sharding, settings.axis_name)
        placement = place(
            "ColumnParallelProjections",
            inputs,
            settings.axis_name,
            settings.in_spec,
            "rows",
            features,
        )
        call, linears = call_of(settings, inputs, placement, *layers)
        in_specs = (placement.in_spec, call.specs)
        out_specs = (placement.spec(features=True),) * len(layers)
        ys = placement.run(_project, call, (inputs, linears), in_specs, out_specs)
        return tuple(shard_output(y, spec) for y in ys)


def _project(call: Call, x: Array, linears: tuple[Linear, ...]) -> tuple[Array, ...]:
    return shards.column(x, call.take(x, linears), call.settings, rows_sharded=call.rows_sharded)


def _mapped(
    caller: str,
    x: Array,
    features: int,
    linear: Linear,
    settings: Settings,
    part: Part,
    layout: Layout,
    pad: bool,
) -> tuple[Callable[..., Array], tuple]:
    """Returns the function that multiplies x with the kernel and adds the bias, and its arguments;
    see `Placement.mapped`.
    """
    axis_name = settings.axis_name
    if part.dim == 1:
        apply = _padded_column if pad else _column
        placement = place(caller, x, axis_name, settings.in_spec, "rows", features)
        rows_sharded = placement.rows_sharded
        out_spec = placement.spec(features=True)
    else:
        apply = _row
        placement = place(caller, x, axis_name, settings.in_spec, "features", features)
        placement.check_output_rows(caller, x.shape[-2], layout)
        rows_sharded = layout == "sequence"
        out_spec = placement.spec(layout)
    call = Call(with_dtype(settings, x, *linear), (part,), rows_sharded)
    return placement.mapped(apply, call, (x, (linear,)), (placement.in_spec, call.specs), out_spec)


def _column(call: Call, x: Array, linears: tuple[Linear]) -> Array:
    (linear,) = call.take(x, linears)
    settings = call.settings
    multiply = shards.column_product(settings, rows_sharded=call.rows_sharded)
    (y,) = multiply(*shards.operands(x, (linear,), settings))
    return shards.finish(y, linear[1], settings)


def _padded_column(call: Call, x: Array, linears: tuple[Linear]) -> Array:
    return call.parts[0].shares.mask_padding(_column(call, x, linears), call.settings.axis_name)


def _row(call: Call, x: Array, linears: tuple[Linear]) -> Array:
    (linear,) = call.take(x, linears)
    settings = call.settings
    multiply = shards.row_product(settings, rows_sharded=call.rows_sharded)
    x, (kernel,) = shards.operands(x, (linear,), settings)
    return shards.finish(multiply(x, kernel), linear[1], settings)


def multiply(
    caller: str, x: Array, kernel: Array, settings: Settings, dim: int, layout: Layout
) -> Array:
    """Returns x @ kernel as the layer does that splits this dimension of the kernel; errors begin
    with `caller`.

    `layout` is that of the rows of the output where the input features are split.
    """
    axis_name = settings.axis_name
    size = on_all_devices(caller, axis_name, kernel.shape[dim])
    if dim == 1:
        check_divides(caller, axis_name, out_features=size)
        features = kernel.shape[0]
        spec = P(None, axis_name)
    else:
        features = size
        spec = P(axis_name, None)
    check_sharded(caller, "kernel", kernel, spec)
    part = Part(spec, None, Shares.equal(size, mesh_axis_size(caller, axis_name)), dim)
    apply, args = _mapped(caller, x, features, (kernel, None), settings, part, layout, pad=False)
    return apply(*args)


def call_of(
    settings: Settings, x: Array, placement: Placement, *layers: DenseLayer
) -> tuple[Call, tuple[Linear, ...]]:
    """Returns what is static in a call that multiplies for several layers, and their parameters."""
    linears = tuple(layer.parameters() for layer in layers)
    settings = with_dtype(settings, x, *linears[0])
    return Call(settings, tuple(layer.part for layer in layers), placement.rows_sharded), linears


def check_no_adapter(layer: str, *linears: nnx.Module | None) -> None:
    """Raises NotImplementedError for an adapted projection of a layer that does not call its
    projections.
    """
    for linear in linears:
        if isinstance(linear, nnx.LoRA):
            raise NotImplementedError(
                f"{layer} does not call its layers, so it cannot take a {type(linear).__name__}; "
                "adapt separate layers"
            )


def with_dtype(settings: Settings, *arrays: Array | None, **promotion: bool) -> Settings:
    """Returns the settings with the dtype in which an input and parameters are multiplied: one for
    all arrays.
    """
    promote = functools.partial(settings.promote_dtype, dtype=settings.dtype, **promotion)
    return dataclasses.replace(settings, dtype=jax.eval_shape(promote, arrays)[0].dtype)
