"""What a call of an attention layer consists of, and its projections on the shards of one device, inside shard_map."""

import dataclasses
from typing import NamedTuple

import jax
from jax import Array

from flaxasync.nn import shards
from flaxasync.nn.attention.heads import HeadAttention, Inputs
from flaxasync.nn.options import LinearSettings
from flaxasync.nn.shares import Shares


class Projections[T](NamedTuple):
    """One value for each projection of a layer: its kernel and bias, or how the two are stored."""

    query: T
    key: T
    value: T
    out: T


type Weights = Projections[shards.Linear]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What is static in a call. Hashable."""

    settings: LinearSettings  # of the projections, with the dtype of the computation
    attention: HeadAttention
    stored: Projections[shards.Stored]
    rows_sharded: bool  # whether the layer's axis shards the rows that the projection of queries needs
    kv_rows_sharded: bool  # the same for keys and values
    query_shares: Shares | None  # which query heads each device has; None where every device has all heads
    kv_shares: Shares | None  # which key-value heads each device has


def take_weights(call: Call, x: Array, stored: Weights) -> Weights:
    """Returns the kernels and biases with which this device computes, gathered if they are fully sharded."""
    w = Projections(*(shards.gather(p, spec, x, call.settings) for p, spec in zip(stored, call.stored, strict=True)))
    if call.query_shares is None or call.kv_shares is None:
        return w
    axis_name = call.settings.axis_name
    return Projections(
        query=shards.take_columns(w.query, call.query_shares, axis_name),
        key=shards.take_columns(w.key, call.kv_shares, axis_name),
        value=shards.take_columns(w.value, call.kv_shares, axis_name),
        out=shards.take_rows(w.out, call.query_shares, axis_name),
    )


def project_inputs(call: Call, x: Array, w: Weights, inputs: Inputs[Array]) -> tuple[Array, ...]:
    """Returns queries, keys and values. Projections of one input share one gather of it."""
    key, value = inputs.inputs_k, inputs.inputs_v
    if key is None:
        return shards.column(x, (w.query, w.key, w.value), call.settings, rows_sharded=call.rows_sharded)
    query = shards.column(x, (w.query,), call.settings, rows_sharded=call.rows_sharded)
    if value is None:
        return *query, *shards.column(key, (w.key, w.value), call.settings, rows_sharded=call.kv_rows_sharded)
    keys = shards.column(key, (w.key,), call.settings, rows_sharded=call.kv_rows_sharded)
    return *query, *keys, *shards.column(value, (w.value,), call.settings, rows_sharded=call.kv_rows_sharded)


def project_output(call: Call, heads: Array, out: shards.Linear) -> Array:
    """Returns the output of the layer from that of the heads, [b, s, h, d]."""

    @jax.checkpoint  # otherwise the output of the heads would be saved twice: as it is, and flattened
    def project(heads: Array, out: shards.Linear) -> Array:
        heads = heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1])
        if call.query_shares is None:
            return shards.column(heads, (out,), call.settings, rows_sharded=False)[0]
        return shards.row(heads, out, call.settings, layout="sequence" if call.rows_sharded else "replicated")

    return project(heads, out)
