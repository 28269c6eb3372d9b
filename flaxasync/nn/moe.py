"""A mixture of experts as a drop-in for `ParallelMLP`: the experts are split over an axis, and rows
travel to them.
"""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from flaxasync.mesh import mesh_axis_size
from flaxasync.nn import shards
from flaxasync.nn.fully_sharded import StoredLayer, stored_parameter
from flaxasync.nn.linear import WholeLinear, with_dtype
from flaxasync.nn.mlp import ParallelMLP
from flaxasync.nn.options import ExpertOptions, Settings, settings_of
from flaxasync.nn.out_sharding import OutSharding, output_spec, shard_output
from flaxasync.nn.placement import check_divides, place
from flaxasync.nn.router import RouterOptions, Routing, route, routing_facts
from flaxasync.nn.shards import Call, Linear, Part
from flaxasync.nn.uneven_shares import Shares
from flaxasync.ops.choose import if_available
from flaxasync.ops.experts.api import expert_mlp
from flaxasync.ops.experts.assignments import dropped
from flaxasync.ops.experts.local import Split
from flaxasync.ops.matmul.activation import Activation


class Router(WholeLinear):
    """Scores experts: the kernel [D, E] of a Dense layer, the same on all devices of the axis."""

    def __init__(self, features: int, experts: int, bias: bool, settings: Settings, rngs: nnx.Rngs):
        super().__init__(
            "ParallelMoE", features, experts, dataclasses.replace(settings, use_bias=False), rngs
        )
        self.selection_bias = nnx.Variable(jnp.zeros(experts, jnp.float32)) if bias else None


class ParallelMoE(StoredLayer):
    """A mixture of experts, each a gated MLP. Rows choose some of them, and travel while experts
    multiply.

    ```
    x         [..., s, features]     sharded by rows over axis_name, or the same on all of its devices
    router    kernel [D, E]          on all devices; float32 scores
    up, gate  [E, D, F]              sharded by experts; by F where there are fewer experts than devices
    down      [E, F, D]
    y         [..., s, features]     sum of weight * (activation(x @ gate) * (x @ up)) @ down over the experts of a row
    ```

    It is `flaxasync.expert_mlp`: no row is dropped, unless a capacity says so. Experts that the
    axis does not divide are padded where the layer computes; parameters, gradients and checkpoints
    have the shapes above. Rows travel around a ring, or with `backend="exchange"` only to devices
    that have an expert they chose; see docs/moe.md for which.

    `y, routing = moe.with_routing(x)` also returns the losses and statistics of the choice, for
    training. `moe(x)` records them as `nnx.Intermediate`, under the name "routing", for
    `nnx.capture`.

    Args:
      features, hidden: D, and F of each expert.
      experts: E, the number of experts.
      experts_per_token: k, how many of them a row chooses.
      router: How it chooses; see `flaxasync.nn.RouterOptions`.
      shared_hidden: The hidden features of an expert that every row has, a `ParallelMLP` under the
        name `shared`, which the axis splits; 0 for none.
      capacity_factor: Drops rows: an expert takes at most this factor times the mean, k / E, of the
        rows of a device. None drops none.
      gated: Whether there is a gate.
      activation: The activation of the gate, or of up where there is no gate. It is elementwise.
      **options: See `flaxasync.nn.ExpertOptions`. `in_spec` and errors are those of
        `ColumnParallelLinear`.

    Raises:
      ValueError: experts_per_token is not one of 1 .. experts; the capacity factor is not positive;
        there are fewer experts than devices on the axis, and it does not divide `hidden`.
    """

    names = ("up", "gate", "down")

    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int,
        *,
        experts_per_token: int,
        router: RouterOptions = RouterOptions(),  # noqa: B008  it is frozen
        shared_hidden: int = 0,
        capacity_factor: float | None = None,
        gated: bool = True,
        activation: Activation = jax.nn.silu,
        rngs: nnx.Rngs,
        **options: Unpack[ExpertOptions],
    ):
        if not 1 <= experts_per_token <= experts:
            raise ValueError(
                f"ParallelMoE lets a row choose each of {experts} experts once: got "
                f"experts_per_token={experts_per_token}; use 1 to {experts}"
            )
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(
                f"ParallelMoE needs a capacity_factor above 0: got {capacity_factor}; use None to "
                "drop no rows"
            )
        if "out_sharding" in options.get("kernel_metadata", {}):
            raise ValueError(
                "ParallelMoE takes no out_sharding in kernel_metadata: its parameters are sharded "
                "over axis_name and fsdp_axis"
            )
        self.settings = settings = settings_of(
            "ParallelMoE", options, ExpertOptions.__annotations__
        )
        self.features = features
        self.hidden = hidden
        self.experts = experts
        self.experts_per_token = experts_per_token
        self.capacity_factor = capacity_factor
        self.activation = activation
        self.router_options = router
        devices = mesh_axis_size("ParallelMoE", settings.axis_name)
        if experts >= devices:
            self.split: Split = "experts"
            self.shares = Shares.equal(experts, devices)
            self.dims = {"up": 0, "gate": 0, "down": 0}
        else:
            self.split = "hidden"
            check_divides(
                "ParallelMoE with fewer experts than devices", settings.axis_name, hidden=hidden
            )
            self.shares = Shares.equal(hidden, devices)
            self.dims = {"up": 2, "gate": 2, "down": 1}
        self.router = Router(features, experts, router.selection_bias, settings, rngs)
        self.gate: nnx.Param[jax.Array] | None = nnx.data(None)
        stored: list[P | None] = []
        for name, dim in self.dims.items():
            if name == "gate" and not gated:
                stored.append(None)
                continue
            if name == "down":
                shape = (experts, hidden, features)
            else:
                shape = (experts, features, hidden)
            value = _initial(settings.kernel_init, rngs.params(), shape, settings.param_dtype)
            needed = self.shares.spec(settings.axis_name, shape, dim)
            parameter, spec = stored_parameter(
                "ParallelMoE", name, value, settings, needed, settings.kernel_metadata
            )
            setattr(self, name, parameter)
            stored.append(spec)
        self.stored = tuple(stored)
        if shared_hidden:
            backend = if_available("all_gather_matmul", settings.backend)
            mlp_options: Any = {**options, "backend": backend}
            self.shared: ParallelMLP | None = ParallelMLP(
                features,
                shared_hidden,
                gated=gated,
                activation=activation,
                use_bias=False,
                rngs=rngs,
                **mlp_options,
            )
        else:
            self.shared = None

    def __call__(
        self, inputs: Float[Array, "*batch s d"], out_sharding: OutSharding = None
    ) -> Float[Array, "*batch s d"]:
        """Applies the layer. Raises ValueError as `ColumnParallelLinear` does."""
        spec = output_spec("ParallelMoE", out_sharding, self.settings.axis_name)
        y, routing = self.with_routing(inputs)
        self.sow(nnx.Intermediate, "routing", routing, capture_noop=True)
        return shard_output(y, spec)

    def with_routing(
        self, x: Float[Array, "*batch s d"]
    ) -> tuple[Float[Array, "*batch s d"], Routing]:
        """Applies the layer, and returns how rows were routed as well, over all devices."""
        settings = self.settings
        selection_bias = self.router.selection_bias
        placement = place(
            "ParallelMoE", x, settings.axis_name, settings.in_spec, "rows", self.features
        )
        kernels = tuple((kernel, None) for kernel in self.parameters() if kernel is not None)
        linears = (self.router.parameters(), *kernels)
        parts = (
            self.router.part,
            *(Part(spec, None, self.shares, self.dims[name]) for name, spec in self.specs.items()),
        )
        call = _ExpertCall(
            with_dtype(settings, x, *kernels[0]),
            parts,
            placement.rows_sharded,
            k=self.experts_per_token,
            experts=self.experts,
            router=self.router_options,
            capacity_factor=self.capacity_factor,
            activation=self.activation,
            split=self.split,
        )
        args = x, linears, None if selection_bias is None else selection_bias[...]
        in_specs = (placement.in_spec, call.specs, P(None))
        out_specs = (placement.in_spec, P())
        y, facts = placement.run(_apply, call, args, in_specs, out_specs)
        if self.shared is not None:
            y += self.shared(x)
        return y, facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ExpertCall(Call):
    """What is static in a call. The parts are those of the router and of the experts' kernels."""

    k: int
    experts: int
    router: RouterOptions
    capacity_factor: float | None
    activation: Activation
    split: Split


def _apply(
    call: _ExpertCall, x: Array, linears: tuple[Linear, ...], selection_bias: Array | None
) -> tuple[Array, Routing]:
    settings = call.settings
    axis_name = settings.axis_name
    wide = jnp.promote_types(jnp.float32, x.dtype)
    router, _ = call.take_part(x, call.parts[0], linears[0], wide)
    of_experts = zip(call.parts[1:], linears[1:], strict=True)
    kernels = [call.take_part(x, *each) for each in of_experts]
    logits = lax.dot_general(
        x.astype(wide),
        shards.cast(router, x, wide),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    choice = route(logits, call.k, call.router, selection_bias)
    rows = x.astype(settings.dtype).reshape(-1, x.shape[-1])
    chosen = choice.ids.reshape(-1, call.k)
    factors = choice.weights.reshape(-1, call.k)
    count = rows.shape[0]
    is_row = jnp.ones((count, 1), bool)  # False where `local_entries` pads
    if not call.rows_sharded:  # every device has all rows, and takes its part of them
        shares = Shares.equal(count, lax.axis_size(axis_name))
        rows, chosen, factors, is_row = (
            shares.local_entries(y, axis_name, 0) for y in (rows, chosen, factors, is_row)
        )
        # A row chooses different experts, also one of padding, whose weights are zeros.
        chosen = jnp.where(is_row, chosen, jnp.arange(call.k, dtype=chosen.dtype))
    capacity = None
    if call.capacity_factor is not None:
        capacity = max(1, int(call.capacity_factor * rows.shape[0] * call.k / call.experts))
    # in the order of `ParallelMoE.names`; there may be no gate
    up, *gate, down = (shards.cast(kernel, x, settings.dtype) for kernel, _ in kernels)
    y = expert_mlp(
        rows,
        chosen,
        factors,
        gate[0] if gate else None,
        up,
        down,
        axis_name,
        activation=call.activation,
        split=call.split,
        capacity=capacity,
        precision=settings.precision,
        backend=if_available("expert_mlp", settings.backend),
    )
    if not call.rows_sharded:
        y = lax.all_gather(y, axis_name, axis=0, tiled=True, to="invarying")[:count]
    left_out = jnp.int32(0)
    if capacity is not None:
        left_out = dropped(jnp.where(is_row, chosen, -1), call.experts, capacity)
        if not call.rows_sharded:  # `routing_facts` sums over the axes of x alone
            left_out = lax.psum(left_out, axis_name)
    return y.reshape(x.shape), routing_facts(logits, choice, left_out, jax.typeof(x).mat.varying)


def _initial(init: Initializer, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draws the kernel of every expert as that of a Dense layer."""
    return jax.vmap(lambda key: init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))
