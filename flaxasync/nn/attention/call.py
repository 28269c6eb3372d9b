"""What a call of an attention layer consists of, and its projections on the shards of one device, inside shard_map."""

import dataclasses
from typing import NamedTuple

import jax
from jax import Array

from flaxasync.nn import shards
from flaxasync.nn.attention.heads import HeadAttention, Inputs
from flaxasync.nn.shards import Linear


class Weights(NamedTuple):
    """The kernels and biases of a layer's projections."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(shards.Call):
    """What is static in a call. Hashable. The parts are in the order of `Weights`."""

    attention: HeadAttention
    kv_rows_sharded: bool  # whether the layer's axis shards the rows that the projections of keys and values need

    @property
    def splits_heads(self) -> bool:
        """Whether each device has a share of the heads, and not all of them."""
        return self.parts[0].shares is not None


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


def project_output(call: Call, heads: Array, out: Linear) -> Array:
    """Returns the output of the layer from that of the heads, [b, s, h, d]."""

    @jax.checkpoint  # otherwise the output of the heads would be saved twice: as it is, and flattened
    def project(heads: Array, out: Linear) -> Array:
        heads = heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1])
        if call.splits_heads:
            return shards.row(heads, out, call.settings, layout=call.layout)
        return shards.column(heads, (out,), call.settings, rows_sharded=False)[0]

    return project(heads, out)
