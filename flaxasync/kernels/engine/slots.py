"""Transfers, and slots in vector memory for tiles on their way in or out.

A transfer is a local copy, or a send to another device. It adds the bytes that it moved to a DMA
semaphore, at the destination for an arrival and at the source for a departure, and `wait` takes
them off again. So a wait does not depend on which transfer it was, only on the size of what was
moved.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.operands import DType, Index, Ref, Scalar, beginning
from flaxasync.kernels.engine.ring import Device
from flaxasync.kernels.engine.tiling import remainder


def start_copy(source: Ref, target: Ref, sem: Ref) -> None:
    pltpu.make_async_copy(source, target, sem).start()


def start_send(source: Ref, target: Ref, send_sem: Ref, recv_sem: Ref, device: Device) -> None:
    """Starts a copy to the same place of another device, whose `recv_sem` counts its arrival
    there.
    """
    pltpu.make_async_remote_copy(source, target, send_sem, recv_sem, device_id=device).start()


def wait(moved: Ref, sem: Ref) -> None:
    """Waits until a semaphore has counted one transfer of the size of `moved`."""
    pltpu.make_async_copy(moved, moved, sem).wait()


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Slots in vector memory for the tiles of one array, and a DMA semaphore for each.

    A partial tile lies at the beginning of its slot; the rest of the slot is whatever it held
    before.
    """

    tiles: Ref  # [slots, *tile] VMEM
    sems: Ref  # [slots]

    @classmethod
    def allocate(cls, slots: int, tile: tuple[int, ...], dtype: DType) -> Self:
        """Returns what to allocate as scratch memory: the same fields with shapes and memory
        spaces.
        """
        return cls(pltpu.VMEM((slots, *tile), dtype), pltpu.SemaphoreType.DMA((slots,)))

    @property
    def count(self) -> int:
        return self.tiles.shape[0]

    def slot(self, number: Scalar) -> Scalar:
        """Returns the slot of a tile by its number in the order of use."""
        return remainder(number, self.count)

    def wait(self, slot: Scalar, *sizes: Scalar) -> None:
        """Waits until the transfer of a tile of these sizes, into a slot or out of it, is
        complete.
        """
        wait(self.tiles.at[slot, *beginning(*sizes)], self.sems.at[slot])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IncomingTiles(_Slots):
    """Tiles of an operand that come from HBM: with two slots, this step's tile and the next
    one's.
    """

    def start(self, slot: Scalar, source: Ref, *, offset: Scalar = 0, axis: int = 0) -> None:
        """Starts to copy a tile into a slot, to an offset along one of its axes."""
        index = list(beginning(*source.shape))
        index[axis] = pl.ds(offset, source.shape[axis])
        start_copy(source, self.tiles.at[slot, *index], self.sems.at[slot])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutgoingTiles(_Slots):
    """Finished tiles that leave for HBM or for another device.

    A slot is written again only after its tile has left.
    """

    def free(self, number: Scalar, wait_for: Callable[[Scalar], None]) -> None:
        """Waits until a tile may be written into its slot; `wait_for(number)` waits until another
        one has left.
        """

        @pl.when(number >= self.count)
        def _() -> None:
            wait_for(number - self.count)

    def finish(self, count: int, wait_for: Callable[[Scalar], None]) -> None:
        """Waits until the last tiles have left, of `count` tiles in all."""
        for number in range(max(0, count - self.count), count):
            wait_for(jnp.int32(number))

    def put(self, slot: Scalar, value: jax.Array, index: tuple[Index, ...]) -> None:
        """Rounds a sub-block of a tile, at an index in the tile, into a slot."""
        self.tiles[slot, *index] = value.astype(self.tiles.dtype)

    def store(self, slot: Scalar, target: Ref) -> None:
        start_copy(self.tiles.at[slot, *beginning(*target.shape)], target, self.sems.at[slot])

    def send(self, slot: Scalar, target: Ref, recv_sem: Ref, device: Device) -> None:
        tile = self.tiles.at[slot, *beginning(*target.shape)]
        start_send(tile, target, self.sems.at[slot], recv_sem, device)
