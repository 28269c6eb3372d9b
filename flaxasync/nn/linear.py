"""Column- and row-parallel Dense layers: `nnx.Linear` with its kernel split over a mesh axis.

A column-parallel layer followed by a row-parallel one is the tensor-parallel pair. Between the two, activations are
sharded by features; around them, by rows of the sequence, so that norms and residuals are split too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Unpack

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn import shards
from flaxasync.nn.checks import (
    check_divides,
    check_dot_general,
    check_input,
    check_output_layout,
    check_output_rows,
    check_sharded,
)
from flaxasync.nn.fully_sharded import StoredLayer, metadata_spec, stored_parameter
from flaxasync.nn.options import LinearOptions, LinearSettings, of_settings, settings_of
from flaxasync.nn.placement import Layout, place
from flaxasync.nn.shares import Shares

type Split = Literal["in_features", "out_features"]


class _ParallelLinear(StoredLayer):
    """The parameters of `nnx.Linear`, under its names and in its global shapes, split over one mesh axis or two."""

    names = ("kernel", "bias")
    stored: shards.Stored
    split: ClassVar[Split]
    layout: Layout = "replicated"
    pad: bool = False
    dtype, param_dtype, precision = map(of_settings, ("dtype", "param_dtype", "precision"))
    use_bias, kernel_init, bias_init = map(of_settings, ("use_bias", "kernel_init", "bias_init"))
    promote_dtype, dot_general = map(of_settings, ("promote_dtype", "dot_general"))
    preferred_element_type = of_settings("preferred_element_type")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        shares: Shares | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        layer, features = type(self).__name__, {"in_features": in_features, "out_features": out_features}
        self.settings = settings_of(LinearSettings, layer, options)
        check_dot_general(layer, self.settings)
        size, axis_name = features[self.split], self.settings.axis_name
        if shares is None:
            check_divides(layer, axis_name, **{self.split: size})
        self.shares = shares or Shares.equal(size, mesh_axis_size(layer, axis_name))
        self.in_features, self.out_features = in_features, out_features
        dtype, shape = self.settings.param_dtype, (in_features, out_features)
        column = self.split == "out_features"
        needed = self.shares.spec(axis_name, shape, 1 if column else 0)
        kernel = self.settings.kernel_init(rngs.params(), shape, dtype)
        self.kernel, kernel_spec = stored_parameter(
            layer, "kernel", kernel, self.settings, needed, self.settings.kernel_metadata
        )
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        bias_spec = None
        if self.settings.use_bias:
            needed = self.shares.spec(axis_name, shape[1:], 0) if column else P(None)
            bias = self.settings.bias_init(rngs.params(), shape[1:], dtype)
            self.bias, bias_spec = stored_parameter(
                layer, "bias", bias, self.settings, needed, self.settings.bias_metadata
            )
        self.stored = kernel_spec, bias_spec

    def __call__(self, x: Float[Array, "*batch s in"]) -> Float[Array, "*batch s out"]:
        """Applies the layer.

        Raises:
          ValueError: No mesh is set, it lacks the axis, x has other features, is sharded as this layer does not take
            it, or, for a row-parallel layer, has rows that cannot be shared out equally.
        """
        product = _Product(self.split, self.settings, self.stored, self.shares, self.layout, self.pad)
        return product.bind(type(self).__name__, x, self.in_features, self.parameters)()


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

    If x is sharded by rows, this is `flaxasync.all_gather_matmul`: some rows travel while others are multiplied. The
    parameters have the names and global shapes of those of `nnx.Linear`, so its checkpoints load.

    Args:
      in_features: The features of the input.
      out_features: The features of the output; a multiple of the axis, unless `pad`.
      pad: Whether out_features need not be a multiple of the axis. The output then has the next multiple of features,
        of which the last are as low as can be, so that none of them wins an argmax; the kernel keeps its shape
        [in, out], and is fetched by an all-to-all in every call. For an output over a vocabulary:
        `softmax_cross_entropy` leaves the padding out (`vocab_size`).
      shares: For layers that pad in other ways; see `flaxasync.nn.shares`.
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LinearOptions`. `use_bias` is True by default. If you give `in_spec`,
        its rows dimension names `axis_name`, or no axis where every device has all rows.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks the axis, or the axis does not divide out_features.
    """

    split = "out_features"

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
        self.pad = pad and shares is None
        if self.pad:
            axis_name = options.get("axis_name", LinearSettings.axis_name)
            shares = Shares.equal(out_features, mesh_axis_size("ColumnParallelLinear", axis_name))
        super().__init__(in_features, out_features, shares=shares, rngs=rngs, **options)


class RowParallelLinear(_ParallelLinear):
    """A Dense layer whose devices each hold a share of the input features.

    ```
    x       [..., s, in]     all rows, sharded by features over axis_name
    kernel  [in, out]        sharded by rows: [in/R, out] a device
    y       [..., s, out]    layout="sequence": sharded by rows; "replicated": the same on all devices of axis_name

    forward  y        = x @ kernel + bias              summed over axis_name
    backward dx       = dy @ kernel.T
             dkernel  = x.T @ dy                       summed over the axes that shard the batch
    ```

    This is `flaxasync.matmul_reduce_scatter` ("sequence") or `flaxasync.matmul_all_reduce` ("replicated"): some partial
    sums travel while others are computed. The parameters have the names and global shapes of those of `nnx.Linear`, so
    its checkpoints load.

    Args:
      in_features: The features of the input; a multiple of the axis.
      out_features: The features of the output.
      layout: How the rows of the output lie: "sequence" or "replicated".
      shares: For layers that pad their input; see `flaxasync.nn.shares`.
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LinearOptions`. `use_bias` is True by default, and all devices have the whole bias.
        If you give `in_spec`, its features dimension must name `axis_name`.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks the axis, or the axis does not divide in_features.
    """

    split = "in_features"

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


@dataclasses.dataclass(frozen=True)
class _Product:
    """What is static in the product of a layer."""

    split: Split
    settings: LinearSettings
    stored: shards.Stored
    shares: Shares
    layout: Layout = "replicated"  # of the output's rows, or of the input's where the output features are split
    pad: bool = False  # whether the last output features are padding, which wins no argmax

    def bind(self, caller: str, x: Array, in_features: int, read: Callable[[], tuple[Any, Any]]) -> Callable[[], Array]:
        """Returns the function that multiplies x with the kernel and adds the bias, which `read` returns."""
        axis_name, in_spec = self.settings.axis_name, self.settings.in_spec
        column = self.split == "out_features"
        placement = place(caller, x, axis_name, in_spec, sharded="rows" if column else "features")
        check_input(caller, x, in_features, placement)
        layout = placement.layout if column else self.layout
        if not column:
            check_output_rows(caller, x.shape[-2], layout, placement)
        linear = read()
        product = dataclasses.replace(self, settings=with_dtype(self.settings, x, *linear), layout=layout)
        out_spec = placement.spec(features=True) if column else placement.spec(layout)
        in_specs = placement.in_spec, self.stored
        return placement.bind(_column if column else _row, product, (x, linear), in_specs, out_spec)


def parameters(linear: _ParallelLinear | nnx.Linear) -> shards.Linear:
    """Returns the kernel and the bias (or None): global or, inside shard_map, local."""
    if isinstance(linear, nnx.Linear):
        return linear.kernel[...], None if linear.bias is None else linear.bias[...]
    kernel, bias = linear.parameters()
    return kernel, bias


def check_no_adapter(layer: str, *linears: nnx.Module | None) -> None:
    """Raises NotImplementedError for an adapted projection of a layer that does not call its projections."""
    for linear in linears:
        if isinstance(linear, nnx.LoRA):
            raise NotImplementedError(
                f"{layer} does not call its layers, so it cannot take a {type(linear).__name__}; adapt separate layers"
            )


def parameter_specs(linear: _ParallelLinear | nnx.Linear) -> tuple[P, P | None]:
    """Returns how `parameters` are stored. Those of an `nnx.Linear` are stored as their metadata says."""
    if not isinstance(linear, nnx.Linear):
        return linear.stored
    kernel = metadata_spec(linear.kernel, 2)
    return kernel, None if linear.bias is None else metadata_spec(linear.bias, 1)


def compute_settings(linear: _ParallelLinear, x: Array) -> LinearSettings:
    """Returns the settings of a layer with the dtype in which it multiplies `x`."""
    return with_dtype(linear.settings, x, *parameters(linear))


def with_dtype(settings: LinearSettings, x: Array, *params: Array | None) -> LinearSettings:
    """Returns the settings with the dtype in which `x` is multiplied with these parameters."""

    def promote(*arrays: Array | None) -> Any:
        return settings.promote_dtype(arrays, dtype=settings.dtype)

    return dataclasses.replace(settings, dtype=jax.eval_shape(promote, x, *params)[0].dtype)


def multiply_columns(caller: str, x: Array, kernel: Array, settings: LinearSettings) -> Array:
    """Returns x @ kernel as `ColumnParallelLinear` does; the messages of its errors begin with `caller`."""
    check_divides(caller, settings.axis_name, out_features=kernel.shape[1])
    return _multiply(caller, x, kernel, "out_features", P(None, settings.axis_name), settings, "replicated")


def multiply_rows(caller: str, x: Array, kernel: Array, settings: LinearSettings, *, layout: Layout) -> Array:
    """Returns x @ kernel as `RowParallelLinear` does; the messages of its errors begin with `caller`."""
    return _multiply(caller, x, kernel, "in_features", P(settings.axis_name, None), settings, layout)


def _multiply(
    caller: str, x: Array, kernel: Array, split: Split, spec: P, settings: LinearSettings, layout: Layout
) -> Array:
    size = kernel.shape[1 if split == "out_features" else 0]
    shares = Shares.equal(size, mesh_axis_size(caller, settings.axis_name))
    check_sharded(caller, "kernel", kernel, spec)
    product = _Product(split, settings, (spec, None), shares, layout)
    return product.bind(caller, x, kernel.shape[0], lambda: (kernel, None))()


def _column(product: _Product, x: Array, linear: shards.Linear) -> Array:
    settings, shares = product.settings, product.shares
    linear = shards.take_columns(shards.gather(linear, product.stored, x, settings), shares, settings.axis_name)
    multiply = shards.bind_columns(x, (linear,), settings, rows_sharded=product.layout == "sequence")
    y = shards.finish(multiply()[0], linear[1], settings)
    return shares.mask_padding(y, settings.axis_name) if product.pad else y


def _row(product: _Product, x: Array, linear: shards.Linear) -> Array:
    settings = product.settings
    linear = shards.gather(linear, product.stored, x, settings)
    linear = shards.take_rows(linear, product.shares, settings.axis_name)
    return shards.row(x, linear, settings, layout=product.layout)
