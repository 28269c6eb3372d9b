"""Self-attention of rows that are sharded over the layer's axis, in which weights and heads travel instead of rows.

A layer that gathers rows sends all features of all rows four times in a forward and backward pass. Here each device
projects its own rows with the weights of all devices, and an all-to-all turns its rows of all heads into all rows of
its heads, and back:

```
x      [b, s / R, k]            this device's rows                              (R devices on the axis)
z      R blocks [n, s / R]      for each sequence of the batch: w.T @ x.T, whose block d has the heads of device d
       all-to-all               all rows of this device's heads
heads  R blocks [m, s / R]      attention; block d has the rows of device d
       all-to-all               this device's rows of all heads
y      [b, s / R, k]            out.T @ heads, transposed
```

The weights travel behind the products that use them (`flaxasync.ops.matmul`). The sequences of the batch are exchanged
one by one: while one of them attends, the next one arrives and the one before leaves. What travels is less where the
rows of all devices are more than the features.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.nn.prefetch import Transfer, Transfers, meanwhile
from flaxasync.transport import direct

type Arrays = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What is static.

    Attributes:
      axis_name: The layer's mesh axis.
      attend: A function (rows of this device's heads, [R, n, s / R], further arrays) -> the result, [R, m, s / R].
      direct: Whether Pallas copies make the exchange, beside what is computed meanwhile, or XLA's all-to-all.
    """

    axis_name: str
    attend: Callable[..., Array]
    direct: bool

    def start(self, x: Array) -> Transfers:
        """Begins to send block d of [R * n, s / R] to device d; what arrives is [R, n, s / R]."""
        size = lax.axis_size(self.axis_name)
        if self.direct:
            return Transfers([Transfer(*direct.all_to_all(self.axis_name, size, 0).start(x))], "exchange_heads")
        blocks = x.reshape(size, -1, x.shape[-1])
        return Transfers([Transfer(lax.all_to_all(blocks, self.axis_name, 0, 0))], "exchange_heads")

    def through[T](self, compute: Callable[[int, Array], tuple[Array, T]], xs: Arrays) -> tuple[Arrays, list[T]]:
        """Sends each array to where it is computed with, and the results back.

        Args:
          compute: A function (number of the array, what arrived) -> [R, m, s / R], and what is returned beside it.
          xs: The arrays, [R * n, s / R].
        """
        arriving, leaving, more = self.start(xs[0]), [], []
        for i in range(len(xs)):
            (x,) = arriving.done()
            under_way = leaving[-1:]
            if i + 1 < len(xs):
                under_way.append(arriving := self.start(xs[i + 1]))
            y, other = meanwhile(under_way, functools.partial(compute, i), x)
            leaving.append(self.start(y.reshape(-1, y.shape[-1])))
            more.append(other)
        arrived = (transfers.done()[0] for transfers in leaving)
        return tuple(y.reshape(-1, y.shape[-1]) for y in arrived), more


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchanged(exchange: Exchange, xs: Arrays, others: tuple[Arrays, ...], shared: Any) -> Arrays:
    return _exchanged_fwd(exchange, xs, others, shared)[0]


def _exchanged_fwd(exchange: Exchange, xs: Arrays, others: tuple[Arrays, ...], shared: Any) -> tuple[Arrays, list[Any]]:
    def compute(i: int, x: Array) -> tuple[Array, Any]:
        return jax.vjp(lambda x, shared: exchange.attend(x, *others[i], shared), x, shared)

    return exchange.through(compute, xs)


def _exchanged_bwd(exchange: Exchange, pulls: list[Any], dys: Arrays) -> tuple[Arrays, None, Any]:
    dxs, dshared = exchange.through(lambda i, dy: pulls[i](dy), dys)
    return dxs, None, jax.tree.map(lambda *each: functools.reduce(jnp.add, each), *dshared)


exchanged.defvjp(_exchanged_fwd, _exchanged_bwd)
