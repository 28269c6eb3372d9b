"""A tensor-parallel MLP, gated or not: its input makes one trip around the ring, and so does its
output.
"""

from typing import Unpack

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from flaxasync.nn import shards
from flaxasync.nn.linear import ColumnParallelLinear, RowParallelLinear, call_of, check_no_adapter
from flaxasync.nn.options import ConfiguredProducts, LinearOptions, Settings, settings_of
from flaxasync.nn.out_sharding import OutSharding, output_spec, shard_output
from flaxasync.nn.placement import place
from flaxasync.nn.shards import Call, Linear
from flaxasync.ops.matmul.activation import Activation, activate
from flaxasync.ops.matmul.mlp import parallel_mlp
from flaxasync.ops.saved import HIDDEN


class ParallelMLP(ConfiguredProducts):
    """Column-parallel up (and gate), an activation, row-parallel down.

    ```
    x  [..., s, features]          sharded by rows over axis_name, or the same on all of its devices
    h  [..., s, hidden_features]   activation(x @ gate) * (x @ up), or activation(x @ up); sharded by features
    y  [..., s, features]          h @ down; sharded as x is
    ```

    Gate and up share one trip of x. Where both products have one fused kernel each and no bias, the
    first kernel computes the activation, and the second its gradient. Saved for the backward pass
    are x and the products of gate and up; what lies between them and h is computed again. The
    parameters are those of three `nnx.Linear`: `gate`, `up` and `down`.

    Args:
      hidden_features: The features between the two; a multiple of the axis.
      gated: Whether there is a gate.
      activation: The activation of the gate, or of up where there is no gate. It is elementwise.
      **options: See `flaxasync.nn.LinearOptions`. `use_bias` is False by default. `in_spec` and
        errors are those of `ColumnParallelLinear`.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        gated: bool = True,
        activation: Activation = jax.nn.silu,
        rngs: nnx.Rngs,
        **options: Unpack[LinearOptions],
    ):
        options.setdefault("use_bias", False)
        self.settings = settings_of("ParallelMLP", options)
        self.activation = activation
        self.up = ColumnParallelLinear(features, hidden_features, rngs=rngs, **options)
        self.gate = (
            ColumnParallelLinear(features, hidden_features, rngs=rngs, **options) if gated else None
        )
        self.down = RowParallelLinear(hidden_features, features, rngs=rngs, **options)

    def __call__(
        self, inputs: Float[Array, "*batch s d"], out_sharding: OutSharding = None
    ) -> Float[Array, "*batch s d"]:
        """Applies the MLP. Raises NotImplementedError if a projection was adapted, and ValueError
        as `up` does.
        """
        columns = (self.up,) if self.gate is None else (self.up, self.gate)
        check_no_adapter("ParallelMLP", *columns, self.down)
        settings = self.settings
        features = self.up.in_features
        spec = output_spec("ParallelMLP", out_sharding, settings.axis_name)
        placement = place(
            "ParallelMLP", inputs, settings.axis_name, settings.in_spec, "rows", features
        )
        call, linears = call_of(settings, inputs, placement, *columns, self.down)
        static = (call, self.activation)
        in_specs = (placement.in_spec, call.specs)
        apply, args = placement.mapped(_mlp, static, (inputs, linears), in_specs, placement.in_spec)
        return shard_output(apply(*args), spec)


def _mlp(static: tuple[Call, Activation], x: Array, linears: tuple[Linear, ...]) -> Array:
    call, activation = static
    settings = call.settings
    *columns, down = call.take(x, linears)
    if call.rows_sharded and _is_one_op(columns, settings):
        x, kernels = shards.operands(x, (*columns, down), settings)
        y = parallel_mlp(
            x,
            kernels[:-1],
            kernels[-1],
            settings.axis_name,
            activation,
            gathered_bytes=settings.gathered_bytes,
            **settings.of_products(),
        )
        return shards.finish(y, down[1], settings)

    # otherwise all that lies between products and h would be saved: six arrays instead of two
    @jax.checkpoint
    def finish(products: tuple[Array, ...], down: Linear) -> Array:
        return shards.row(
            activate(activation, products), down, settings, rows_sharded=call.rows_sharded
        )

    products = shards.column(x, columns, settings, rows_sharded=call.rows_sharded)
    return finish(checkpoint_name(products, HIDDEN), down)


def _is_one_op(columns: list[Linear], settings: Settings) -> bool:
    """Says whether `parallel_mlp` does what `column`, the activation and `row` do, on rows that are
    sharded.
    """
    return (
        all(bias is None for _, bias in columns)
        and not shards.needs_one_product(settings)
        and settings.preferred_element_type in (None, settings.dtype)
    )
