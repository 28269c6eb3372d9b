"""As many rows of a block as there are, sent to another device of an axis, as a start/done pair.
TPU only.

```
x    (counts [1, 128], rows [m, ..], ...)  ->  y (rows [m, ..], ...)      of one device to the one `shift` onward
```

The counts are how many rows of each array this device sends, and how many it receives: the first
ones. They are copied in chunks, one after the other, so that what crosses the links follows the
counts though shapes are static. What y has behind the last chunk is undefined.

Both ends know both numbers, so a device waits for as many chunks as its sender sends. The start
waits, as that of a permute does, until the receiver has entered it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.transport.pair import Future, Pair, Ref, Scalar, Semaphore
from flaxasync.transport.pallas import enter, send

CHUNK = 128  # rows of a copy, of which m is a multiple
LANES = 128  # counts that there can be


@functools.cache
def pair(axis_name: str, shift: int) -> Pair:
    """Returns the pair that sends rows `shift` devices onward, 0 < shift < R."""

    def start_body(counts_ref: Ref, *refs: Ref) -> None:
        *arrays, send_sem, recv_sem = refs
        xs = arrays[: len(arrays) // 2]
        ys = arrays[len(arrays) // 2 :]

        def start(counts: Ref) -> None:
            for number, (x_ref, y_ref) in enumerate(zip(xs, ys, strict=True)):

                def chunk(i: Scalar, _: None, x_ref: Ref = x_ref, y_ref: Ref = y_ref) -> None:
                    send(_chunk(x_ref, i), _chunk(y_ref, i), send_sem, recv_sem, axis_name, shift)

                lax.fori_loop(0, _chunks(counts[0, 2 * number]), chunk, None)

        enter(axis_name, shift)
        _with_counts(counts_ref, start)

    return Pair(
        "counted_rows",
        start_body,
        _wait,
        out=lambda x: x[1:],
        semaphores=2,
        remote=True,
        instead="backend='xla'",
    )


def start(
    axis_name: str,
    shift: int,
    arrays: Sequence[Array],
    sent: Sequence[Scalar],
    received: Sequence[Scalar],
) -> tuple[Any, Future]:
    """Begins to send the first `sent` rows of each array; `received` of the device `shift` behind
    will arrive.
    """
    counts = jnp.stack(
        [jnp.int32(count) for both in zip(sent, received, strict=True) for count in both]
    )
    counts = jnp.pad(counts[None], ((0, 0), (0, LANES - counts.size)))
    return pair(axis_name, shift % lax.axis_size(axis_name)).start((counts, *arrays))


def _wait(counts_ref: Ref, *refs: Ref) -> None:
    *arrays, send_sem, recv_sem = refs
    xs = arrays[: len(arrays) // 2]
    ys = arrays[len(arrays) // 2 :]

    def wait(counts: Ref) -> None:
        _wait_for_chunks(xs, [counts[0, 2 * i] for i in range(len(xs))], send_sem)
        _wait_for_chunks(ys, [counts[0, 2 * i + 1] for i in range(len(ys))], recv_sem)

    _with_counts(counts_ref, wait)


def _wait_for_chunks(refs: Sequence[Ref], counts: Sequence[Scalar], semaphore: Semaphore) -> None:
    for ref, count in zip(refs, counts, strict=True):

        def chunk(i: Scalar, _: None, ref: Ref = ref) -> None:
            pltpu.make_async_copy(_chunk(ref, i), _chunk(ref, i), semaphore).wait()

        with jax.named_scope("wait"):
            lax.fori_loop(0, _chunks(count), chunk, None)


def _with_counts(counts_ref: Ref, use: Callable[[Ref], None]) -> None:
    """Calls `use` with the counts, which are brought to where a kernel can read scalars."""

    def scoped(counts: Ref, semaphore: Semaphore) -> None:
        copy = pltpu.make_async_copy(counts_ref, counts, semaphore)
        copy.start()
        copy.wait()
        use(counts)

    pl.run_scoped(scoped, pltpu.SMEM(counts_ref.shape, jnp.int32), pltpu.SemaphoreType.DMA(()))


def _chunks(count: Scalar) -> Scalar:
    return (count + CHUNK - 1) // CHUNK


def _chunk(ref: Ref, i: Scalar) -> Ref:
    return ref.at[pl.ds(pl.multiple_of(i * CHUNK, CHUNK), CHUNK)]
