"""Value futures: a permute as two Pallas kernels, with the DMA under way between them. Backend
"pallas", TPU only.

```
x                      the block that is sent, in HBM; the start returns it, the done takes it
Future.buffer          the block that arrives, of the shape of x, in HBM
Future.semaphores      (send, receive): they count the bytes of x that were read, and the bytes that arrived
```

The start first waits until the receiver has entered its own start; before that, the memory that
will be written may hold something else. So each device signals its *source* and waits for its
destination. The barrier is tagged with the axis and the shift, and JAX gives each tag an id that no
other kernel of the program has; `collective_id` sets the id by hand.

A loop that carries a future needs `unroll=2` (`check_unroll`): the source and the destination swap
roles in every turn, and with one turn in the body XLA copies one of them, while it is in flight, to
the position that the loop's carry has for it.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree

from flaxasync.kernels.engine.ring import enter as enter_kernel
from flaxasync.kernels.engine.slots import start_send, wait
from flaxasync.mesh import device_at
from flaxasync.ring import Block, Update
from flaxasync.transport import schedule
from flaxasync.transport.pair import Future, Pair, Ref, Semaphore

# the arrays of a block, each with the future that belongs to it
type Futures = tuple[list[jax.Array], list[Future]]


@dataclasses.dataclass(frozen=True)
class PallasTransport:
    """A `flaxasync.ring.Transport` that moves values with a pair of Pallas kernels."""

    def open(self, block: Block, axis_name: str, *, shift: int) -> "FutureChannel":
        return FutureChannel(block, permute(axis_name, shift % lax.axis_size(axis_name)))

    def check_unroll(self, unroll: int) -> None:
        if unroll < 2:
            raise ValueError(
                f"a loop of value futures needs unroll=2 or more: got unroll={unroll}. Source and "
                "destination change roles every turn; with one turn in the loop's body XLA copies "
                "one of them while it is in flight, and the result is wrong. Leave unroll out, or "
                "use backend='xla'"
            )


@dataclasses.dataclass(frozen=True)
class FutureChannel:
    """The channel of a block that is a value. The loop carries each array of the block together
    with its future.
    """

    block: Block
    pair: Pair

    def start(self) -> Futures:
        return self._start(self.block)

    def read(self, state: Futures, turn: int) -> Block:
        arrays, _ = state
        return jax.tree.unflatten(jax.tree.structure(self.block), arrays)

    def tie(self, state: Futures, values: PyTree) -> tuple[Futures, Any]:
        arrays, futures = state
        tied = []
        for x in arrays:
            x, values = schedule.tie(x, values)
            tied.append(x)
        return (tied, futures), values

    def hop(self, state: Futures, update: Update, turn: int) -> Futures:
        return self._start(self.finish(state, update, turn))

    def finish(self, state: Futures, update: Update, turn: int) -> Block:
        arrived = [self.pair.done(x, future) for x, future in zip(*state, strict=True)]
        block = jax.tree.unflatten(jax.tree.structure(self.block), arrived)
        if update is None:
            return block
        return update(block)

    def _start(self, block: Block) -> Futures:
        started = [self.pair.start(x) for x in jax.tree.leaves(block)]
        return [x for x, _ in started], [future for _, future in started]


@functools.cache
def permute(axis_name: str, shift: int, collective_id: int | None = None) -> Pair:
    """Returns the pair that sends a block `shift` devices onward, 0 <= shift < R. Equal arguments
    give one object.
    """

    def start_body(x_ref: Ref, y_ref: Ref, send_sem: Semaphore, recv_sem: Semaphore) -> None:
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
        instead="backend='xla'",
    )


def enter(axis_name: str, shift: int, collective_id: int | None = None) -> None:
    """Waits, inside a kernel, until the device that this one sends to has entered the same kernel.

    Each axis and shift has a barrier of its own. Otherwise a device that waits for its right
    neighbour could mistake a signal of its left neighbour for that of the right one.
    """
    senders = map(functools.partial(device_at, axis_name), [-shift])
    enter_kernel(f"ppermute {axis_name} {shift}", senders, collective_id)


def send(
    x_ref: Ref, y_ref: Ref, send_sem: Semaphore, recv_sem: Semaphore, axis_name: str, shift: int
) -> None:
    """Starts, inside a kernel, the DMA from x_ref here to y_ref on the device `shift` positions
    onward.
    """
    with jax.named_scope("send"):
        start_send(x_ref, y_ref, send_sem, recv_sem, device_at(axis_name, shift))


def wait_sent_and_received(
    x_ref: Ref, y_ref: Ref, send_sem: Semaphore, recv_sem: Semaphore
) -> None:
    """Waits, inside a kernel, for both ends of a `send`: x_ref may be written again, and y_ref may
    be read.
    """
    with jax.named_scope("wait"):
        wait(x_ref, send_sem)
        wait(y_ref, recv_sem)
