"""The key-value cache of an attention layer: rows are decoded without computing the rows before them again.

The cache follows `nnx.MultiHeadAttention`: `init_cache` makes it, and a call with `decode=True` adds its rows to it and
lets them attend to all rows so far. One call may add any number of rows, such as a whole prompt.

```
cached_key, cached_value  [b, length, R * local heads, head_dim]    each device has the key-value heads that it uses
cache_index               []                                        the rows so far
x                         [b, s, features]                          the new rows
```

With fewer key-value heads than devices, several devices hold the same head, so that no head ever travels.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from flaxasync.kernels.attention_block import Mask
from flaxasync.nn.attention.base import AttentionLayer, make_call, place_input, scores_array, scores_spec
from flaxasync.nn.attention.exchange import Call, Weights, project_inputs, project_output
from flaxasync.nn.attention.heads import Inputs, Norms
from flaxasync.nn.shards import Linear
from flaxasync.ops.attention.dense import cached_attention


class Cached[T](NamedTuple):
    """The keys and values of the rows so far, and the number of these rows; or how the three are sharded."""

    keys: T
    values: T
    rows: T


def init_cache(layer: AttentionLayer, input_shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Gives a layer an empty cache for inputs [b, length, features]. A stack of layers has its size before b."""
    shares = layer.key.part.shares
    assert shares is not None
    *stack, batch, length, _ = input_shape
    axis_name, mesh = layer.settings.axis_name, jax.sharding.get_abstract_mesh()
    shape = (*stack, batch, length, shares.devices * shares.local, layer.attention.head_dim)
    others = [name for name in mesh.axis_names if name not in (axis_name, layer.attention.context_axis)]
    if batch % math.prod(mesh.shape[name] for name in others):
        others = []  # they do not divide the batch, which every device then has whole
    spec = P(*(None,) * len(stack), tuple(others) or None, None, axis_name, None)
    for name in ("cached_key", "cached_value"):
        setattr(layer, name, nnx.Cache(jnp.zeros(shape, dtype), out_sharding=tuple(spec)))
    layer.cache_index = nnx.Cache(jnp.zeros(tuple(stack), jnp.int32))


def attend_cached(layer: AttentionLayer, x: Array, inputs: Inputs[Array]) -> Array:
    """Adds the rows of x to the cache of a layer, and returns its output for them.

    Inside `jax.jit` and other transformations nobody can check here how many rows the cache has already, and the caller
    must. Rows beyond its end are written over its last ones, and the outputs are wrong from then on.
    """
    name, keys, values, index = type(layer).__name__, layer.cached_key, layer.cached_value, layer.cache_index
    for argument in ("inputs_k", "bias", "segment_ids"):
        if getattr(inputs, argument) is not None:
            raise NotImplementedError(f"{name} with decode=True lacks {argument}; leave it out")
    placement = place_input(layer, x, None, layer.settings.in_spec)
    if keys is None or values is None or index is None:
        raise ValueError(f"{name} decodes with a cache of keys and values, and has none: call init_cache first")
    if layer.attention.attention_fn is not None or placement.manual:
        raise NotImplementedError(f"{name} lacks a cache with an attention_fn, and inside shard_map: leave decode out")
    batch, length = keys[...].shape[:2]
    if x.shape[0] != batch or x.shape[1] > length:
        raise ValueError(
            f"{name} has a cache for {batch} sequences of {length} rows: got {x.shape[0]} sequences and {x.shape[1]} "
            "new rows; make a larger one with init_cache"
        )
    if not isinstance(index[...], jax.core.Tracer) and int(index[...]) + x.shape[1] > length:
        raise ValueError(
            f"{name} has a cache of {length} rows, of which {int(index[...])} are taken: got {x.shape[1]} new rows; "
            "make a larger one with init_cache"
        )
    mask = scores_array(name, "mask", inputs.mask, (batch, 1, x.shape[1], length))
    call, linears, norms = make_call(layer, x, layer.attention, placement, placement)
    cached, heads = Cached(keys[...], values[...], index[...]), P(placement.spec()[0], None, placement.axis_name, None)
    arguments = x, linears, norms, cached, mask
    norm_specs = jax.tree.map(lambda _: P(None), norms)
    specs = placement.in_spec, call.specs, norm_specs, Cached(heads, heads, P()), scores_spec(mask, placement, batch)
    out_specs = placement.in_spec, heads, heads
    y, keys[...], values[...] = placement.bind(_attend_new_rows, call, arguments, specs, out_specs)()
    index[...] += x.shape[1]
    return y


def _attend_new_rows(
    call: Call, x: Array, linears: tuple[Linear, ...], norms: Norms, cached: Cached[Array], mask: Array | None
) -> tuple[Array, Array, Array]:
    """Returns the output for new rows, and the keys and values with theirs, inside shard_map."""
    weights, attention, index = Weights(*call.take(x, linears)), call.attention, cached.rows
    query, key, value = project_inputs(call, x, weights, Inputs())
    rows = index + jnp.arange(query.shape[1], dtype=index.dtype)
    q, k, v = attention.split(query, key, value, norms, rows)
    keys = lax.dynamic_update_slice_in_dim(cached.keys, k.astype(cached.keys.dtype), index, 1)
    values = lax.dynamic_update_slice_in_dim(cached.values, v.astype(cached.values.dtype), index, 1)
    positions = Mask(True, attention.window)  # no row of the cache is later than the newest one
    allowed = positions.allows(rows[:, None], jnp.arange(keys.shape[1], dtype=index.dtype))[None, None]
    allowed = allowed if mask is None else allowed & mask
    y = cached_attention(
        q, keys, values, allowed, scale=attention.scale, softcap=attention.logit_softcap,
        precision=attention.precision,
    )  # fmt: skip
    return project_output(call, y, weights.out), keys, values
