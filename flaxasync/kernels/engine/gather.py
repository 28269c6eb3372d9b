"""An all-gather along a ring, inside a kernel: what arrives when, from whom, and where it lies.

A block, the rows x [B, m, k] of one device, has one half-block for each direction: half of its
batches, or half of its rows if the number of batches is odd. (With one direction the whole block
takes the place of a half-block.) A half-block goes one device further at every hop, from where it
arrived. It may be divided into chunks that travel one after the other. An arrival is what comes at
the same time, a chunk of the half-block of each direction:

```
hop 0       the own block                                             arrivals 0 .. chunks - 1
hop s > 0   half-block 0 of device i - s, half-block 1 of i + s       the next arrivals        i: this device
```

Every arrival has a receive buffer and a semaphore of its own, so nothing is written twice and
nothing is acknowledged.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.operands import Index, Ref, Scalar, aligned, when
from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.engine.slots import start_copy, start_send, wait
from flaxasync.kernels.engine.tiling import split


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    directions: int  # half-blocks of a block
    chunks: int  # chunks of a half-block
    batches: int  # batches of a chunk
    rows: int  # rows of a chunk in each of its batches
    unit: int  # rows of a hardware tile
    to_half: tuple[int, int]  # batches and rows from half-block 0 to half-block 1
    to_chunk: tuple[int, int] = (0, 0)  # batches and rows from one chunk to the next

    @classmethod
    def of(cls, batches: int, rows: int, unit: int, directions: int) -> "BlockLayout":
        """Divides blocks of `batches` x `rows` into half-blocks of one chunk: of batches, or of
        whole tiles of rows.
        """
        if directions == 1:
            return cls(1, 1, batches, rows, unit, (0, 0))
        if batches % 2 == 0:
            return cls(2, 1, batches // 2, rows, unit, (batches // 2, 0))
        return cls(2, 1, batches, rows // 2, unit, (0, rows // 2))

    def in_chunks(self, chunks: int) -> "BlockLayout | None":
        """Returns the same half-blocks in so many chunks of whole batches or rows; None if they do
        not divide.
        """
        if self.batches % chunks == 0:
            batches = self.batches // chunks
            return dataclasses.replace(self, chunks=chunks, batches=batches, to_chunk=(batches, 0))
        if self.rows % (chunks * self.unit) == 0:
            rows = self.rows // chunks
            return dataclasses.replace(self, chunks=chunks, rows=rows, to_chunk=(0, rows))
        return None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Half-blocks, batches and rows of an arrival."""
        return self.directions, self.batches, self.rows

    @property
    def arrival_rows(self) -> int:
        """Rows of an arrival, in all of its batches and half-blocks."""
        return self.directions * self.batches * self.rows

    def chunk(self, direction: int, chunk: Scalar) -> tuple[pl.Slice, pl.Slice]:
        return self.in_block(direction, chunk, pl.ds(0, self.batches), pl.ds(0, self.rows))

    def in_block(
        self, direction: Scalar, chunk: Scalar, batches: pl.Slice, rows: pl.Slice
    ) -> tuple[pl.Slice, pl.Slice]:
        """Returns where batches and rows of a chunk of a half-block lie in its block."""
        batches_to_half, rows_to_half = self.to_half
        batches_to_chunk, rows_to_chunk = self.to_chunk
        first_batch = direction * batches_to_half + chunk * batches_to_chunk + batches.start
        first_row = direction * rows_to_half + chunk * rows_to_chunk + rows.start
        return pl.ds(first_batch, batches.size), aligned(first_row, rows.size, self.unit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatherSemaphores:
    own: Ref  # of the own block's copy
    send: Ref  # [directions]
    recv: Ref  # [directions, arrivals], of which those of the own block are not used

    @classmethod
    def allocate(cls, layout: BlockLayout, size: int) -> "GatherSemaphores":
        dma = pltpu.SemaphoreType.DMA
        return cls(dma, dma((layout.directions,)), dma((layout.directions, size * layout.chunks)))


@dataclasses.dataclass(frozen=True)
class Gather:
    """The all-gather as one device sees it. Blocks arrive in vector memory if `arrivals` is there,
    else in HBM.
    """

    ring: Ring
    layout: BlockLayout
    x: Ref  # [B, m, k] HBM, the own block
    gathered: Ref  # [B, R, m, k] HBM, each block in its own place; None if it is not kept there
    semaphores: GatherSemaphores
    arrivals: Ref = None  # [arrivals, directions, batches, rows, k] VMEM

    def block(self, direction: Scalar, arrival: Scalar) -> Scalar:
        """Returns the device whose block a half-block of an arrival belongs to."""
        return self.ring.behind(split(arrival, self.layout.chunks)[0], direction)

    def in_gathered(self, direction: int, arrival: Scalar) -> tuple[Index, Index, Index]:
        """Returns where a half-block of an arrival lies in [B, R, m, ...]: batches, block and
        rows.
        """
        batches, rows = self.layout.chunk(direction, split(arrival, self.layout.chunks)[1])
        return batches, self.block(direction, arrival), rows

    def send_own(self) -> None:
        with jax.named_scope("send"):
            for chunk in range(self.layout.chunks):
                for direction in self.ring.both:
                    self._send(direction, chunk, self.x.at[self.layout.chunk(direction, chunk)])

    def send(self, arrival: Scalar) -> None:
        """Starts to send an arrival onward, which must be here. What came in the last hop stays."""
        with jax.named_scope("send"):
            for direction in self.ring.both:
                onward = functools.partial(
                    self._send, direction, arrival, self._buffer(direction, arrival)
                )
                when(arrival < (self.ring.size - 1) * self.layout.chunks, onward)

    def receive(self, arrival: Scalar) -> None:
        with jax.named_scope("receive"):
            for direction in self.ring.both:
                wait(self._buffer(direction, arrival), self.semaphores.recv.at[direction, arrival])

    def start_copy_own(self, batch: Scalar | None = None) -> None:
        batches: Index = slice(None) if batch is None else batch
        start_copy(
            self.x.at[batches], self.gathered.at[batches, self.ring.index], self.semaphores.own
        )

    def wait_for_own(self) -> None:
        wait(self.x, self.semaphores.own)

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        for direction in self.ring.both:

            @pl.loop(0, (self.ring.size - 1) * self.layout.chunks)
            def _(_: Scalar, direction: int = direction) -> None:
                wait(self._buffer(direction, jnp.int32(0)), self.semaphores.send.at[direction])

    def _buffer(self, direction: int, arrival: Scalar) -> Ref:
        """Returns where a half-block of an arrival is received, and sent onward from."""
        if self.arrivals is not None:
            return self.arrivals.at[arrival, direction]
        return self.gathered.at[self.in_gathered(direction, arrival)]

    def _send(self, direction: int, arrival: Scalar, source: Ref) -> None:
        """Starts to send a half-block of an arrival, which is an arrival of the next hop at the
        receiver.

        In HBM a block has the same place on all devices; in vector memory arrivals lie in the order
        of their hops.
        """
        there = arrival + self.layout.chunks
        target = self._buffer(direction, arrival if self.arrivals is None else there)
        send_sem = self.semaphores.send.at[direction]
        recv_sem = self.semaphores.recv.at[direction, there]
        start_send(source, target, send_sem, recv_sem, self.ring.receiver(direction))
