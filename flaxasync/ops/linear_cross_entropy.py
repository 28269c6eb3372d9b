"""The cross-entropy of logits that never exist: they are computed a block of rows at a time, inside
`jax.shard_map`.

The logits of 3 x 8192 rows of a vocabulary of 128,256 entries are 12.6 GB in float32. Here the
logits and the loss of one block of rows are computed, and at once the gradients of its rows and of
the kernel, so that none is computed twice:

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

The gradients are those of the sum over all rows. The backward pass only multiplies them with its
cotangent, a scalar.

Source: the idea of gradients in the forward pass is that of Hsu et al., "Liger Kernel: Efficient
Triton Kernels for LLM Training" (2024).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from flaxasync.mesh import cast_to_varying, vary_like
from flaxasync.ops.matmul.products import accumulator_dtype, dot, weight_gradient
from flaxasync.ops.vocabulary import LossOptions, cross_entropy

type Gradients = tuple[Array, Array]  # of x and kernel


@dataclasses.dataclass(frozen=True)
class BlockLoss:
    """What is static in such a loss. Hashable."""

    axis_name: str
    rows_sharded: bool  # whether the axis shards the rows of x
    options: LossOptions
    softcap: float | None  # logits l become c * tanh(l / c)
    # of all batches, and of all devices that share the logits, in one block, at most
    block_rows: int
    precision: lax.PrecisionLike = None


def linear_cross_entropy(
    loss: BlockLoss,
    x: Float[Array, "*batch m d"],
    kernel: Float[Array, "d v"],
    targets: Int[Array, "*batch s"],
    weights: Float[Array, "*batch s"],
) -> Float[Array, ""]:
    """Returns the sum of weights * cross_entropy(x @ kernel, targets) over this device's batch, in
    float32.

    The result is the same on every device of the axis. `weights` have no gradient.
    """
    batch = (jax.typeof(x).mat.varying | jax.typeof(kernel).mat.varying) - {loss.axis_name}
    everywhere = batch | {loss.axis_name}
    x = cast_to_varying(x, everywhere)
    kernel = cast_to_varying(kernel, everywhere)
    targets, weights = (
        cast_to_varying(lax.stop_gradient(leaf), batch) for leaf in (targets, weights)
    )
    return _sum(loss, x, kernel, targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(loss: BlockLoss, x: Array, kernel: Array, targets: Array, weights: Array) -> Array:
    return _scan(loss, x, kernel, targets, weights, with_gradients=False)[0]


def _sum_fwd(
    loss: BlockLoss, x: Array, kernel: Array, targets: Array, weights: Array
) -> tuple[Array, Gradients]:
    return _scan(loss, x, kernel, targets, weights, with_gradients=True)


def _scan(
    loss: BlockLoss,
    x: Array,
    kernel: Array,
    targets: Array,
    weights: Array,
    *,
    with_gradients: bool,
) -> tuple[Array, Any]:
    """Returns the sum, and its `Gradients` if they are wanted, else None."""
    blocks = _Blocks.of(loss, x)
    cast = kernel.astype(x.dtype)
    given = x.shape[-2]

    type Sums = tuple[Array, Gradients | None]

    def add(sums: Sums, block: tuple[Array, Array, Array]) -> tuple[Sums, None]:
        total, gradients = sums
        index, targets, weights = block
        rows = blocks.rows(x, index)
        scores = dot(rows, cast, loss.precision)
        if gradients is None:
            return (total + _weighted(loss, scores, targets, weights), None), None
        dx, dkernel = gradients
        one, pull = jax.vjp(lambda scores: _weighted(loss, scores, targets, weights), scores)
        dscores = pull(jnp.ones_like(one))[0].astype(x.dtype)
        drows = dot(dscores, cast, loss.precision, transposed=True).astype(x.dtype)
        if loss.rows_sharded:
            drows = lax.psum_scatter(
                drows, loss.axis_name, scatter_dimension=drows.ndim - 2, tiled=True
            )
        dx = lax.dynamic_update_slice_in_dim(dx, drows, index * blocks.length, dx.ndim - 2)
        added = (total + one, (dx, dkernel + weight_gradient(rows, dscores, loss.precision)))
        return added, None

    with jax.named_scope("linear_cross_entropy"):
        x = blocks.pad(x, -2)
        zeros: Gradients | None = None
        if with_gradients:
            dkernel = vary_like(jnp.zeros(kernel.shape, accumulator_dtype(x)), kernel)
            zeros = (jnp.zeros_like(x), dkernel)
        sums = (vary_like(jnp.zeros((), weights.dtype), weights), zeros)
        (total, found), _ = lax.scan(add, sums, blocks.of_all_devices(targets, weights))
    if found is not None:
        dx, dkernel = found
        found = (dx[..., :given, :], dkernel.astype(kernel.dtype))
    return total, found


def _sum_bwd(loss: BlockLoss, saved: Gradients, dtotal: Array) -> tuple[Array, Array, None, None]:
    dx, dkernel = (
        (gradient.astype(dtotal.dtype) * dtotal).astype(gradient.dtype) for gradient in saved
    )
    return dx, dkernel, None, None


_sum.defvjp(_sum_fwd, _sum_bwd)


def _weighted(loss: BlockLoss, scores: Array, targets: Array, weights: Array) -> Array:
    if loss.softcap is not None:
        scores = loss.softcap * jnp.tanh(scores / loss.softcap)
    return jnp.sum(cross_entropy(scores, targets, loss.axis_name, loss.options) * weights)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """How the rows of a device are divided."""

    loss: BlockLoss
    devices: int  # whose rows are in a block
    count: int
    # rows of this device in a block; the last block is filled with rows that weigh nothing
    length: int

    @classmethod
    def of(cls, loss: BlockLoss, x: Array) -> "_Blocks":
        if loss.rows_sharded:
            devices = lax.axis_size(loss.axis_name)
        else:
            devices = 1
        rows = x.shape[-2]
        together = math.prod(x.shape[:-2]) * devices
        fewest = max(1, min(-(-rows * together // loss.block_rows), rows))
        count = next((count for count in range(fewest, 2 * fewest) if rows % count == 0), fewest)
        return cls(loss, devices, count, -(-rows // count))

    def pad(self, x: Array, axis: int) -> Array:
        padding = [(0, 0, 0)] * x.ndim
        padding[axis] = (0, self.count * self.length - x.shape[axis], 0)
        return lax.pad(x, jnp.zeros((), x.dtype), padding)

    def rows(self, x: Array, index: Array) -> Array:
        """Returns the rows of one block, those of all devices where they are sharded."""
        rows = lax.dynamic_slice_in_dim(x, index * self.length, self.length, x.ndim - 2)
        if not self.loss.rows_sharded:
            return rows
        return lax.all_gather(rows, self.loss.axis_name, axis=x.ndim - 2, tiled=True)

    def of_all_devices(self, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
        """Returns the number of each block, and arrays [..., R*m] as [count, ..., R*length], in the
        order of `rows`.
        """

        def split(leaf: Array) -> Array:
            *batch, rows = leaf.shape
            leaf = self.pad(leaf.reshape(*batch, self.devices, rows // self.devices), -1)
            leaf = jnp.moveaxis(leaf.reshape(*leaf.shape[:-1], self.count, self.length), -2, 0)
            return leaf.reshape(*leaf.shape[:-2], self.devices * self.length)

        return jnp.arange(self.count, dtype=jnp.int32), split(targets), split(weights)
