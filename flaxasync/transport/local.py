"""Copies within one device as start/done pairs, which prefetch what is needed next during other
compute. TPU only.

```
copy_start   x [...]       y [...]        all of x, into HBM or VMEM
slice_start  x [n, ...]    y [...]        x[index], where index is an int or an int32 scalar, such as a loop counter
```
"""

import functools
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from flaxasync.mesh import check_tpu
from flaxasync.transport.pair import Future, Pair, Ref, Scalar, Semaphore, pair_of


def copy_start(x: jax.Array, *, memory_space: Any = pltpu.HBM) -> tuple[jax.Array, Future]:
    """Begins copying `x`, an array in HBM, to `pltpu.HBM`, or to `pltpu.VMEM` if it fits there.

    Returns:
      `(x, future)`: the x to use from here on, and what `copy_done` needs.

    Raises:
      NotImplementedError: The mesh is not made of TPUs, or TPU DMAs cannot move arrays of this
        dtype or shape.
    """
    check_tpu("copy_start", "x + 0, which XLA schedules by itself")
    return _copy(memory_space).start(x)


def copy_done(x: jax.Array, future: Future) -> jax.Array:
    """Waits for `copy_start` and returns the copy.

    Raises:
      ValueError: The future belongs to another start, or it was waited for before.
    """
    return pair_of(future, "copy").done(x, future)


def slice_start(x: jax.Array, index: Scalar) -> tuple[jax.Array, Future]:
    """Begins copying `x[index]` of an array in HBM. The index, within 0 .. n - 1, is not checked.

    Returns:
      `(x, future)`: the x to use from here on, and what `slice_done` needs.

    Raises:
      ValueError: x has fewer than two dimensions.
      NotImplementedError: The mesh is not made of TPUs, or TPU DMAs cannot move arrays of this
        dtype or shape.
    """
    check_tpu("slice_start", "lax.dynamic_index_in_dim, which XLA schedules by itself")
    if x.ndim < 2:
        raise ValueError(
            f"slice_start needs an array of two dimensions or more: got {x.dtype}{list(x.shape)}"
        )
    return _SLICE.start(x, index)


def slice_done(x: jax.Array, future: Future) -> jax.Array:
    """Waits for `slice_start` and returns x[index].

    Raises:
      ValueError: The future belongs to another start, or it was waited for before.
    """
    return pair_of(future, "slice").done(x, future)


@functools.cache
def _copy(memory_space: Any) -> Pair:
    def start_body(x_ref: Ref, y_ref: Ref, sem: Semaphore) -> None:
        pltpu.make_async_copy(x_ref, y_ref, sem).start()

    def done_body(x_ref: Ref, y_ref: Ref, sem: Semaphore) -> None:
        pltpu.make_async_copy(x_ref, y_ref, sem).wait()

    return Pair(
        "copy",
        start_body,
        done_body,
        memory_space=memory_space,
        elementwise=True,
        instead="x + 0",
    )


def _start_slice(index_ref: Ref, x_ref: Ref, y_ref: Ref, sem: Semaphore) -> None:
    pltpu.make_async_copy(x_ref.at[index_ref[0]], y_ref, sem).start()


def _wait_slice(x_ref: Ref, y_ref: Ref, sem: Semaphore) -> None:
    # any row will do: a wait takes only the number of bytes
    pltpu.make_async_copy(x_ref.at[0], y_ref, sem).wait()


_SLICE = Pair(
    "slice",
    _start_slice,
    _wait_slice,
    out=lambda x: x[0],
    instead="lax.dynamic_index_in_dim",
)
