"""Look-up and cross-entropy over a vocabulary that is split over a mesh axis, for use inside
`jax.shard_map`.

Device i of R on `axis_name` holds entries i * V/R .. (i + 1) * V/R. No device holds the whole
table, or whole logits.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flaxasync.mesh import cast_to_varying, mapped_axis_size, vary_alike, vary_like
from flaxasync.ops.choose import decide
from flaxasync.ops.matmul.products import accumulator_dtype
from flaxasync.ring import Index, Ring, ring_gather, ring_reduce


def lookup_all_reduce(
    ids: Int[Array, "*batch s"],
    table: Float[Array, "v d"],
    axis_name: str,
    *,
    entries: int | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*batch s d"]:
    """Looks all rows up in the devices' shares of the table, and leaves each device with all rows.

    ```
    ids    [..., s]      the same on every device of axis_name
    table  [V/R, d]      this device's entries
    y      [..., s, d]   the same on every device of axis_name

    forward  y = all_reduce(one_hot(ids) @ table)
    dtable     = one_hot(ids).T @ dy                       summed in float32
    ```

    Ids outside of the vocabulary, `entries` and what is saved are as in `lookup_reduce_scatter`.
    `dtype` is that of y; that of the table by default.
    """
    rows = _own_rows(axis_name, *vary_alike((ids, table), axis_name))
    y = lax.psum(rows.astype(table.dtype if dtype is None else dtype), axis_name)
    return _mark_absent(y, ids, _entries(table, axis_name, entries))


def lookup_reduce_scatter(
    ids: Int[Array, "*batch s"],
    table: Float[Array, "v d"],
    axis_name: str,
    *,
    entries: int | None = None,
    backend: str | None = None,
) -> Float[Array, "*batch m d"]:
    """Looks all rows up in the devices' shares of the table, and leaves each device with its own
    rows.

    ```
    ids    [..., R*m]     the same on every device of axis_name
    table  [V/R, d]       this device's entries
    y      [..., m, d]    this device's rows

    forward  y = reduce_scatter(one_hot(ids) @ table)
    dtable     = one_hot(ids).T @ all_gather(dy)           summed in float32
    ```

    Only one device adds something other than zeros to a row, so the sum is exact in any dtype. An
    id outside 0 .. entries-1 gives a row of NaN, and adds nothing to dtable; `entries` is V by
    default, and less where the last entries pad the table. Saved for the backward pass are ids and
    table as they were given. The backends are "none" (one reduce-scatter), and "xla" (the default),
    "pallas" and "stateful", the rings of `flaxasync.all_gather_matmul`.
    """
    size = mapped_axis_size("lookup_reduce_scatter", axis_name)
    ring = decide("lookup_reduce_scatter", backend, ring=size).ring(axis_name)
    y = _lookup_reduce_scatter(ring, *vary_alike((ids, table)))
    count = ids.shape[-1] // size
    first = lax.axis_index(axis_name) * count
    rows = lax.dynamic_slice_in_dim(vary_like(ids, y), first, count, axis=-1)
    return _mark_absent(y, rows, _entries(table, axis_name, entries))


def _entries(table: Array, axis_name: str, entries: int | None) -> int:
    """Returns the number of entries of the vocabulary."""
    if entries is None:
        return table.shape[0] * lax.axis_size(axis_name)
    return entries


def _mark_absent(y: Array, ids: Array, entries: int) -> Array:
    """Returns rows y [..., d] with NaN for the ids [...] that are not in a vocabulary of so many
    entries.
    """
    absent = jnp.array(jnp.nan, y.dtype)
    return jnp.where(_is_present(ids, entries)[..., None], y, absent)


def _is_present(ids: Array, entries: int) -> Array:
    """Says which ids are in a vocabulary of so many entries."""
    wide = _in_32_bits(ids)
    return (wide >= 0) & (wide < entries)


def _in_32_bits(ids: Array) -> Array:
    """Returns ids in a dtype that holds every number of an entry, which 8 and 16 bits do not."""
    if ids.dtype.itemsize < 4:
        return ids.astype(jnp.int32)
    return ids


def _addend(ids: Array, table: Array, axis_name: str) -> Array:
    """Returns this device's own entries among the rows of `ids`, and zeros for those of other
    devices.
    """
    local, mine = _local_ids(ids, table.shape[0], axis_name)
    rows = table.at[local].get(out_sharding=P(*(None,) * (local.ndim + 1)))
    return jnp.where(mine[..., None], rows, jnp.zeros((), table.dtype))


def _add_rows(dtable: Array, ids: Array, dy: Array, axis_name: str) -> Array:
    """Adds the rows dy [..., s, d] to this device's entries that `ids` [..., s] name, in the dtype
    of dtable.
    """
    local, mine = _local_ids(ids, dtable.shape[0], axis_name)
    return dtable.at[local].add(jnp.where(mine[..., None], dy.astype(dtable.dtype), 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _own_rows(axis_name: str, ids: Array, table: Array) -> Array:
    """Returns `_addend`, whose own gradient would be summed in the dtype of the table."""
    with jax.named_scope("vocab_parallel_lookup"):
        return _addend(ids, table, axis_name)


def _own_rows_fwd(axis_name: str, ids: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return _own_rows(axis_name, ids, table), (ids, table)


def _own_rows_bwd(axis_name: str, saved: tuple[Array, Array], dy: Array) -> tuple[None, Array]:
    ids, table = saved
    with jax.named_scope("vocab_parallel_lookup_dtable"):
        zeros = vary_like(jnp.zeros(table.shape, accumulator_dtype(table)), dy)
        dtable = _add_rows(zeros, ids, dy, axis_name)
    return None, dtable.astype(table.dtype)


_own_rows.defvjp(_own_rows_fwd, _own_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup_reduce_scatter(ring: Ring, ids: Array, table: Array) -> Array:
    def produce(row: Index, count: int) -> Array:
        return _addend(lax.dynamic_slice_in_dim(ids, row, count, axis=-1), table, ring.axis_name)

    with jax.named_scope("vocab_parallel_lookup"):
        return ring_reduce(
            ring, ids.shape[-1] // lax.axis_size(ring.axis_name), produce, table.dtype
        )


def _lookup_reduce_scatter_fwd(
    ring: Ring, ids: Array, table: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _lookup_reduce_scatter(ring, ids, table), (ids, table)


def _lookup_reduce_scatter_bwd(
    ring: Ring, saved: tuple[Array, Array], dy: Array
) -> tuple[None, Array]:
    ids, table = saved

    def add(block: Array, row: Index, dtable: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(ids, row, block.shape[-2], axis=-1)
        return _add_rows(dtable, rows, block, ring.axis_name)

    zeros = jnp.zeros(table.shape, accumulator_dtype(table))
    with jax.named_scope("vocab_parallel_lookup_dtable"):
        dtable = ring_gather(ring, dy, vary_like(zeros, dy), add)
    return None, dtable.astype(table.dtype)


_lookup_reduce_scatter.defvjp(_lookup_reduce_scatter_fwd, _lookup_reduce_scatter_bwd)


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """What a cross-entropy adds to that of the targets. Hashable: it is a static argument."""

    ignore: int | None = None  # the target of rows whose loss is 0; None for none
    # the share of the target distribution that is spread over all entries equally
    label_smoothing: float = 0.0
    z_loss: float = 0.0  # the factor of log(sum(exp(logits)))**2, which keeps logits near zero
    # the entries that exist; later ones, which pad the vocabulary, are left out
    vocab_size: int | None = None


def cross_entropy(
    logits: Float[Array, "*batch v"],
    targets: Int[Array, "*batch"],
    axis_name: str,
    options: LossOptions = LossOptions(),
) -> Float[Array, "*batch"]:
    """Returns the softmax cross-entropy of each row, in nats, from this device's share of the
    logits.

    ```
    logits   [..., V/R]   this device's entries
    targets  [...]        the same on every device of the axis
    loss     [...]        the same on every device of the axis, float32

    forward  below   = logits - max(logits)                        a few numbers a row cross the axis
             lse     = log(sum(exp(below)))
             loss    = lse - (1 - s) * below[target] - s * mean(below) + z * (lse + max(logits))**2
    dlogits          = (softmax(logits) * (1 + 2 z (lse + max)) - (1 - s) * one_hot(target) - s/V) * dloss
    ```

    The maximum is subtracted from all logits before anything else is computed, and is never added
    again, except for the z-loss: a constant that is added to all logits changes neither the loss
    nor its gradient. A target outside 0 .. V-1 that is not `ignore` makes the loss of its row, and
    the gradient of its logits, NaN.

    It is computed in float32, or in float64 where the logits are float64. Saved for the backward
    pass are the logits as they were given, and two numbers a row.
    """
    axes = jax.typeof(logits).mat.varying
    return _cross_entropy(axis_name, options, logits, cast_to_varying(targets, axes - {axis_name}))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(axis_name: str, options: LossOptions, logits: Array, targets: Array) -> Array:
    return _cross_entropy_fwd(axis_name, options, logits, targets)[0]


def _cross_entropy_fwd(
    axis_name: str, options: LossOptions, logits: Array, targets: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    with jax.named_scope("vocab_parallel_cross_entropy"):
        exists, count = _existing(axis_name, options, logits)
        scores = logits.astype(accumulator_dtype(logits))
        if exists is not None:
            scores = jnp.where(exists, scores, jnp.finfo(scores.dtype).min)
        # The maximum has no gradient: it cancels. pmax has none at all, and a second derivative
        # would ask for it.
        highest = lax.pmax(lax.stop_gradient(jnp.max(scores, axis=-1)), axis_name)
        below = scores - highest[..., None]
        local, mine = _local_ids(targets, logits.shape[-1], axis_name)
        at_target = jnp.take_along_axis(below, local[..., None], axis=-1)[..., 0]
        shares = [jnp.sum(jnp.exp(below), axis=-1), jnp.where(mine, at_target, 0)]
        if options.label_smoothing:
            shares.append(
                jnp.sum(below if exists is None else jnp.where(exists, below, 0), axis=-1)
            )
        sum_exp, at_target, *total = lax.psum(shares, axis_name)
        log_sum_exp = jnp.log(sum_exp)
        loss = log_sum_exp - (1 - options.label_smoothing) * at_target
        if options.label_smoothing:
            loss -= options.label_smoothing / count * total[0]
        if options.z_loss:
            loss += options.z_loss * (highest + log_sum_exp) ** 2
        loss = _per_target(loss, targets, count, options)
    return loss, (logits, targets, highest, log_sum_exp)


def _cross_entropy_bwd(
    axis_name: str,
    options: LossOptions,
    saved: tuple[Array, Array, Array, Array],
    dloss: Array,
) -> tuple[Array, None]:
    logits, targets, highest, log_sum_exp = saved
    if axis_name not in jax.typeof(logits).mat.varying:
        # Under check_vma=False no type says that the loss is the same everywhere, and each device
        # gets a share of dloss.
        dloss = lax.psum(dloss, axis_name)
    exists, count = _existing(axis_name, options, logits)
    local, mine = _local_ids(targets, logits.shape[-1], axis_name)
    numbers = lax.broadcast_to_rank(jnp.arange(logits.shape[-1], dtype=local.dtype), logits.ndim)
    hit = (numbers == local[..., None]) & mine[..., None]
    below = logits.astype(dloss.dtype) - highest[..., None]
    gradient = jnp.exp(below - log_sum_exp[..., None])
    if options.z_loss:
        gradient *= 1 + 2 * options.z_loss * (highest + log_sum_exp)[..., None]
    gradient -= (1 - options.label_smoothing) * hit.astype(
        dloss.dtype
    ) + options.label_smoothing / count
    if exists is not None:
        gradient = jnp.where(exists, gradient, 0)
    dloss = _per_target(dloss, targets, count, options)
    return (gradient * dloss[..., None]).astype(logits.dtype), None


def _per_target(value: Array, targets: Array, count: int, options: LossOptions) -> Array:
    """Returns a value of each row [...], NaN for targets that are no entry, and 0 for those that
    are ignored.
    """
    value = jnp.where(_is_present(targets, count), value, jnp.nan)
    if options.ignore is None:
        return value
    return jnp.where(targets == options.ignore, 0, value)


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _existing(axis_name: str, options: LossOptions, logits: Array) -> tuple[Array | None, int]:
    """Returns which of this device's entries are in the vocabulary (None for all), and how many are
    in it in total.
    """
    entries = logits.shape[-1]
    whole = entries * lax.axis_size(axis_name)
    if options.vocab_size is None:
        count = whole
    else:
        count = options.vocab_size
    if count == whole:
        return None, count
    return lax.axis_index(axis_name) * entries + jnp.arange(entries, dtype=jnp.int32) < count, count


def _local_ids(ids: Array, entries: int, axis_name: str) -> tuple[Array, Array]:
    """Returns the positions of `ids` in this device's share, 0 for those outside of it, and whether
    they are inside.
    """
    wide = _in_32_bits(ids)
    local = wide - (lax.axis_index(axis_name) * entries).astype(wide.dtype)
    mine = (local >= 0) & (local < entries)
    return jnp.where(mine, local, 0), mine
