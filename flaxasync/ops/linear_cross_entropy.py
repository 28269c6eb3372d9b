"""The cross-entropy of logits that never exist: they are computed a block of rows at a time, inside `jax.shard_map`.

The logits of 3 x 8192 rows of a vocabulary of 128,256 entries are 12.6 GB in float32. Here a block of rows makes its
logits, its loss, and at once the gradients of its rows and of the kernel, so that no block is computed twice:

```
x        [..., m, d]        this device's rows, or [..., R*m, d] where every device of axis_name has all rows
kernel   [d, V/R]           this device's entries
targets  [..., R*m]         the same on every device of axis_name
weights  [..., R*m]         likewise

block    rows    = all_gather(x[block])                      where the rows are sharded
         scores  = rows @ kernel                             accumulated in float32, never stored beyond the block
         dscores = d(sum of weights * cross_entropy)/dscores, in the dtype of x
         dx      = reduce_scatter(dscores @ kernel.T)
         dkernel = dkernel + rows.T @ dscores                in float32
```

The gradients are those of the sum, so that the backward pass only multiplies them with its cotangent, a scalar.

Source: the idea of gradients in the forward pass is that of Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM
Training" (2024).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from flaxasync.mesh import cast_to_varying
from flaxasync.ops.accumulation import accumulator_dtype
from flaxasync.ops.matmul.products import dot, weight_gradient
from flaxasync.ops.vocabulary import LossOptions, cross_entropy


@dataclasses.dataclass(frozen=True)
class BlockLoss:
    """What is static in such a loss. Hashable."""

    axis_name: str
    rows_sharded: bool  # whether the axis shards the rows of x
    options: LossOptions
    softcap: float | None  # logits l become c * tanh(l / c)
    block_bytes: int  # of float32 logits on a device, at most


def linear_cross_entropy(
    loss: BlockLoss,
    x: Float[Array, "*batch m d"],
    kernel: Float[Array, "d v"],
    targets: Int[Array, "*batch s"],
    weights: Float[Array, "*batch s"],
) -> Float[Array, ""]:
    """Returns the sum of weights * cross_entropy(x @ kernel, targets) over this device's batch, in float32.

    The result is the same on every device of the axis. `weights` have no gradient.
    """
    batch = (jax.typeof(x).mat.varying | jax.typeof(kernel).mat.varying) - {loss.axis_name}
    everywhere = batch | {loss.axis_name}
    x, kernel = cast_to_varying(x, everywhere), cast_to_varying(kernel, everywhere)
    targets, weights = (cast_to_varying(lax.stop_gradient(leaf), batch) for leaf in (targets, weights))
    return _sum(loss, x, kernel, targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(loss: BlockLoss, x: Array, kernel: Array, targets: Array, weights: Array) -> Array:
    def add(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        rows, targets, weights = block
        return total + _weighted(loss, dot(_gather(loss, rows), kernel), targets, weights), None

    with jax.named_scope("linear_cross_entropy"):
        return lax.scan(add, _zero(weights), _blocks(loss, x, kernel, targets, weights))[0]


def _sum_fwd(
    loss: BlockLoss, x: Array, kernel: Array, targets: Array, weights: Array
) -> tuple[Array, tuple[Array, Array]]:
    def add(sums: tuple[Array, Array], block: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (total, dkernel), (rows, targets, weights) = sums, block
        rows = _gather(loss, rows)
        one, pull = jax.vjp(lambda scores: _weighted(loss, scores, targets, weights), dot(rows, kernel))
        dscores = pull(jnp.ones_like(one))[0].astype(x.dtype)
        dx = dot(dscores, kernel, transposed=True).astype(x.dtype)
        if loss.rows_sharded:
            dx = lax.psum_scatter(dx, loss.axis_name, scatter_dimension=dx.ndim - 2, tiled=True)
        return (total + one, dkernel + weight_gradient(rows, dscores)), dx

    with jax.named_scope("linear_cross_entropy"):
        dkernel = cast_to_varying(jnp.zeros(kernel.shape, accumulator_dtype(x)), jax.typeof(kernel).mat.varying)
        blocks = _blocks(loss, x, kernel, targets, weights)
        (total, dkernel), dx = lax.scan(add, (_zero(weights), dkernel), blocks)
        dx = jnp.moveaxis(dx, 0, -3)
        dx = dx.reshape(*x.shape[:-2], -1, x.shape[-1])[..., : x.shape[-2], :]
    return total, (dx, dkernel.astype(kernel.dtype))


def _sum_bwd(loss: BlockLoss, saved: tuple[Array, Array], dtotal: Array) -> tuple[Array, Array, None, None]:
    dx, dkernel = ((gradient.astype(dtotal.dtype) * dtotal).astype(gradient.dtype) for gradient in saved)
    return dx, dkernel, None, None


_sum.defvjp(_sum_fwd, _sum_bwd)


def _weighted(loss: BlockLoss, scores: Array, targets: Array, weights: Array) -> Array:
    if loss.softcap is not None:
        scores = loss.softcap * jnp.tanh(scores / loss.softcap)
    return jnp.sum(cross_entropy(scores, targets, loss.axis_name, loss.options) * weights)


def _gather(loss: BlockLoss, rows: Array) -> Array:
    return lax.all_gather(rows, loss.axis_name, axis=rows.ndim - 2, tiled=True) if loss.rows_sharded else rows


def _blocks(loss: BlockLoss, x: Array, kernel: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Returns x, targets and weights with a leading dimension of blocks; rows that fill the last one weigh nothing."""
    *batch, rows, _ = x.shape
    devices = lax.axis_size(loss.axis_name) if loss.rows_sharded else 1
    bytes_of_a_row = 4 * devices * kernel.shape[1]
    for size in batch:
        bytes_of_a_row *= size
    fit = max(loss.block_bytes // bytes_of_a_row, 1)
    count = -(-rows // fit)
    count = next((n for n in range(count, 2 * count) if rows % n == 0), count)
    length = -(-rows // count)

    def split(leaf: Array, axis: int) -> Array:
        axis += leaf.ndim
        padding = [(0, 0, 0)] * leaf.ndim
        padding[axis] = (0, count * length - rows, 0)
        leaf = lax.pad(leaf, jnp.zeros((), leaf.dtype), padding)
        leaf = leaf.reshape(*leaf.shape[:axis], count, length, *leaf.shape[axis + 1 :])
        return jnp.moveaxis(leaf, axis, 0)

    def of_all_devices(leaf: Array) -> Array:
        """Returns an array [..., R*m] as blocks [count, ..., R*length], whose rows are those of the gathered block."""
        leaf = split(leaf.reshape(*leaf.shape[:-1], devices, rows), -1)
        return leaf.reshape(*leaf.shape[:-2], -1)

    return split(x, -2), of_all_devices(targets), of_all_devices(weights)


def _zero(weights: Array) -> Array:
    return cast_to_varying(jnp.zeros((), weights.dtype), jax.typeof(weights).mat.varying)
