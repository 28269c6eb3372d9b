"""A tensor-parallel MLP, gated or not: one trip in, one trip out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flaxasync.nn import shards
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear, default_bias_init, default_kernel_init
from flaxasync.nn.placement import Layout, check_input, place


class ParallelMLP(nnx.Module):
    """Column-parallel up (and gate), an activation, row-parallel down.

    ```
    x  [..., s, features]          sharded by rows over axis_name, or the same on all of its devices
    h  [..., s, hidden_features]   activation(x @ gate) * (x @ up), or activation(x @ up); sharded by features
    y  [..., s, features]          h @ down; sharded as x is
    ```

    Gate and up share one trip of x. Nothing between the two rings leaves the device. Saved for the backward pass are x
    and the products of gate and up; what lies between them and h is computed again. The parameters are those of three
    `nnx.Linear`: `gate`, `up` and `down`.

    Args:
      features: of input and output.
      hidden_features: between the two; a multiple of the axis.
      gated: whether there is a gate.
      activation: of the gate, or of up where there is none; elementwise.
      axis_name: the mesh axis that splits the hidden features.
      use_bias: whether the projections have biases.
      dtype: of the computation; by default the input's and the parameters' common type.
      param_dtype: of the parameters.
      precision: of the matmuls.
      kernel_init: of the kernels.
      bias_init: of the biases.
      backend: of the rings; see `flaxasync.all_gather_matmul`.
      in_spec: how the input is sharded, under Auto axes; see `ColumnParallelLinear`.
      rngs: the random streams; draws from `params`.

    Raises:
      ValueError: no mesh is set, it lacks the axis, or hidden_features does not divide by it.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        gated: bool = True,
        activation: Callable[[Array], Array] = jax.nn.silu,
        axis_name: str = "model",
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        backend: str | None = None,
        in_spec: P | None = None,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {
            "axis_name": axis_name,
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "backend": backend,
            "in_spec": in_spec,
            "rngs": rngs,
        }
        self.activation = activation
        self.up = ColumnParallelLinear(features, hidden_features, **options)
        self.gate = ColumnParallelLinear(features, hidden_features, **options) if gated else None
        self.down = RowParallelLinear(hidden_features, features, **options)

    def __call__(self, x: Float[Array, "*batch s d"]) -> Float[Array, "*batch s d"]:
        """Applies the MLP.

        Raises:
          ValueError: no mesh is set, it lacks the axis, or x has other features.
        """
        up = self.up
        placement = place("ParallelMLP", x, up.axis_name, up.in_spec, sharded="rows")
        check_input("ParallelMLP", x, up.in_features, placement)
        layout: Layout = "sequence" if placement.rows_sharded else "replicated"
        options = up.options(x)
        columns = (up,) if self.gate is None else (up, self.gate)

        @jax.checkpoint  # or all that lies between products and h would be saved: six arrays instead of two
        def activate(products: tuple[Array, ...], down: shards.Linear) -> Array:
            hidden, *gate = products
            hidden = self.activation(gate[0]) * hidden if gate else self.activation(hidden)
            return shards.row(hidden, down, options, layout=layout)

        def apply(x: Array, linears: tuple[shards.Linear, ...], down: shards.Linear) -> Array:
            return activate(shards.column(x, linears, options, rows_sharded=placement.rows_sharded), down)

        return placement.run(
            apply,
            (x, tuple(linear.parameters() for linear in columns), self.down.parameters()),
            (placement.in_spec, tuple(linear.specs() for linear in columns), self.down.specs()),
            placement.in_spec,
        )
