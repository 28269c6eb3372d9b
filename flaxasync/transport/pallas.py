"""Value futures: a permute as two Pallas kernels, with the DMA under way between them. TPU only.

```
x                      the block that is sent, in HBM; the start returns it, the done takes it
Future.buffer          as x: the block that arrives, in HBM
Future.semaphores      (send, receive): bytes of x that were read, bytes that were written here
```

The start first waits until the receiver has entered it, too: before that, the memory that is written may hold
something else. So each device signals its *source*, and waits for its destination. The barrier is tagged with axis and
shift, for which JAX picks an id that no other kernel of the program has; `collective_id` sets it by hand.

A loop that carries a future needs `unroll=2` (`check_unroll`): source and destination change roles each turn, and with
one turn a body XLA copies one of them, while it is in flight, into the place that the loop's carry has for it.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.mesh import device_at
from flaxasync.transport import schedule
from flaxasync.transport.pair import Future, Pair


def start(x: jax.Array, axis_name: str, *, shift: int, collective_id: int | None = None) -> tuple[jax.Array, Future]:
    """Begins sending `x` to the device `shift` places onward on `axis_name`.

    Args:
      x: this device's block.
      axis_name: the mesh axis.
      shift: device i sends to device (i + shift) % R.
      collective_id: of the entry barrier. By default one that is this axis's and shift's own in the program.

    Returns:
      `(x, future)`: the x to use from here on, and what `done` needs.

    Raises:
      NotImplementedError: TPU DMAs cannot move arrays of this dtype or shape.
    """
    return permute(axis_name, shift % lax.axis_size(axis_name), collective_id).start(x)


def done(x: jax.Array, future: Future) -> jax.Array:
    """Waits until `x` is sent and its counterpart has arrived, and returns that."""
    return future.pair.done(x, future)


def pin(x: jax.Array, values: Any) -> tuple[jax.Array, Any]:
    """Ties `values` to the x of a transfer under way."""
    return schedule.tie(x, values)


def check_unroll(unroll: int) -> None:
    """Raises ValueError for a loop with one turn a body."""
    if unroll < 2:
        raise ValueError(
            f"a loop of value futures needs unroll=2 or more: got unroll={unroll}. Source and destination change roles "
            "every turn; with one turn in the loop's body XLA copies one of them while it is in flight, and the result "
            "is wrong. Leave unroll out, or use backend='xla'"
        )


@functools.cache
def permute(axis_name: str, shift: int, collective_id: int | None = None) -> Pair:
    """The pair that sends a block `shift` devices onward, 0 <= shift < R. One object for the same arguments."""

    def start_body(x_ref: Any, y_ref: Any, send_sem: Any, recv_sem: Any) -> None:
        enter(axis_name, shift, collective_id)
        send(x_ref, y_ref, send_sem, recv_sem, axis_name, shift)

    return Pair(
        "ppermute",
        start_body,
        wait_sent_and_received,
        semaphores=2,
        collective_id=collective_id,
        remote=True,
        elementwise=True,
    )


def enter(axis_name: str, shift: int, collective_id: int | None = None) -> None:
    """Waits, inside a kernel, until the device that this one sends to has entered the same kernel.

    One barrier for each axis and shift: a device that waits for its right neighbour must not take the signal of its
    left one for it.
    """
    tag = None if collective_id is not None else f"flaxasync.ppermute {axis_name} {shift}"
    barrier = pltpu.get_barrier_semaphore(tag)
    with jax.named_scope("enter"):
        pl.semaphore_signal(barrier, device_id=device_at(axis_name, -shift))
        pl.semaphore_wait(barrier, 1)


def send(x_ref: Any, y_ref: Any, send_sem: Any, recv_sem: Any, axis_name: str, shift: int) -> None:
    """Starts, inside a kernel, the DMA from x_ref here to y_ref on the device `shift` places onward."""
    with jax.named_scope("send"):
        pltpu.make_async_remote_copy(x_ref, y_ref, send_sem, recv_sem, device_id=device_at(axis_name, shift)).start()


def wait_sent_and_received(x_ref: Any, y_ref: Any, send_sem: Any, recv_sem: Any) -> None:
    """Waits, inside a kernel, for both ends of a `send`: x_ref may be written again, y_ref may be read.

    A wait needs a descriptor only for its number of bytes: local copies of a ref onto itself serve.
    """
    with jax.named_scope("wait"):
        pltpu.make_async_copy(x_ref, x_ref, send_sem).wait()
        pltpu.make_async_copy(y_ref, y_ref, recv_sem).wait()
