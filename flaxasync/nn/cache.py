"""The key-value cache of an attention layer: rows are decoded without computing the rows before them again.

The cache follows `nnx.MultiHeadAttention`: `init_cache` makes it, and a call with `decode=True` adds its rows to it and
lets them attend to all rows so far. Any number of rows can be added at once, so that one call takes a whole prompt.

```
cached_key, cached_value  [b, length, R * local heads, head_dim]    each device has the key-value heads that it uses
cache_index               []                                        the rows so far
x                         [b, s, features]                          the new rows
```

With fewer key-value heads than devices, several devices hold the same head, so that no head ever travels.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from flaxasync.nn.attention_call import Call
from flaxasync.nn.heads import HeadAttention
from flaxasync.nn.linear import parameter_specs, parameters, with_dtype
from flaxasync.nn.placement import Layout, Placement
from flaxasync.nn.self_attention import SelfAttention, norm_scales, project_inputs, project_output, take_shares
from flaxasync.ops.attention.cached import cached_attention
from flaxasync.ops.attention.layouts import Mask


def batch_spec(batch: int, axis_name: str, context_axis: str | None) -> Any:
    """Returns the mesh axes that split a batch while rows are decoded: all but these two, if they divide it."""
    mesh = jax.sharding.get_abstract_mesh()
    others = tuple(name for name in mesh.axis_names if name not in (axis_name, context_axis))
    if not others or batch % math.prod(mesh.shape[name] for name in others):
        return None
    return others[0] if len(others) == 1 else others


def init_cache(layer: SelfAttention, input_shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Gives a layer an empty cache for inputs [b, length, features]. A stack of layers has its size before b."""
    assert layer.shares is not None
    *stack, batch, length, _ = input_shape
    kv_shares, axis_name = layer.shares[1], layer.settings.axis_name
    shape = (*stack, batch, length, kv_shares.devices * kv_shares.local, layer.head_dim)
    context = layer.attention.context
    axes = batch_spec(batch, axis_name, None if context is None else context.axis_name)
    spec = P(*(None,) * len(stack), axes, None, axis_name, None)
    for name in ("cached_key", "cached_value"):
        setattr(layer, name, nnx.Cache(jnp.zeros(shape, dtype), out_sharding=tuple(spec)))
    layer.cache_index = nnx.Cache(jnp.zeros(tuple(stack), jnp.int32))


def attend_cached(layer: SelfAttention, x: Array, placement: Placement, mask: Array | None) -> Array:
    """Adds the rows of x to the cache of a layer, and returns its output for them.

    Inside `jax.jit` and other transformations nobody can check here how many rows the cache has already, and the caller
    must. Rows beyond its end are written over its last ones, and the outputs are wrong from then on.

    Raises:
      ValueError: There is no cache, or it is too small or of another batch. It is too small if it has fewer rows than x
        or, outside of transformations, fewer free ones.
      NotImplementedError: The layer has an attention_fn, or is called inside shard_map.
    """
    name, keys, values, index = type(layer).__name__, layer.cached_key, layer.cached_value, layer.cache_index
    if keys is None or values is None or index is None:
        raise ValueError(f"{name} decodes with a cache of keys and values, and has none: call init_cache first")
    if layer.attention.options.attention_fn is not None or placement.manual:
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
    projections = layer.query, layer.key, layer.value, layer.out
    linears = tuple(map(parameters, projections))
    settings = with_dtype(layer.settings, x, *(p for linear in linears for p in linear))
    rows_sharded = placement.rows_sharded
    attention = dataclasses.replace(layer.attention, context=None)
    out_layout: Layout = "sequence" if rows_sharded else "replicated"
    stored = tuple(map(parameter_specs, projections))
    call = Call(settings, attention, (rows_sharded, rows_sharded), out_layout, layer.shares, stored)
    norms = norm_scales(layer)
    cache_spec = P(placement.spec()[0], None, placement.axis_name, None)
    arguments = [
        (x, placement.in_spec),
        (linears, stored),
        (norms, tuple(None if scale is None else P(None) for scale in norms)),
        (keys[...], cache_spec),
        (values[...], cache_spec),
        (index[...], P()),
        (mask, None if mask is None else P(placement.spec()[0] if mask.shape[0] > 1 else None, None, None, None)),
    ]
    args, in_specs = zip(*arguments, strict=True)
    y, keys[...], values[...] = placement.run(_run, call, args, in_specs, (placement.in_spec, cache_spec, cache_spec))
    index[...] += x.shape[1]
    return y


def _run(
    call: Call,
    x: Array,
    linears: tuple,
    norms: tuple[Array | None, Array | None],
    keys: Array,
    values: Array,
    index: Array,
    mask: Array | None,
) -> tuple[Array, Array, Array]:
    linears = take_shares(call, linears, x)
    query, key, value = project_inputs(call, x, None, None, linears[:3])
    attention: HeadAttention = call.attention
    rows = index + jnp.arange(query.shape[1], dtype=index.dtype)
    q, k, v = attention.split(query, key, value, norms, rows)
    keys, values = (
        lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), index, 1)
        for cache, new in ((keys, k), (values, v))
    )
    positions = Mask(True, attention.window)  # no row of the cache is later than the newest one
    allowed = positions.allows(rows[:, None], jnp.arange(keys.shape[1], dtype=index.dtype))[None, None]
    allowed = allowed if mask is None else allowed & mask
    options = attention.options
    scale = 1 / math.sqrt(attention.head_dim) if options.softmax_scale is None else options.softmax_scale
    y = cached_attention(
        q, keys, values, allowed, scale=scale, softcap=options.logit_softcap, precision=attention.precision
    )
    return project_output(call, y, linears[3]), keys, values
