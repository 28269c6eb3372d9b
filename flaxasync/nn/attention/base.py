"""What the attention layers share: four projections, norms of heads, and how they run on shards, or
with a cache.

The cache of keys and values follows `nnx.MultiHeadAttention`, and each device has the key-value
heads that it uses. With fewer key-value heads than devices, several devices hold the same head, so
that no head ever travels.

```
cached_key, cached_value  [b, length, R * local heads, head_dim]
cache_index               []                                        the rows so far
```
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from flaxasync.kernels.attention_block import Mask
from flaxasync.nn.attention import exchange, halves
from flaxasync.nn.attention.exchange import AttentionCall, Weights, project_inputs, project_output
from flaxasync.nn.attention.heads import HeadAttention, Inputs, Norms
from flaxasync.nn.attention.protocol import LikeMultiHeadAttention, check_qkv_sharding
from flaxasync.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
    check_no_adapter,
    with_dtype,
)
from flaxasync.nn.options import Settings
from flaxasync.nn.out_sharding import OutSharding
from flaxasync.nn.placement import Placement, place
from flaxasync.nn.shards import Linear
from flaxasync.ops.attention.dense import dense_attention
from flaxasync.ops.attention.layouts import check_segments


class AttentionLayer(LikeMultiHeadAttention):
    """Three projections, the attention of heads, and a projection of their output.

    A subclass sets the attributes that are declared here, and then calls `_add_norms`.
    """

    settings: Settings
    attention: HeadAttention
    query: ColumnParallelLinear | WholeLinear
    key: ColumnParallelLinear | WholeLinear
    value: ColumnParallelLinear | WholeLinear
    out: RowParallelLinear | WholeLinear

    def _add_norms(self, rngs: nnx.Rngs) -> None:
        """Sets the norms of queries and keys, if there are any, and room for a cache."""
        self.deterministic = self.attention.deterministic  # `nnx.Module.eval` and `train` set it
        self.decode = None
        self.query_ln: Any = nnx.data(None)
        self.key_ln: Any = nnx.data(None)
        self.cached_key: nnx.Cache[Array] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Array] | None = nnx.data(None)
        attention = self.attention
        if not attention.normalize_qk:
            return
        norm: Any = functools.partial(nnx.LayerNorm, use_bias=False)
        if attention.normalize_qk == "rms":
            norm = nnx.RMSNorm
        make = functools.partial(
            norm,
            attention.head_dim,
            epsilon=attention.qk_epsilon,
            param_dtype=self.settings.param_dtype,
            rngs=rngs,
        )
        self.query_ln = make()
        self.key_ln = make()


def place_input(
    layer: AttentionLayer, x: Array, segment_ids: Array | None, context_axis: str | None = None
) -> Placement:
    """Reads how the input of a layer is sharded, and checks the input and its segments."""
    name = type(layer).__name__
    check_no_adapter(name, layer.query, layer.key, layer.value, layer.out)
    settings = layer.settings
    features = layer.query.in_features
    placement = place(name, x, settings.axis_name, settings.in_spec, "rows", features, context_axis)
    check_segments(name, segment_ids, x.shape)
    if x.ndim != 3:
        raise ValueError(f"{name} needs an input [batch, rows, features]: got {list(x.shape)}")
    return placement


def make_call(
    layer: AttentionLayer,
    x: Array,
    placement: Placement,
    kv_placement: Placement,
    *,
    is_causal: bool = False,
) -> tuple[AttentionCall, tuple[Linear, ...], Norms]:
    """Returns what is static in a call, and the parameters. The inputs of queries and of keys are
    sharded as told.
    """
    projections = layer.query, layer.key, layer.value, layer.out
    linears = tuple(p.parameters() for p in projections)
    parts = tuple(p.part for p in projections)
    norms = Norms(
        *(None if norm is None else norm.scale[...] for norm in (layer.query_ln, layer.key_ln))
    )
    settings = with_dtype(
        layer.settings, x, *(parameter for linear in linears for parameter in linear)
    )
    attention = dataclasses.replace(layer.attention, causal=layer.attention.causal or is_causal)
    splits_heads = attention.context_axis != settings.axis_name
    if not splits_heads:
        # it is that of ring attention; projections are local
        settings = dataclasses.replace(settings, backend=None)
    call = AttentionCall(
        settings,
        parts,
        splits_heads and placement.rows_sharded,
        attention=attention,
        splits_heads=splits_heads,
        kv_rows_sharded=splits_heads and kv_placement.rows_sharded,
    )
    return call, linears, norms


def run(
    layer: AttentionLayer,
    x: Array,
    inputs: Inputs[Array],
    placement: Placement,
    kv_placement: Placement,
    is_causal: bool,
) -> Array:
    """Runs a layer on its shards. The output is sharded as x is."""
    call, linears, norms = make_call(layer, x, placement, kv_placement, is_causal=is_causal)
    specs = Inputs(
        inputs_k=kv_placement.in_spec,
        inputs_v=kv_placement.in_spec,
        segment_ids=placement.token_spec() if call.splits_heads else P(*placement.in_spec[:2]),
        mask=scores_spec(inputs.mask, placement, x.shape[0]),
        bias=scores_spec(inputs.bias, placement, x.shape[0]),
        dropout_key=P(None),
    )
    in_specs = placement.in_spec, call.specs, P(None), specs
    apply, args = placement.mapped(
        _apply, call, (x, linears, norms, inputs), in_specs, placement.in_spec
    )
    return apply(*args)


def _apply(
    call: AttentionCall, x: Array, linears: tuple[Linear, ...], norms: Norms, inputs: Inputs[Array]
) -> Array:
    """Applies a layer to the shards of this device, inside shard_map."""
    weights = Weights(*call.take(x, linears))
    inputs = _take_inputs(call, x, inputs)
    form = exchange.choose(call, x, weights, inputs)
    if form is not None:
        return exchange.apply(call, form, x, weights, norms, inputs.segment_ids)
    if halves.are_faster(call, x, weights, inputs):
        return halves.apply(call, x, weights, norms, inputs.segment_ids)
    query, key, value = project_inputs(call, x, weights, inputs)
    heads = call.attention.attend(query, key, value, inputs, norms)
    return project_output(call, heads, weights.out)


def _take_inputs(call: AttentionCall, x: Array, inputs: Inputs[Array]) -> Inputs[Array]:
    """Returns the mask and the bias of this device's heads, and a key of its own, for its part of
    the batch.
    """
    axis_name = call.settings.axis_name
    shares = call.parts[0].shares

    def of_own_heads(scores: Array | None) -> Array | None:
        if scores is None or scores.shape[1] == 1:
            return scores
        return shares.local_entries(scores, axis_name, 1)

    mask = of_own_heads(inputs.mask)
    bias = of_own_heads(inputs.bias)
    key = inputs.dropout_key
    if key is not None:
        key = jax.random.wrap_key_data(key)
        for axis in sorted(jax.typeof(x).mat.varying | {axis_name}):
            key = jax.random.fold_in(key, lax.axis_index(axis))
    return inputs._replace(mask=mask, bias=bias, dropout_key=key)


def scores_array(
    layer: str, name: str, array: Array | None, shape: tuple[int, ...]
) -> Array | None:
    """Returns a mask or a bias with four dimensions. Raises ValueError unless it broadcasts to [b,
    heads, s, t].
    """
    if array is None:
        return None
    sizes = zip(array.shape[::-1], shape[::-1], strict=False)
    if array.ndim > 4 or any(given not in (1, size) for given, size in sizes):
        raise ValueError(
            f"{layer} needs a {name} that broadcasts to [b, heads, s, t] = {list(shape)}: got "
            f"{list(array.shape)}"
        )
    if name == "mask" and array.dtype != jnp.bool_:
        array = array.astype(bool)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def scores_spec(array: Array | None, placement: Placement, batch: int) -> P:
    """Returns how a mask or a bias of four dimensions is sharded: as the batch is, if it has
    one.
    """
    has_batch = array is not None and array.shape[0] == batch
    return P(placement.token_spec()[0] if has_batch else None, None, None, None)


def check_whole_rows(layer: str, placement: Placement) -> None:
    """Raises ValueError for an input whose rows another axis than the layer's shards."""
    if placement.rows:
        raise ValueError(
            f"{layer} needs all rows of a sequence on {placement.axis_name!r}: its input's rows "
            f"are sharded over {', '.join(map(repr, placement.rows))}, too; reshard it with "
            "jax.reshard, or name that axis with context_axis"
        )


def attend_cached(
    layer: AttentionLayer, x: Array, inputs: Inputs[Array], qkv_sharding: OutSharding
) -> Array:
    """Adds the rows of x to the cache of a layer, and returns its output for them.

    Inside `jax.jit` and other transformations nobody can check here how many rows the cache has
    already, and the caller must. Rows beyond its end are written over its last ones, and the
    outputs are wrong from then on.
    """
    name = type(layer).__name__
    keys = layer.cached_key
    values = layer.cached_value
    index = layer.cache_index
    for argument in ("inputs_k", "bias", "segment_ids"):
        if getattr(inputs, argument) is not None:
            raise NotImplementedError(f"{name} with decode=True lacks {argument}; leave it out")
    placement = place_input(layer, x, None)
    check_whole_rows(name, placement)
    check_qkv_sharding(name, qkv_sharding, placement, splits_heads=True)
    if keys is None or values is None or index is None:
        raise ValueError(
            f"{name} decodes with a cache of keys and values, and has none: call init_cache first"
        )
    if layer.attention.attention_fn is not None or placement.manual:
        raise NotImplementedError(
            f"{name} lacks a cache with an attention_fn, and inside shard_map: leave decode out"
        )
    batch, length = keys[...].shape[:2]
    taken = 0  # at least, where a trace hides it
    of_which = ""
    if not isinstance(index[...], jax.core.Tracer):
        taken = int(index[...])
        of_which = f", of which {taken} are taken"
    if x.shape[0] != batch or taken + x.shape[1] > length:
        raise ValueError(
            f"{name} has a cache for {batch} sequences of {length} rows{of_which}: got "
            f"{x.shape[0]} sequences and {x.shape[1]} new rows; init_cache makes one that fits"
        )
    mask = scores_array(name, "mask", inputs.mask, (batch, 1, x.shape[1], length))
    call, linears, norms = make_call(layer, x, placement, placement)
    cache_spec = P(placement.spec()[0], None, placement.axis_name, None)
    arguments = x, linears, norms, keys[...], values[...], index[...], mask
    specs = (
        placement.in_spec,
        call.specs,
        P(None),
        cache_spec,
        cache_spec,
        P(),
        scores_spec(mask, placement, batch),
    )
    out_specs = placement.in_spec, cache_spec, cache_spec
    y, keys[...], values[...] = placement.run(_attend_new_rows, call, arguments, specs, out_specs)
    index[...] += x.shape[1]
    return y


def _attend_new_rows(
    call: AttentionCall,
    x: Array,
    linears: tuple[Linear, ...],
    norms: Norms,
    keys: Array,
    values: Array,
    index: Array,
    mask: Array | None,
) -> tuple[Array, Array, Array]:
    """Returns the output for new rows, and the keys and values with theirs, inside shard_map."""
    weights = Weights(*call.take(x, linears))
    attention = call.attention
    query, key, value = project_inputs(call, x, weights, Inputs())
    rows = index + jnp.arange(query.shape[1], dtype=index.dtype)
    q, k, v = attention.split(query, key, value, norms, rows)
    keys = lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype), index, 1)
    values = lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), index, 1)
    positions = Mask(True, attention.window)  # no row of the cache is later than the newest one
    cached = jnp.arange(keys.shape[1], dtype=index.dtype)
    allowed = positions.allows(rows[:, None], cached[None])[None, None]
    if mask is not None:
        allowed = allowed & mask
    y = dense_attention(
        q,
        keys.astype(q.dtype),
        values.astype(q.dtype),
        scale=attention.scale,
        softcap=attention.logit_softcap,
        mask=allowed,
        bias=None,
        dropout_key=None,
        dropout_rate=0.0,
        precision=attention.precision,
    )
    return project_output(call, y.reshape(*y.shape[:2], -1), weights.out), keys, values
