"""Gradient accumulation: a batch is computed as several micro-batches, one after the other.

```
batch            x  [B, L]           sharded over the rows, and over the sequence on a context axis
micro-batches    x  [N, B / N, L]    each is sharded as the batch is; row i of the batch is in micro-batch i % N

loss       sum over n of  share_n * loss_n         share_n = targets of micro-batch n / targets of the batch
parts      sum over n of  share_n * parts_n        of the loss, which have no gradient of their own
gradient   sum over n of  share_n * gradient_n     in float32, sharded as the parameters are
```

Loss and gradient are therefore those of the whole batch, up to rounding, if the loss of a batch is
a mean over its targets. Two things of a mixture of experts are not, see `what_differs`. No row
moves to another device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from models.config import TransformerConfig

type Loss = Callable[..., Any]
type Parts = dict[str, Array]


def what_differs(model: TransformerConfig, count: int) -> str:
    """Says by what a step in `count` micro-batches is not that of the whole batch up to rounding;
    "" if it is.

    The load-balancing loss is a sum over experts of products of two means over tokens, and the mean
    of such products over the micro-batches is not the product of the means over the batch. The
    whole one would need the shares of all micro-batches before the gradient of the first, which is
    one more forward pass. The router's z-loss is a mean.
    """
    if count == 1 or not model.experts:
        return ""
    found = list[str]()
    if model.load_balance_weight:
        found.append("the load-balancing loss is the mean of those of the micro-batches")
    if model.capacity_factor is not None:
        found.append(
            "an expert's capacity is that in a micro-batch, so that other tokens are dropped"
        )
    return "; ".join(found)


def split_batch(batch: tuple[Array, ...], count: int) -> tuple[Array, ...]:
    """Splits every array [B, L] of a batch into micro-batches [count, B / count, L], which stay on
    their devices.
    """

    def split(rows: Array) -> Array:
        spec = jax.typeof(rows).sharding.spec
        first, *rest = rows.shape
        apart = rows.reshape(
            first // count, count, *rest, out_sharding=jax.P(spec[0], None, *spec[1:])
        )
        return jnp.moveaxis(apart, 1, 0)

    return tuple(map(split, batch))


def loss_and_gradient(
    loss: Loss, targets: Callable[..., Array], params: PyTree, batch: tuple[Array, ...], count: int
) -> tuple[Array, Parts, PyTree]:
    """Returns the loss of a batch [B, L] as float32, its parts, and its gradient.

    `loss` is a function (params, *batch) -> the mean loss of the targets of a batch, and parts of
    it by name, float32; `targets` is one (*batch) -> their number. All are scalars. On every
    device, `count` must divide B. With more than one micro-batch, the gradient is float32.
    """
    if count == 1:
        (value, parts), gradient = jax.value_and_grad(
            lambda params: loss(params, *batch), has_aux=True
        )(params)
        return value.astype(jnp.float32), parts, gradient
    everything = jnp.maximum(targets(*batch), 1)

    def add(
        sums: tuple[Array, PyTree], micro: tuple[Array, ...]
    ) -> tuple[tuple[Array, PyTree], Parts]:
        share = targets(*micro) / everything

        def weighted(params: PyTree) -> tuple[Array, Parts]:
            return jax.tree.map(lambda one: one * share, loss(params, *micro))

        (value, parts), gradient = jax.value_and_grad(weighted, has_aux=True)(params)
        with jax.named_scope("accumulate_gradients"):
            return jax.tree.map(
                lambda total, one: total + one.astype(jnp.float32), sums, (value, gradient)
            ), parts

    nothing = jnp.float32(0), jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params)
    (value, gradient), parts = lax.scan(add, nothing, split_batch(batch, count))
    return value, jax.tree.map(lambda part: jnp.sum(part, axis=0), parts), gradient


def sum_of_losses(
    loss: Loss, targets: Callable[..., Array], params: PyTree, batch: tuple[Array, ...], count: int
) -> Array:
    """Returns the sum of the losses of a batch and the number of its targets, float32 [2]; see
    `loss_and_gradient`.
    """

    def both(*micro: Array) -> Array:
        number = targets(*micro)
        return jnp.stack([loss(params, *micro).astype(jnp.float32) * number, number])

    if count == 1:
        return both(*batch)
    nothing = jnp.zeros(2, jnp.float32)
    return lax.scan(
        lambda total, micro: (total + both(*micro), None), nothing, split_batch(batch, count)
    )[0]
