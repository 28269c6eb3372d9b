"""Column- and row-parallel Dense layers: `nnx.Linear` with its kernel split over a mesh axis.

A column-parallel layer followed by a row-parallel one is the tensor-parallel pair: between the two, activations are
sharded by features; around them, by rows of the sequence, so that norms and residuals are split, too.
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flaxasync.nn import shards
from flaxasync.nn.placement import Layout, check_divides, check_input, check_layout, check_rows, place

default_kernel_init = nnx.initializers.lecun_normal()  # as nnx.Linear
default_bias_init = nnx.initializers.zeros_init()


class _ParallelLinear(nnx.Module):
    """The parameters of `nnx.Linear`, under its names and in its global shapes, split over one mesh axis."""

    split: ClassVar[Literal["in_features", "out_features"]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: str = "model",
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        backend: str | None = None,
        in_spec: P | None = None,
        rngs: nnx.Rngs,
    ):
        check_divides(
            type(self).__name__,
            axis_name,
            **{self.split: {"in_features": in_features, "out_features": out_features}[self.split]},
        )
        self.in_features = in_features
        self.out_features = out_features
        self.axis_name = axis_name
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.backend = backend
        self.in_spec = in_spec
        by_columns = self.split == "out_features"
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = nnx.Param(kernel, out_sharding=(None, axis_name) if by_columns else (axis_name, None))
        self.bias: nnx.Param[jax.Array] | None
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = nnx.Param(bias, out_sharding=(axis_name if by_columns else None,))
        else:
            self.bias = nnx.data(None)

    def parameters(self) -> shards.Linear:
        """Kernel and bias (or None), global or, inside shard_map, local."""
        return self.kernel[...], None if self.bias is None else self.bias[...]

    def specs(self) -> tuple[P, P | None]:
        """How `parameters` are sharded."""
        by_columns = self.split == "out_features"
        kernel = P(None, self.axis_name) if by_columns else P(self.axis_name, None)
        return kernel, None if self.bias is None else P(self.axis_name if by_columns else None)

    def options(self, x: Array) -> shards.Options:
        """What the products of this layer with `x` have in common."""
        dtype = canonicalize_dtype(x, *self.parameters(), dtype=self.dtype)
        return shards.Options(self.axis_name, dtype, self.backend, self.precision)


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

    With x sharded by rows this is `flaxasync.all_gather_matmul`: rows travel while others are multiplied. Parameters
    have the names and global shapes of `nnx.Linear`'s, so its checkpoints load.

    Args:
      in_features: of the input.
      out_features: of the output; a multiple of the axis.
      axis_name: the mesh axis that splits the kernel. The mesh is the ambient one, of `jax.set_mesh`.
      use_bias: whether to add a bias.
      dtype: of the computation; by default the input's and the parameters' common type.
      param_dtype: of the parameters.
      precision: of the matmul, as in `lax.dot_general`.
      kernel_init: of the kernel.
      bias_init: of the bias.
      backend: of the ring; see `flaxasync.all_gather_matmul`.
      in_spec: how the input is sharded, under Auto axes; by default the leading dimension over the other axes, and the
        rows over `axis_name`. Under Explicit axes the input's type says it.
      rngs: the random streams; draws from `params`.

    Raises:
      ValueError: no mesh is set, it lacks the axis, or out_features does not divide by it.
    """

    split = "out_features"

    def __call__(self, x: Float[Array, "*batch s in"]) -> Float[Array, "*batch s out"]:
        """Applies the layer.

        Raises:
          ValueError: no mesh is set, it lacks the axis, x has other features or is sharded by features.
        """
        placement = place("ColumnParallelLinear", x, self.axis_name, self.in_spec, sharded="rows")
        check_input("ColumnParallelLinear", x, self.in_features, placement)
        options = self.options(x)

        def apply(x: Array, linear: shards.Linear) -> Array:
            return shards.column(x, (linear,), options, rows_sharded=placement.rows_sharded)[0]

        return placement.run(
            apply, (x, self.parameters()), (placement.in_spec, self.specs()), placement.spec(features=True)
        )


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

    This is `flaxasync.matmul_reduce_scatter` ("sequence") or `flaxasync.matmul_all_reduce` ("replicated"): partial sums
    travel while others are computed. Parameters have the names and global shapes of `nnx.Linear`'s, so its checkpoints
    load.

    Args:
      in_features: of the input; a multiple of the axis.
      out_features: of the output.
      layout: of the output's rows.
      axis_name: the mesh axis that splits the kernel. The mesh is the ambient one, of `jax.set_mesh`.
      use_bias: whether to add a bias; it is the same on all devices.
      dtype: of the computation; by default the input's and the parameters' common type.
      param_dtype: of the parameters.
      precision: of the matmul, as in `lax.dot_general`.
      kernel_init: of the kernel.
      bias_init: of the bias.
      backend: of the ring; see `flaxasync.matmul_reduce_scatter`.
      in_spec: how the input is sharded, under Auto axes; by default the leading dimension over the other axes, and the
        features over `axis_name`. Under Explicit axes the input's type says it.
      rngs: the random streams; draws from `params`.

    Raises:
      ValueError: no mesh is set, it lacks the axis, or in_features does not divide by it.
    """

    split = "in_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        layout: Layout = "sequence",
        axis_name: str = "model",
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        backend: str | None = None,
        in_spec: P | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            out_features,
            axis_name=axis_name,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            backend=backend,
            in_spec=in_spec,
            rngs=rngs,
        )
        self.layout: Layout = check_layout("RowParallelLinear", layout)

    def __call__(self, x: Float[Array, "*batch s in"]) -> Float[Array, "*batch s out"]:
        """Applies the layer.

        Raises:
          ValueError: no mesh is set, it lacks the axis, x has other features, is not sharded by them, or has rows
            that cannot be shared out.
        """
        placement = place("RowParallelLinear", x, self.axis_name, self.in_spec, sharded="features")
        check_input("RowParallelLinear", x, self.in_features, placement)
        check_rows("RowParallelLinear", x.shape[-2], self.layout, placement)
        options = self.options(x)

        def apply(x: Array, linear: shards.Linear) -> Array:
            return shards.row(x, linear, options, layout=self.layout)

        return placement.run(
            apply, (x, self.parameters()), (placement.in_spec, self.specs()), placement.spec(self.layout)
        )
