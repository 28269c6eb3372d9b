"""Gathers of shards along a dimension, and reduce-scatters, which are begun and waited for apart.

| backend | what moves the blocks |
|---|---|
| `"xla"` | rings of permutes, asynchronous on every TPU; not loops, so that XLA can place each hop anywhere |
| `"pallas"` | copies from each device to each other one (`flaxasync.transport.direct`) |

What direct copies cannot move, because its blocks are not in whole tiles (`flaxasync.transport.direct.in_whole_tiles`),
goes by XLA's collectives: biases, and kernels whose blocks of columns are no multiple of 128.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from flaxasync.mesh import cast_to_varying
from flaxasync.transport import direct
from flaxasync.transport.direct import in_whole_tiles
from flaxasync.transport.transfers import Transfer


def start_gather(shard: Array, axis: str, dim: int, backend: str) -> Transfer:
    """Begins to gather shards along `dim`."""
    if backend == "xla":
        return Transfer(ring_all_gather(shard, axis, dim))
    if not in_whole_tiles(shard, dim):
        return Transfer(lax.all_gather(shard, axis, axis=dim, tiled=True))
    return Transfer(*direct.all_gather(axis, lax.axis_size(axis), dim).start(shard))


def start_reduce_scatter(x: Array, dtype: DTypeLike, axis: str, dim: int, backend: str) -> Transfer:
    """Begins to sum `x` in a dtype over the axis, of which each device gets its shard along `dim`.

    Nothing is added on the way of direct copies, so that they move x as it is, and it is cast where it arrives.
    """
    size = lax.axis_size(axis)
    if backend == "xla":
        return Transfer(ring_reduce_scatter(x.astype(dtype), axis, dim))
    shape = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    if not in_whole_tiles(jax.ShapeDtypeStruct(shape, x.dtype), dim):
        return Transfer(lax.psum_scatter(x.astype(dtype), axis, scatter_dimension=dim, tiled=True))
    return Transfer(*direct.all_to_all(axis, size, dim).start(x), summed_in=dtype)


def ring_all_gather(shard: Array, axis: str, dim: int) -> Array:
    """Returns all shards along `dim`, by permutes in both directions, each of half of a shard if it can be halved."""
    devices, block = lax.axis_size(axis), shard.shape[dim]
    shape = (*shard.shape[:dim], devices * block, *shard.shape[dim + 1 :])
    whole = cast_to_varying(jnp.zeros(shape, shard.dtype), jax.typeof(shard).mat.varying)
    for direction, start, part in _parts(shard, dim):
        for hop in range(devices):
            owner = lax.rem(lax.axis_index(axis) - direction * hop + devices, devices)
            whole = lax.dynamic_update_slice_in_dim(whole, part, owner * block + start, dim)
            if hop < devices - 1:
                part = lax.ppermute(part, axis, _shift(devices, direction))
    return whole


def ring_reduce_scatter(x: Array, axis: str, dim: int) -> Array:
    """Returns this device's shard along `dim` of the sum over all devices, by permutes as in `ring_all_gather`."""
    devices, block = lax.axis_size(axis), x.shape[dim] // lax.axis_size(axis)
    sums = []
    for direction, start, total in _parts(lax.slice_in_dim(x, 0, block, axis=dim), dim):
        for hop in range(devices):
            owner = lax.rem(lax.axis_index(axis) - direction * (hop + 1) + 2 * devices, devices)
            addend = lax.dynamic_slice_in_dim(x, owner * block + start, total.shape[dim], dim)
            total = addend if hop == 0 else lax.ppermute(total, axis, _shift(devices, direction)) + addend
        sums.append(total)
    return lax.concatenate(sums, dim) if len(sums) > 1 else sums[0]


def _parts(shard: Array, dim: int) -> list[tuple[int, int, Array]]:
    """Returns the direction, the start and the data of what travels each way."""
    half = shard.shape[dim] // 2
    if half * 2 != shard.shape[dim]:
        return [(1, 0, shard)]
    first, second = jnp.split(shard, 2, dim)
    return [(1, 0, first), (-1, half, second)]


def _shift(devices: int, direction: int) -> list[tuple[int, int]]:
    return [(device, (device + direction) % devices) for device in range(devices)]
