"""All-gather and all-to-all as start/done pairs in which every device sends to every other one
directly. TPU only.

```
all_gather     x [.., n, ..]     ->  y [.., R n, ..]    block d of y is the x of device d
all_to_all     x [.., R n, ..]   ->  y [R, .., n, ..]   y[d] is the block of device d's x that belongs to this device
```

A reduce-scatter is an all-to-all whose blocks the receiver adds up. A ring would send fewer bytes
over each link: (R - 1) / 2 blocks in each direction where these send about R^2 / 8. But every hop
of a ring is work for the core, which starts the next one, while these are one start and one done,
and the core is free between them. They are for transfers that have long to finish, on rings of few
devices.

A device sends to its nearest neighbours first. In the simulator, which sends one transfer at a time
over each link of a chip, the farthest first takes 1.4 times as long on closed rings of four v5e,
and 1.3 times on rings of eight.

The start waits until all other devices of the axis have entered it, because all of them write here.
Block d of y is written by device d alone, and this device's own block by a local copy.

All starts of a kind on an axis share one barrier. A fast device may already signal the next start
while a slow device has not yet signalled this one, and a third device may count the first signal
for the second. That is harmless. The first device that leaves a start has counted R - 1 signals,
which all belong to this start, because no device has signalled the next one yet. So every device
has entered a start before any device signals the next one.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.ring import enter
from flaxasync.kernels.engine.slots import start_copy, start_send, wait
from flaxasync.mesh import device_at
from flaxasync.transport.pair import Pair, Ref, Scalar, Semaphore

LANES = 128  # columns of a tile in HBM
SUBLANE_BYTES = 32  # of a column of a tile: 8 rows of 32 bits, or more rows of fewer bits


def in_whole_tiles(block: jax.Array | jax.ShapeDtypeStruct, dim: int) -> bool:
    """Returns whether blocks that lie side by side along `dim` begin and end at the borders of
    tiles in HBM.
    """
    if block.ndim < 2 or block.size == 0:
        return False
    length = block.shape[dim]
    if dim == block.ndim - 1:
        return length % LANES == 0
    return dim < block.ndim - 2 or length * block.dtype.itemsize % SUBLANE_BYTES == 0


@functools.cache
def all_gather(axis_name: str, size: int, dim: int) -> Pair:
    """Returns the pair that gathers blocks along `dim` over the devices of an axis, of which there
    are `size`.
    """
    block = functools.partial(_block, size, dim)
    return _pair(
        "all_gather",
        axis_name,
        size,
        lambda x, _: x,
        block,
        lambda x: jnp.concatenate([x] * size, dim),
    )


@functools.cache
def all_to_all(axis_name: str, size: int, dim: int) -> Pair:
    """Returns the pair that sends block d along `dim` to device d of an axis that has `size`
    devices.
    """
    block = functools.partial(_block, size, dim)
    return _pair(
        "all_to_all",
        axis_name,
        size,
        block,
        lambda y, me: y.at[me],
        lambda x: jnp.stack(jnp.split(x, size, dim)),
    )


def _block(size: int, dim: int, ref: Ref, device: Scalar) -> Ref:
    """Returns the part of `ref` that block number `device` of `size` blocks along `dim` takes."""
    rows = ref.shape[dim] // size
    return ref.at[*(slice(None),) * dim, pl.ds(pl.multiple_of(device * rows, rows), rows)]


def _pair(
    name: str,
    axis_name: str,
    size: int,
    source: Callable[[Ref, Scalar], Ref],
    target: Callable[[Ref, Scalar], Ref],
    out: Callable[[jax.Array], jax.Array],
) -> Pair:
    """Returns the pair that sends `source(x_ref, device)` to `target(y_ref, me)` on each device,
    this one included.
    """

    def start_body(x_ref: Ref, y_ref: Ref, send_sem: Semaphore, recv_sem: Semaphore) -> None:
        me = lax.axis_index(axis_name)

        def distance(hop: int) -> int:
            return min(hop, size - hop)

        others = sorted(range(1, size), key=distance)  # the nearest first; see above
        enter(f"{name} {axis_name}", map(functools.partial(device_at, axis_name), others), None)
        with jax.named_scope("send"):
            for hop in others:
                there = device_at(axis_name, hop)
                block = source(x_ref, there[axis_name])
                start_send(block, target(y_ref, me), send_sem, recv_sem, there)
            start_copy(source(x_ref, me), target(y_ref, me), recv_sem)

    def done_body(x_ref: Ref, y_ref: Ref, send_sem: Semaphore, recv_sem: Semaphore) -> None:
        sent = target(y_ref, 0)  # of the size of each block that was sent
        with jax.named_scope("wait"):
            for _ in range(size - 1):
                wait(sent, send_sem)
            wait(y_ref, recv_sem)

    return Pair(
        name,
        start_body,
        done_body,
        out=out,
        semaphores=2,
        remote=True,
        instead="backend='xla'",
    )
