"""Look-up and cross-entropy over a vocabulary that is split over a mesh axis.

For use inside `jax.shard_map`, on local shards: device i of R on `axis_name` holds entries i * V/R .. (i + 1) * V/R.
Neither the table nor the logits are ever whole on one device.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flaxasync.mesh import cast_to_varying
from flaxasync.ops.dtypes import sum_dtype
from flaxasync.ring import Ring, ring_gather, ring_reduce


def lookup(ids: Int[Array, "*batch s"], table: Float[Array, "v d"], axis_name: str) -> Float[Array, "*batch s d"]:
    """This device's addend to the embedding of `ids`: its own entries, and zeros for those of other devices."""
    local, mine = _local_ids(ids, table.shape[0], axis_name)
    return jnp.where(mine[..., None], table[local], jnp.zeros((), table.dtype))


def lookup_reduce_scatter(
    ids: Int[Array, "*batch s"], table: Float[Array, "v d"], ring: Ring
) -> Float[Array, "*batch m d"]:
    """Looks all rows up in the devices' shares of the table; each device ends with its own rows.

    ```
    ids    [..., R*m]     the same on every device of the ring
    table  [V/R, d]       this device's entries
    y      [..., m, d]    this device's rows

    forward  y = reduce_scatter(one_hot(ids) @ table)
    dtable     = one_hot(ids).T @ all_gather(dy)           summed in float32
    ```

    One device adds something other than zeros to a row, so the sum is exact in any dtype. An id outside 0 .. V-1 gives
    a row of zeros. Saved for the backward pass: ids and table, as they were given.
    """
    axes = jax.typeof(table).mat.varying | jax.typeof(ids).mat.varying
    return _lookup_reduce_scatter(ring, cast_to_varying(ids, axes), cast_to_varying(table, axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup_reduce_scatter(ring: Ring, ids: Array, table: Array) -> Array:
    def produce(row: Any, count: int) -> Array:
        return lookup(lax.dynamic_slice_in_dim(ids, row, count, axis=-1), table, ring.axis_name)

    with jax.named_scope("vocab_parallel_lookup"):
        return ring_reduce(ring, ids.shape[-1] // lax.axis_size(ring.axis_name), produce, table.dtype)


def _lookup_reduce_scatter_fwd(ring: Ring, ids: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return _lookup_reduce_scatter(ring, ids, table), (ids, table)


def _lookup_reduce_scatter_bwd(ring: Ring, saved: tuple[Array, Array], dy: Array) -> tuple[None, Array]:
    ids, table = saved

    def add(block: Array, row: Any, dtable: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(ids, row, block.shape[-2], axis=-1)
        local, mine = _local_ids(rows, table.shape[0], ring.axis_name)
        return dtable.at[local].add(jnp.where(mine[..., None], block.astype(dtable.dtype), 0))

    zeros = jnp.zeros(table.shape, sum_dtype(table))
    with jax.named_scope("vocab_parallel_lookup_dtable"):
        dtable = ring_gather(ring, dy, cast_to_varying(zeros, jax.typeof(dy).mat.varying), add)
    return None, dtable.astype(table.dtype)


_lookup_reduce_scatter.defvjp(_lookup_reduce_scatter_fwd, _lookup_reduce_scatter_bwd)


def cross_entropy(
    logits: Float[Array, "*batch v"], targets: Int[Array, "*batch"], axis_name: str
) -> Float[Array, "*batch"]:
    """Softmax cross-entropy of each row, in nats, from this device's share of the logits.

    ```
    logits   [..., V/R]   this device's entries
    targets  [...]        the same on every device of the axis
    loss     [...]        the same on every device of the axis, float32

    forward  loss    = log(sum(exp(logits))) - logits[target]      three numbers a row cross the axis
    dlogits          = (softmax(logits) - one_hot(target)) * dloss no communication
    ```

    Computed in float32. Saved for the backward pass: the logits as they were given, and one number a row.

    Raises:
      ValueError: logits and targets do not match.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"cross_entropy needs one target a row: got logits {list(logits.shape)} and targets {list(targets.shape)}"
        )
    axes = jax.typeof(logits).mat.varying
    return _cross_entropy(axis_name, logits, cast_to_varying(targets, axes - {axis_name}))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(axis_name: str, logits: Array, targets: Array) -> Array:
    return _cross_entropy_fwd(axis_name, logits, targets)[0]


def _cross_entropy_fwd(axis_name: str, logits: Array, targets: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    with jax.named_scope("vocab_parallel_cross_entropy"):
        logits32 = logits.astype(jnp.float32)
        highest = lax.pmax(jnp.max(logits32, axis=-1), axis_name)
        local, mine = _local_ids(targets, logits.shape[-1], axis_name)
        at_target = jnp.take_along_axis(logits32, local[..., None], axis=-1)[..., 0]
        sums = (jnp.sum(jnp.exp(logits32 - highest[..., None]), axis=-1), jnp.where(mine, at_target, 0))
        total, at_target = lax.psum(sums, axis_name)
        log_sum = highest + jnp.log(total)
    return log_sum - at_target, (logits, targets, log_sum)


def _cross_entropy_bwd(axis_name: str, saved: tuple[Array, Array, Array], dloss: Array) -> tuple[Array, None]:
    logits, targets, log_sum = saved
    if axis_name not in jax.typeof(logits).mat.varying:
        # check_vma=False: no type says that the loss is the same everywhere; each device is handed its share of dloss.
        dloss = lax.psum(dloss, axis_name)
    softmax = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    local, mine = _local_ids(targets, logits.shape[-1], axis_name)
    hit = (jnp.arange(logits.shape[-1]) == local[..., None]) & mine[..., None]
    return ((softmax - hit.astype(jnp.float32)) * dloss[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _local_ids(ids: Array, entries: int, axis_name: str) -> tuple[Array, Array]:
    """Positions of `ids` in this device's share, 0 where they lie outside it, and whether they lie inside."""
    if ids.dtype.itemsize < 4:  # a uint8 could hold neither the number of entries nor where they begin
        ids = ids.astype(jnp.int32)
    local = ids - (lax.axis_index(axis_name) * entries).astype(ids.dtype)
    mine = (local >= 0) & (local < entries)
    return jnp.where(mine, local, 0), mine
