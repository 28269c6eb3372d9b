"""Gathers of shards along a dimension, and reduce-scatters, which are begun and waited for apart,
beside a computation.

| backend | what moves the blocks |
|---|---|
| `"xla"` | rings of permutes in both directions, asynchronous on every TPU; not loops, so that XLA can place each hop |
| `"xla"` on GPUs | XLA's own collectives, which are asynchronous there |
| `"pallas"` | copies from each device to each other one (`flaxasync.transport.direct`) |

Blocks that are not in whole tiles (`flaxasync.transport.direct.in_whole_tiles`) cannot be copied
directly: biases, and kernels whose blocks of columns are no multiple of 128. XLA's collectives move
those.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from flaxasync.mesh import declare_invarying, platform, vary_like
from flaxasync.ring import Index, Ring, ring_gather, ring_reduce
from flaxasync.transport import direct
from flaxasync.transport.direct import in_whole_tiles
from flaxasync.transport.pair import Future
from flaxasync.transport.schedule import tie
from flaxasync.transport.xla import XlaTransport


@dataclasses.dataclass
class Transfer:
    """An array that arrives."""

    x: Array  # what is sent while the transfer is under way; what arrived, if there is no future
    # of a direct transfer; None where XLA schedules the transfer, or nothing travels
    future: Future | None = None
    # the dtype in which the blocks that arrive are added, if they are
    summed_in: DTypeLike | None = None

    def done(self) -> Array:
        if self.future is None:
            return self.x
        arrived = self.future.pair.done(self.x, self.future)
        if self.summed_in is None:
            return arrived
        return jnp.sum(arrived.astype(self.summed_in), 0)


@dataclasses.dataclass
class Transfers:
    """Transfers that are waited for together; `scope` names their dones in a profile."""

    begun: list[Transfer]
    scope: str

    def done(self) -> tuple[Array, ...]:
        with jax.named_scope(self.scope):
            return tuple(transfer.done() for transfer in self.begun)


def meanwhile[T](transfers: list[Transfers], compute: Callable[..., T], *operands: PyTree) -> T:
    """Returns `compute(*operands)`, which runs after direct transfers were started and before they
    are waited for.

    The operands are pytrees of arrays. Nothing ties XLA's own transfers to the computation, because
    XLA schedules them.
    """
    started = [
        transfer for group in transfers for transfer in group.begun if transfer.future is not None
    ]
    if not started:
        return compute(*operands)
    sent, operands = tie([transfer.x for transfer in started], operands)
    sent, result = tie(sent, compute(*operands))
    for transfer, x in zip(started, sent, strict=True):
        transfer.x = x
    return result


def start_gather(shard: Array, axis: str, dim: int, backend: str) -> Transfer:
    """Begins to gather shards along `dim`."""
    if backend == "xla":
        return Transfer(ring_all_gather(shard, axis, dim))
    if not in_whole_tiles(shard, dim):
        return Transfer(lax.all_gather(shard, axis, axis=dim, tiled=True))
    return Transfer(*direct.all_gather(axis, lax.axis_size(axis), dim).start(shard))


def start_reduce_scatter(x: Array, dtype: DTypeLike, axis: str, dim: int, backend: str) -> Transfer:
    """Begins to sum `x` in a dtype over the axis, of which each device gets its shard along `dim`.

    Nothing is added on the way of direct copies, so that they move x as it is, and it is cast where
    it arrives.
    """
    size = lax.axis_size(axis)
    if backend == "xla":
        return Transfer(ring_reduce_scatter(x.astype(dtype), axis, dim))
    shape = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    if not in_whole_tiles(jax.ShapeDtypeStruct(shape, x.dtype), dim):
        return Transfer(lax.psum_scatter(x.astype(dtype), axis, scatter_dimension=dim, tiled=True))
    return Transfer(*direct.all_to_all(axis, size, dim).start(x), summed_in=dtype)


def ring_all_gather(shard: Array, axis: str, dim: int) -> Array:
    """Returns all shards along `dim`: by permutes, on GPUs by one collective."""
    if platform() == "gpu":
        return lax.all_gather(shard, axis, axis=dim, tiled=True)
    shape = (*shard.shape[:dim], lax.axis_size(axis) * shard.shape[dim], *shard.shape[dim + 1 :])
    whole = vary_like(jnp.zeros(shape, shard.dtype), shard)

    def write(block: Array, start: Index, whole: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(whole, block, start, dim)

    return ring_gather(_ring(axis), shard, whole, write, axis=dim)


def ring_reduce_scatter(x: Array, axis: str, dim: int) -> Array:
    """Returns this device's shard along `dim` of the sum over all devices: by permutes, on GPUs by
    one collective.
    """
    if platform() == "gpu":
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)

    def produce(start: Index, count: int) -> Array:
        return lax.dynamic_slice_in_dim(x, start, count, dim)

    return ring_reduce(_ring(axis), x.shape[dim] // lax.axis_size(axis), produce, x.dtype, axis=dim)


def ring_all_reduce(x: Array, dtype: DTypeLike, axis: str) -> tuple[Array, Array]:
    """Returns the sum of `x` over all devices of an axis, in a dtype, whose type no longer varies
    over it; and the last of what it is made of to arrive, which a later transfer can wait for.

    GPUs add it up in one collective, other devices by permutes: two devices exchange x as it is, so
    it may travel in a narrower dtype than that of the sum, and each adds the same two numbers. More
    devices reduce-scatter and gather along the first dimension that they divide. Where they divide
    none, XLA sums.
    """
    size = lax.axis_size(axis)
    if size == 2 and platform() != "gpu":
        other = lax.ppermute(x, axis, [(0, 1), (1, 0)])
        return declare_invarying(x.astype(dtype) + other.astype(dtype), {axis}), other
    x = x.astype(dtype)
    dim = next((dim for dim, rows in enumerate(x.shape) if rows % size == 0), None)
    if dim is None or platform() == "gpu":
        total = lax.psum(x, axis)
    else:
        shard = ring_reduce_scatter(x, axis, dim)
        total = declare_invarying(ring_all_gather(shard, axis, dim), {axis})
    return total, total


def _ring(axis: str) -> Ring:
    """Returns a ring in both directions. All turns are in one loop body, so `staggered_loop` writes
    no loop.
    """
    return Ring(axis, XlaTransport(), directions=2, unroll=lax.axis_size(axis))
