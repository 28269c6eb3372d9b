"""A mesh axis as a ring: neighbours, the barrier at a kernel's entry, half-blocks,
acknowledgements.

Direction 0 is onward, to the next higher index on the axis, and direction 1 is backward. With two
directions half of every block goes each way, and a ring of bidirectional links carries twice as
much.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.cores import ONE_CORE, Cores
from flaxasync.kernels.engine.operands import Condition, Ref, Scalar, when
from flaxasync.mesh import device_at

# coordinates on all mesh axes, the form that Pallas takes as `device_id`
type Device = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices of a mesh axis, inside a kernel."""

    axis_name: str
    size: int  # devices on the axis; 1 for this device by itself, whatever the axis has
    directions: int  # 1, or 2 where blocks travel both ways
    cores: Cores = ONE_CORE  # of each device; a ring joins those of one number

    @property
    def both(self) -> range:
        """The directions in use."""
        return range(self.directions)

    @property
    def index(self) -> jax.Array:
        if self.size > 1:
            return lax.axis_index(self.axis_name)
        return jnp.int32(0)

    def receiver(self, direction: Scalar) -> Device:
        """Returns the neighbour that this device sends to."""
        if isinstance(direction, int):
            return device_at(self.axis_name, 1 - 2 * direction)
        there = self.index + jnp.where(direction == 0, 1, self.size - 1)
        return device_at(self.axis_name, 0) | {self.axis_name: lax.rem(there, jnp.int32(self.size))}

    def sender(self, direction: Scalar) -> Device:
        """Returns the neighbour that sends to this device."""
        return self.receiver(1 - direction)

    def behind(self, hops: Scalar, direction: Scalar) -> jax.Array:
        """Returns the index of the device whose block arrives here after a number of hops, from 0
        to `size`.

        The index wraps around by a comparison, because a remainder takes the scalar core far
        longer.
        """
        back = self.index - hops
        onward = self.index + hops
        back = jnp.where(back < 0, back + self.size, back)
        onward = jnp.where(onward >= self.size, onward - self.size, onward)
        if isinstance(direction, int) or self.directions == 1:
            if self.directions == 2 and direction == 1:
                return onward
            return back
        return jnp.where(direction == 0, back, onward)

    def enter(self, tag: str, collective_id: int | None) -> None:
        """Waits until the neighbours have entered the kernel; see `enter`."""
        senders = [self.sender(direction) for direction in self.both]
        name = f"{tag} {self.axis_name} {self.directions}"
        enter(name, senders, collective_id, core=self.cores.index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acknowledgements:
    """Counts of the blocks or tiles that the receiver has read, so that its receive buffer may be
    written again.
    """

    sems: Ref  # [directions], regular semaphores

    def send(self, ring: Ring, direction: int) -> None:
        """Tells the sender that what came from it has been read."""
        pl.semaphore_signal(
            self.sems.at[direction], device_id=ring.sender(direction), core_index=ring.cores.index
        )

    def wait(self, direction: int) -> None:
        """Waits until the receiver has read one more."""
        pl.semaphore_wait(self.sems.at[direction])


def choose_directions(size: int, length: int, unit: int, directions: int | None) -> int:
    """Returns the directions asked for, or else two if that is faster and a dimension has halves of
    whole tiles.
    """
    return directions or (2 if size > 2 and length % (2 * unit) == 0 else 1)


def half_blocks(caller: str, name: str, length: int, unit: int, directions: int) -> list[pl.Slice]:
    """Returns what travels in each direction, slices of a dimension; raises if it has no halves of
    whole tiles.
    """
    if length % (directions * unit) and directions == 2:
        raise ValueError(
            f"{caller} sends half of the {name} each way: got {length}, needed a multiple of "
            f"{2 * unit}; use directions=1"
        )
    return [
        pl.ds(direction * (length // directions), length // directions)
        for direction in range(directions)
    ]


def enter(
    tag: str,
    senders: Iterable[Device],
    collective_id: int | None,
    *,
    core: Scalar | None = None,
    conditional: Sequence[tuple[Device, Condition, jax.Array]] = (),
) -> None:
    """Waits until every device that this one sends to has entered this kernel, too.

    This barrier removes the entry race: before a device enters, the memory that a transfer writes
    there may hold something else. The barrier counts signals and does not know from whom they came.
    So no device may leave the kernel before all devices that it signals have passed their barriers,
    or its next signal could be taken for somebody's first. Each kernel here signals only the
    devices that send data to it, and waits for that data. The start of a permute is signalled by
    one device alone, and the head of `flaxasync.transport.direct` says why its starts are safe.

    Args:
      tag: what tells this barrier from those of other kernels. JAX picks an id for it that no other
        kernel of the program has, unless `collective_id` is given.
      senders: the devices that send to this device. As many, in the same places, receive from it.
        An iterator computes each of them when it is signalled.
      collective_id: the id of the barrier.
      core: the core that enters, and is signalled, of several that run the kernel.
      conditional: further (device, whether it sends here, whether a device in that place receives
        from this one).
    """
    barrier = pltpu.get_barrier_semaphore(None if collective_id is not None else f"flaxasync.{tag}")
    count = 0
    with jax.named_scope("enter"):
        for sender in senders:
            pl.semaphore_signal(barrier, device_id=sender, core_index=core)
            count += 1
        awaited = jnp.int32(count)
        for device, sends, receives in conditional:
            when(sends, pl.semaphore_signal, barrier, device_id=device)
            awaited += receives.astype(jnp.int32)
        if conditional:
            when(awaited > 0, pl.semaphore_wait, barrier, awaited)
        else:
            pl.semaphore_wait(barrier, count)
