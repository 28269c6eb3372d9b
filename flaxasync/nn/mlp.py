"""A tensor-parallel MLP, gated or not: its input makes one trip around the ring, and so does its output."""

import dataclasses
from typing import Unpack

import jax
from flax import nnx
from jaxtyping import Array, Float

from flaxasync.nn import shards
from flaxasync.nn.checks import check_input
from flaxasync.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    check_no_adapter,
    compute_settings,
    parameter_specs,
    parameters,
)
from flaxasync.nn.options import LinearOptions, LinearSettings, settings_of
from flaxasync.nn.placement import place
from flaxasync.ops.matmul.mlp import Activation, activate


class ParallelMLP(nnx.Module):
    """Column-parallel up (and gate), an activation, row-parallel down.

    ```
    x  [..., s, features]          sharded by rows over axis_name, or the same on all of its devices
    h  [..., s, hidden_features]   activation(x @ gate) * (x @ up), or activation(x @ up); sharded by features
    y  [..., s, features]          h @ down; sharded as x is
    ```

    Gate and up share one trip of x. Nothing between the two rings leaves the device. Where both products have one fused
    kernel each and no bias, the first kernel computes the activation, and the second its gradient. Saved for the
    backward pass are x and the products of gate and up; what lies between them and h is computed again. The parameters
    are those of three `nnx.Linear`: `gate`, `up` and `down`.

    Args:
      features: The features of input and output.
      hidden_features: The features between the two; a multiple of the axis.
      gated: Whether there is a gate.
      activation: The activation of the gate, or of up where there is no gate. It is elementwise.
      rngs: The random streams; the layer draws from `params`.
      **options: See `flaxasync.nn.LinearOptions`. `use_bias` is False by default. If you give `in_spec`,
        its rows dimension names `axis_name`, or no axis where every device has all rows.

    Raises:
      TypeError: A keyword is unknown.
      ValueError: No mesh is set, it lacks the axis, or the axis does not divide hidden_features.
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
        self.settings = settings_of(LinearSettings, "ParallelMLP", options)
        self.activation = activation
        self.up = ColumnParallelLinear(features, hidden_features, rngs=rngs, **options)
        self.gate = ColumnParallelLinear(features, hidden_features, rngs=rngs, **options) if gated else None
        self.down = RowParallelLinear(hidden_features, features, rngs=rngs, **options)

    def __call__(self, x: Float[Array, "*batch s d"]) -> Float[Array, "*batch s d"]:
        """Applies the MLP.

        Raises:
          ValueError: No mesh is set, it lacks the axis, or x has other features.
          NotImplementedError: A projection was adapted.
        """
        check_no_adapter("ParallelMLP", self.up, self.gate, self.down)
        placement = place("ParallelMLP", x, self.settings.axis_name, self.settings.in_spec, sharded="rows")
        check_input("ParallelMLP", x, self.up.in_features, placement)
        columns = (self.up,) if self.gate is None else (self.up, self.gate)
        stored = tuple(map(parameter_specs, columns))
        call = _Call(
            compute_settings(self.up, x), stored, parameter_specs(self.down), self.activation, placement.rows_sharded
        )
        args = x, tuple(map(parameters, columns)), parameters(self.down)
        return placement.run(_mlp, call, args, (placement.in_spec, stored, call.stored_down), placement.in_spec)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in a call: the settings with the dtype of the computation, and how the parameters are stored."""

    settings: LinearSettings
    stored: tuple[shards.Stored, ...]
    stored_down: shards.Stored
    activation: Activation
    rows_sharded: bool


def _mlp(call: _Call, x: Array, columns: tuple[shards.Linear, ...], down: shards.Linear) -> Array:
    settings = call.settings
    columns = tuple(shards.gather(p, spec, x, settings) for p, spec in zip(columns, call.stored, strict=True))
    down = shards.gather(down, call.stored_down, x, settings)
    y = shards.mlp(x, columns, down, call.activation, settings) if call.rows_sharded else None
    if y is not None:
        return y

    @jax.checkpoint  # otherwise all that lies between products and h would be saved: six arrays instead of two
    def finish(products: tuple[Array, ...], down: shards.Linear) -> Array:
        hidden = activate(call.activation, products)
        return shards.row(hidden, down, settings, layout="sequence" if call.rows_sharded else "replicated")

    return finish(shards.column(x, columns, settings, rows_sharded=call.rows_sharded), down)
