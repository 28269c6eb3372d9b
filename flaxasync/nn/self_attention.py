"""What the attention layers share: three projections, the attention of heads, and a projection of their output."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from flaxasync.nn import exchange_heads, shards
from flaxasync.nn.attention_call import Call, Inputs
from flaxasync.nn.checks import check_input
from flaxasync.nn.heads import HeadAttention, check_segments
from flaxasync.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    check_no_adapter,
    parameter_specs,
    parameters,
    with_dtype,
)
from flaxasync.nn.options import LinearSettings
from flaxasync.nn.placement import Layout, Placement, place
from flaxasync.nn.shares import Shares
from flaxasync.ops.attention.dense import Additions


class SelfAttention(nnx.Module):
    """Three projections, the attention of heads, and a projection of their output.

    A subclass makes the projections, says how they are sharded, and how the output is projected.
    """

    settings: LinearSettings
    exchange_heads: bool | None = None

    def _build(
        self,
        features: tuple[int, int, int],
        heads: int,
        kv_heads: int,
        attention: HeadAttention,
        make_input: Callable[..., ColumnParallelLinear | nnx.Linear],
        make_output: Callable[..., RowParallelLinear | nnx.Linear],
        rngs: nnx.Rngs,
        shares: tuple[Shares, Shares] | None = None,
    ) -> None:
        """Creates the projections.

        Args:
          features: The features of the input of queries, of that of keys and values, and of the output.
          heads: The query heads.
          kv_heads: The key-value heads.
          attention: What the heads have in common.
          make_input: Makes a projection of an input from its numbers of features, and its `shares` where there are any.
          make_output: Makes the projection of the output likewise.
          rngs: The random streams.
          shares: Which query heads and key-value heads each device has; None where every device has all.
        """
        self.heads, self.kv_heads, self.head_dim, self.attention = heads, kv_heads, attention.head_dim, attention
        self.shares = shares
        q_options, kv_options = ({"shares": s} for s in shares) if shares else ({}, {})
        self.query = make_input(features[0], heads * attention.head_dim, **q_options)
        self.key = make_input(features[1], kv_heads * attention.head_dim, **kv_options)
        self.value = make_input(features[1], kv_heads * attention.head_dim, **kv_options)
        self.out = make_output(heads * attention.head_dim, features[2], **q_options)
        self.query_ln = self.key_ln = nnx.data(None)
        self.cached_key: nnx.Cache[Array] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Array] | None = nnx.data(None)
        if attention.options.normalize_qk:
            rms = attention.options.normalize_qk == "rms"
            norm: Any = nnx.RMSNorm if rms else functools.partial(nnx.LayerNorm, use_bias=False)
            self.query_ln, self.key_ln = (
                norm(
                    attention.head_dim,
                    epsilon=attention.options.qk_epsilon,
                    param_dtype=self.settings.param_dtype,
                    rngs=rngs,
                )
                for _ in range(2)
            )

    def _place(self, x: Array, segment_ids: Array | None, in_spec: P | None) -> Placement:
        """Reads how `x` is sharded, and checks both inputs."""
        layer = type(self).__name__
        check_no_adapter(layer, self.query, self.key, self.value, self.out)
        placement = place(layer, x, self.settings.axis_name, in_spec, sharded="rows")
        check_input(layer, x, self.query.in_features, placement)
        check_segments(layer, x, segment_ids)
        if x.ndim != 3:
            raise ValueError(f"{layer} needs an input [batch, rows, features]: got {list(x.shape)}")
        return placement

    def _attend(
        self,
        x: Array,
        inputs: Inputs,
        placement: Placement,
        ids_spec: P,
        *,
        rows_sharded: bool,
        out_layout: Layout | None,
        kv_placement: Placement | None = None,
        is_causal: bool = False,
    ) -> Array:
        """Runs the layer on its shards.

        Args:
          x: The input of queries.
          inputs: The other arrays.
          placement: How x is sharded, as the output is.
          ids_spec: How the segment ids are sharded.
          rows_sharded: Whether the layer's axis shards the rows that the projections need.
          out_layout: The layout of a row-parallel output projection; None for one that every device has whole.
          kv_placement: How the inputs of keys and values are sharded, where there are any.
          is_causal: Whether a row attends only to itself and to earlier rows, also where `attention` does not say it.
        """
        projections = self.query, self.key, self.value, self.out
        linears = tuple(map(parameters, projections))
        settings = with_dtype(self.settings, x, *(p for linear in linears for p in linear))
        kv_sharded = rows_sharded if kv_placement is None else kv_placement.rows_sharded
        attention = dataclasses.replace(self.attention, causal=self.attention.causal or is_causal)
        stored = tuple(map(parameter_specs, projections))
        call = Call(
            settings, attention, (rows_sharded, kv_sharded), out_layout, self.shares, stored, self.exchange_heads
        )
        norms = norm_scales(self)
        kv_spec = None if kv_placement is None else kv_placement.in_spec

        def scores_spec(array: Array | None) -> P | None:
            if array is None:
                return None
            return P(placement.token_spec()[0] if array.shape[0] == x.shape[0] else None, None, None, None)

        arguments = [
            (x, placement.in_spec),
            (linears, stored),
            (norms, tuple(None if scale is None else P(None) for scale in norms)),
            (inputs.key, None if inputs.key is None else kv_spec),
            (inputs.value, None if inputs.value is None else kv_spec),
            (inputs.segment_ids, None if inputs.segment_ids is None else ids_spec),
            (inputs.mask, scores_spec(inputs.mask)),
            (inputs.bias, scores_spec(inputs.bias)),
            (inputs.dropout_key, None if inputs.dropout_key is None else P(None)),
        ]
        args, in_specs = zip(*arguments, strict=True)
        return placement.run(_run, call, args, in_specs, placement.in_spec)


def _run(
    call: Call,
    x: Array,
    linears: tuple[shards.Linear, ...],
    norms: tuple[Array | None, Array | None],
    key: Array | None,
    value: Array | None,
    ids: Array | None,
    mask: Array | None,
    bias: Array | None,
    dropout_key: Array | None,
) -> Array:
    axis_name = call.settings.axis_name
    linears = take_shares(call, linears, x)
    if call.shares is not None:
        mask, bias = (
            z if z is None or z.shape[1] == 1 else call.shares[0].local_entries(z, axis_name, 1) for z in (mask, bias)
        )
    if dropout_key is not None:
        dropout_key = _local_key(dropout_key, x, axis_name)
    others = {"inputs_k": key, "inputs_v": value, "mask": mask, "bias": bias, "dropout": dropout_key}
    if (exchange := exchange_heads.choose(call, x, linears, others)) is not None:
        return exchange_heads.run(call, exchange, x, linears, norms, ids)
    q, k, v = project_inputs(call, x, key, value, linears[:3])
    heads = call.attention.attend(q, k, v, ids, Additions(mask, bias, dropout_key), norms)
    return project_output(call, heads, linears[3])


def norm_scales(layer: SelfAttention) -> tuple[Array | None, Array | None]:
    """Returns the scales of the norms of queries and of keys; None for no norm."""
    query, key = (
        None if norm is None or norm.scale is None else norm.scale[...] for norm in (layer.query_ln, layer.key_ln)
    )
    return query, key


def take_shares(call: Call, linears: tuple[shards.Linear, ...], x: Array) -> tuple[shards.Linear, ...]:
    """Returns the parts of the four projections that this device computes with, gathered if they are fully sharded."""
    linears = tuple(shards.gather(p, spec, x, call.settings) for p, spec in zip(linears, call.stored, strict=True))
    if call.shares is None:
        return linears
    q_shares, kv_shares = call.shares
    axis_name, (*inputs, out) = call.settings.axis_name, linears
    taken = zip(inputs, (q_shares, kv_shares, kv_shares), strict=True)
    return *(shards.take_columns(p, s, axis_name) for p, s in taken), shards.take_rows(out, q_shares, axis_name)


def project_output(call: Call, heads: Array, out: shards.Linear) -> Array:
    """Returns the output of the layer from that of the heads, [b, s, h, d]."""

    @jax.checkpoint  # otherwise the output of the heads would be saved twice: as it is, and flattened
    def project(heads: Array, out: shards.Linear) -> Array:
        heads = heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1])
        if call.out_layout is None:
            return shards.column(heads, (out,), call.settings, rows_sharded=False)[0]
        return shards.row(heads, out, call.settings, layout=call.out_layout)

    return project(heads, out)


def project_inputs(
    call: Call, x: Array, key: Array | None, value: Array | None, linears: tuple[shards.Linear, ...]
) -> list[Array]:
    """Returns queries, keys and values. Projections of one input share one gather of it."""
    gathers: list[tuple[Array, bool, list[shards.Linear]]] = [(x, call.rows_sharded[0], [linears[0]])]
    for other, linear in zip((key, value), linears[1:], strict=True):
        if other is None:
            gathers[-1][2].append(linear)
        else:
            gathers.append((other, call.rows_sharded[1], [linear]))
    ys = [shards.column(z, tuple(group), call.settings, rows_sharded=sharded) for z, sharded, group in gathers]
    return list(functools.reduce(operator.add, ys))


def _local_key(data: Array, x: Array, axis_name: str) -> Array:
    """Returns a key of this device's own, for its part of the batch and its heads."""
    key = jax.random.wrap_key_data(data)
    for axis in sorted(jax.typeof(x).mat.varying | {axis_name}):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def scores_array(layer: str, name: str, array: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Returns a mask or a bias with four dimensions. Raises ValueError unless it broadcasts to [b, heads, s, t]."""
    if array is None:
        return None
    fits = array.ndim <= 4 and all(
        given in (1, size) for given, size in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{layer} needs a {name} that broadcasts to [b, heads, s, t] = {list(shape)}: got {list(array.shape)}"
        )
    if name == "mask" and array.dtype != jnp.bool_:
        array = array.astype(bool)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
