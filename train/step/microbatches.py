"""Gradient accumulation: a batch is computed as several micro-batches, one after the other.

```
batch            x  [B, L]           sharded over the rows, and over the sequence on a context axis
micro-batches    x  [N, B / N, L]    each is sharded as the batch is; row i of the batch is in micro-batch i % N

loss       sum over n of  share_n * loss_n         share_n = targets of micro-batch n / targets of the batch
gradient   sum over n of  share_n * gradient_n     in float32, sharded as the parameters are
```

Loss and gradient are therefore those of the whole batch, up to rounding. No row moves to another device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

type Loss = Callable[..., Array]


def split_batch(batch: tuple[Array, ...], count: int) -> tuple[Array, ...]:
    """Splits every array [B, L] of a batch into micro-batches [count, B / count, L], which stay on their devices."""

    def split(rows: Array) -> Array:
        spec = jax.typeof(rows).sharding.spec
        first, *rest = rows.shape
        apart = rows.reshape(first // count, count, *rest, out_sharding=jax.P(spec[0], None, *spec[1:]))
        return jnp.moveaxis(apart, 1, 0)

    return tuple(map(split, batch))


def loss_and_gradient(
    loss: Loss, targets: Callable[..., Array], params: Any, batch: tuple[Array, ...], count: int
) -> tuple[Array, Any]:
    """Returns the loss of a batch [B, L] as float32, and its gradient, which more than one micro-batch makes float32.

    `loss` is a function (params, *batch) -> the mean loss of the targets of a batch, and `targets` is one (*batch) ->
    their number, both scalars. On every device, `count` must divide B.
    """
    if count == 1:
        value, gradient = jax.value_and_grad(lambda params: loss(params, *batch))(params)
        return value.astype(jnp.float32), gradient
    everything = jnp.maximum(targets(*batch), 1)

    def add(sums: tuple[Array, Any], micro: tuple[Array, ...]) -> tuple[tuple[Array, Any], None]:
        share = targets(*micro) / everything
        value, gradient = jax.value_and_grad(lambda params: loss(params, *micro) * share)(params)
        with jax.named_scope("accumulate_gradients"):
            return jax.tree.map(lambda total, one: total + one.astype(jnp.float32), sums, (value, gradient)), None

    nothing = jnp.float32(0), jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params)
    return lax.scan(add, nothing, split_batch(batch, count))[0]


def sum_of_losses(
    loss: Loss, targets: Callable[..., Array], params: Any, batch: tuple[Array, ...], count: int
) -> Array:
    """Returns the sum of the losses of a batch and the number of its targets, float32 [2]; see `loss_and_gradient`."""

    def both(*micro: Array) -> Array:
        number = targets(*micro)
        return jnp.stack([loss(params, *micro).astype(jnp.float32) * number, number])

    if count == 1:
        return both(*batch)
    nothing = jnp.zeros(2, jnp.float32)
    return lax.scan(lambda total, micro: (total + both(*micro), None), nothing, split_batch(batch, count))[0]
