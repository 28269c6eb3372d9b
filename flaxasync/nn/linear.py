"""Column- and row-parallel Dense layers: `nnx.Linear` with its kernel split over a mesh axis.

A column-parallel layer followed by a row-parallel one is the tensor-parallel pair. Between the two, activations are
sharded by features; around them, by rows of the sequence, so that norms and residuals are split too.
"""

import dataclasses
from typing import ClassVar, Literal, Unpack

import jax
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from flaxasync.nn import shards
from flaxasync.nn.options import LinearOptions, LinearSettings, settings_of
from flaxasync.nn.placement import (
    Layout,
    check_divides,
    check_input,
    check_output_layout,
    check_output_rows,
    place,
)


class _ParallelLinear(nnx.Module):
    """The parameters of `nnx.Linear`, under its names and in its global shapes, split over one mesh axis."""

    split: ClassVar[Literal["in_features", "out_features"]]

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs, **options: Unpack[LinearOptions]):
        layer, features = type(self).__name__, {"in_features": in_features, "out_features": out_features}
        self.settings = settings_of(LinearSettings, layer, options)
        check_divides(layer, self.settings.axis_name, **{self.split: features[self.split]})
        self.in_features, self.out_features = in_features, out_features
        kernel_spec, bias_spec = self._specs
        dtype = self.settings.param_dtype
        kernel = self.settings.kernel_init(rngs.params(), (in_features, out_features), dtype)
        self.kernel = nnx.Param(kernel, out_sharding=tuple(kernel_spec))
        self.bias: nnx.Param[jax.Array] | None
        if self.settings.use_bias:
            bias = self.settings.bias_init(rngs.params(), (out_features,), dtype)
            self.bias = nnx.Param(bias, out_sharding=tuple(bias_spec))
        else:
            self.bias = nnx.data(None)

    @property
    def _specs(self) -> tuple[P, P]:
        """How the kernel and the bias are sharded."""
        axis_name = self.settings.axis_name
        if self.split == "out_features":
            return P(None, axis_name), P(axis_name)
        return P(axis_name, None), P(None)


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
      out_features: The features of the output; a multiple of the axis.
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LinearOptions`. `use_bias` is True by default; `in_spec` has the rows over
        `axis_name`.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks the axis, or the axis does not divide out_features.
    """

    split = "out_features"

    def __call__(self, x: Float[Array, "*batch s in"]) -> Float[Array, "*batch s out"]:
        """Applies the layer.

        Raises:
          ValueError: No mesh is set, it lacks the axis, x has other features or is sharded by features.
        """
        placement = place("ColumnParallelLinear", x, self.settings.axis_name, self.settings.in_spec, sharded="rows")
        check_input("ColumnParallelLinear", x, self.in_features, placement)
        settings = compute_settings(self, x)

        def apply(x: Array, linear: shards.Linear) -> Array:
            return shards.column(x, (linear,), settings, rows_sharded=placement.rows_sharded)[0]

        specs = placement.in_spec, parameter_specs(self)
        return placement.run(apply, (x, parameters(self)), specs, placement.spec(features=True))


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
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LinearOptions`. `use_bias` is True by default, and all devices have the whole bias;
        `in_spec` has the features over `axis_name`.

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
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.layout: Layout = check_output_layout("RowParallelLinear", layout)

    def __call__(self, x: Float[Array, "*batch s in"]) -> Float[Array, "*batch s out"]:
        """Applies the layer.

        Raises:
          ValueError: No mesh is set, it lacks the axis, x has other features, is not sharded by them, or has rows
            that cannot be shared out equally.
        """
        placement = place("RowParallelLinear", x, self.settings.axis_name, self.settings.in_spec, sharded="features")
        check_input("RowParallelLinear", x, self.in_features, placement)
        check_output_rows("RowParallelLinear", x.shape[-2], self.layout, placement)
        settings = compute_settings(self, x)

        def apply(x: Array, linear: shards.Linear) -> Array:
            return shards.row(x, linear, settings, layout=self.layout)

        specs = placement.in_spec, parameter_specs(self)
        return placement.run(apply, (x, parameters(self)), specs, placement.spec(self.layout))


def parameters(linear: _ParallelLinear | nnx.Linear) -> shards.Linear:
    """Returns the kernel and the bias (or None): global or, inside shard_map, local."""
    return linear.kernel[...], None if linear.bias is None else linear.bias[...]


def parameter_specs(linear: _ParallelLinear | nnx.Linear) -> tuple[P, P | None]:
    """Returns how `parameters` are sharded. Those of an `nnx.Linear` are the same on all devices."""
    kernel, bias = (P(None, None), P(None)) if isinstance(linear, nnx.Linear) else linear._specs
    return kernel, None if linear.bias is None else bias


def compute_settings(linear: _ParallelLinear, x: Array) -> LinearSettings:
    """Returns the settings of a layer with the dtype in which it multiplies `x`."""
    dtype = canonicalize_dtype(x, *parameters(linear), dtype=linear.settings.dtype)
    return dataclasses.replace(linear.settings, dtype=dtype)
