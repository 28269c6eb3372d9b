"""Who is next to a device, inside a kernel: neighbours on a mesh axis, and the barrier at a kernel's entry."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.mesh import device_at

HBM = pl.BlockSpec(memory_space=pltpu.HBM)


def enter(
    caller: str,
    neighbours: Iterable[dict[str, Any]],
    collective_id: int | None,
    *,
    perhaps: Iterable[tuple[dict[str, Any], Any, Any]] = (),
) -> None:
    """Waits until every neighbour has entered this kernel, too.

    Removes the entry race: before that, the memory that a transfer writes there may hold something else. The barrier
    counts and does not name: no device may leave the kernel before all that it signals have passed their barriers, or
    its next signal could be taken for somebody's first. Each kernel here signals those only who send it data, and
    waits for that. Without a `collective_id` the barrier is tagged with the caller, and JAX picks an id that no other
    kernel of the program has.

    Args:
      caller: and what else tells this barrier from those of other kernels.
      neighbours: that send to this device; as many, in the same places, receive from it.
      collective_id: as above.
      perhaps: (device, whether it sends to this one, whether a device like that one receives from this one).
    """
    neighbours, perhaps = list(neighbours), list(perhaps)
    barrier = pltpu.get_barrier_semaphore(None if collective_id is not None else f"flaxasync.{caller}")
    awaited = jnp.int32(len(neighbours))
    with jax.named_scope("enter"):
        for neighbour in neighbours:
            pl.semaphore_signal(barrier, device_id=neighbour)
        for device, sends, receives in perhaps:
            pl.when(sends)(functools.partial(pl.semaphore_signal, barrier, device_id=device))
            awaited += receives.astype(jnp.int32)
        if perhaps:
            pl.when(awaited > 0)(lambda: pl.semaphore_wait(barrier, awaited))
        else:
            pl.semaphore_wait(barrier, len(neighbours))


def toward(axis_name: str, way: Any) -> dict[str, Any]:
    """The id of the next device on a way around an axis: 0 onward, 1 backward; of an axis that has at least one."""
    size = lax.axis_size(axis_name)
    there = lax.axis_index(axis_name) + jnp.where(way == 0, 1, size - 1)
    return device_at(axis_name, 0) | {axis_name: lax.rem(there, jnp.int32(size))}


def type_over(x: jax.Array, *axis_names: str) -> Any:
    """The manual axis type of what does not vary over `axis_names` and is otherwise as x: for `ShapeDtypeStruct`."""
    kind = jax.typeof(x).mat
    return kind.update(varying=kind.varying - set(axis_names))


def check_ring(caller: str, axis_name: str, directions: int) -> int:
    """Returns the number of devices on an axis.

    Raises:
      ValueError: one device alone has nobody to send to; directions other than 1 and 2.
    """
    size = lax.axis_size(axis_name)
    if size == 1:
        raise ValueError(
            f"{caller} needs two devices or more on {axis_name!r}: got an axis of size 1, with nobody to send "
            "to; leave the call out there"
        )
    if directions not in (1, 2):
        raise ValueError(f"{caller} needs directions to be 1 or 2: got {directions!r}")
    return size


def halves(caller: str, name: str, size: int, unit: int, directions: int) -> list[tuple[int, int, int]]:
    """Cuts a side into one part for each direction: (shift, first, length) each.

    Raises:
      ValueError: the side has no two halves of whole hardware tiles.
    """
    if directions == 1:
        return [(1, 0, size)]
    if size % (2 * unit):
        raise ValueError(
            f"{caller} sends half of the {name} each way: got {size}, needed a multiple of {2 * unit}; use directions=1"
        )
    return [(1, 0, size // 2), (-1, size // 2, size // 2)]


def ways(size: int, length: int, unit: int, directions: int | None) -> int:
    """The directions to use: those asked for, or two where that is faster and a side has two halves of whole tiles."""
    return directions or (2 if size > 2 and length % (2 * unit) == 0 else 1)
