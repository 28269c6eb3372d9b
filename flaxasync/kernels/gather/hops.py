"""The trips of x around a ring, inside a kernel: which part of which block comes when, and where it lies.

A block, x [B, m, k] of one device, is one part or, with two directions, two: half of its batches, or half of its rows
where the number of batches is odd. Part p of a block goes `shift` places onward at every hop, from where it arrived,
cut into chunks of rows that travel one after the other. A group is one chunk of all parts:

```
hop 0       the own block                             at hand             groups 0 .. chunks - 1
hop s > 0   part 0 of block i - s, part 1 of i + s    after s hops        the next ones           i: this device
```

Groups arrive in `gathered` in HBM, each block at its own place, or in `kept` in vector memory, each group at its own
place. Each part of each has one receive semaphore: nothing is written twice, and nothing is acknowledged.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.neighbours import enter
from flaxasync.mesh import device_at


@dataclasses.dataclass(frozen=True)
class Parts:
    """How blocks are cut.

    Attributes:
      count: parts, along the batches or `along_rows`.
      chunks: of a part, along its rows; a power of two.
      batches, rows: of one chunk of a part.
    """

    count: int
    chunks: int
    batches: int
    rows: int
    along_rows: bool

    @property
    def group(self) -> tuple[int, int]:
        """Batches and rows of a group."""
        return (self.batches, self.count * self.rows) if self.along_rows else (self.count * self.batches, self.rows)

    def origin(self, p: Any, chunk: Any = 0) -> tuple[Any, Any]:
        """First batch and first row of a chunk of a part in its block."""
        if self.along_rows:
            return 0, (p * self.chunks + chunk) * self.rows
        return p * self.batches, chunk * self.rows

    def in_block(self, p: Any, chunk: Any) -> tuple[Any, Any]:
        """Batches and rows of a chunk of a part in its block."""
        batch, row = self.origin(p, chunk)
        return pl.ds(batch, self.batches), pl.ds(pl.multiple_of(row, self.rows), self.rows)

    def in_group(self, p: Any) -> tuple[Any, Any]:
        """Batches and rows of a part in its group."""
        batch, row = dataclasses.replace(self, chunks=1).origin(p)
        return pl.ds(batch, self.batches), pl.ds(row, self.rows)


def cut(caller: str, batches: int, rows: int, unit: int, directions: int) -> Parts:
    """Cuts blocks of `batches` x `rows` into one part for each direction; `unit` rows are a hardware tile.

    Raises:
      ValueError: a block has no two halves.
    """
    if directions == 1:
        return Parts(1, 1, batches, rows, along_rows=False)
    if batches % 2 == 0:
        return Parts(2, 1, batches // 2, rows, along_rows=False)
    if rows % (2 * unit):
        raise ValueError(
            f"{caller} sends half of each block each way, and {batches} batches need rows in multiples of {2 * unit} "
            f"for that: got {rows}; use directions=1"
        )
    return Parts(2, 1, batches, rows // 2, along_rows=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HopSemaphores:
    own: Any  # of the own block's copy
    send: Any  # [parts]
    recv: Any  # [parts, groups that arrive]

    @classmethod
    def shapes(cls, parts: Parts, size: int) -> Any:
        dma = pltpu.SemaphoreType.DMA
        return cls(dma, dma((parts.count,)), dma((parts.count, (size - 1) * parts.chunks)))


class Hops:
    """The trips as one device sees them."""

    def __init__(
        self, axis_name: str, parts: Parts, x: Any, gathered: Any, semaphores: HopSemaphores, kept: Any = None
    ) -> None:
        """x [B, m, k] and gathered [B, R, m, k] are in HBM, kept [groups, *group, k] is in vector memory."""
        self.axis_name, self.parts, self.semaphores = axis_name, parts, semaphores
        self.x, self.gathered, self.kept = x, gathered, kept
        self.size, self.index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def enter(self, tag: str, collective_id: int | None) -> None:
        """Tells the senders that they may write here."""
        enter(tag, [device_at(self.axis_name, -self._shift(p)) for p in range(self.parts.count)], collective_id)

    def block(self, p: Any, group: Any) -> Any:
        """The block of part p in a group; scalars, traced or not."""
        hop = self.hop(group)
        back = self.index - hop
        if self.parts.count == 1 or (isinstance(p, int) and p == 0):
            return jnp.where(back < 0, back + self.size, back)  # a remainder takes the scalar core far longer
        onward = self.index + hop
        onward = jnp.where(onward >= self.size, onward - self.size, onward)
        return onward if isinstance(p, int) else jnp.where(p == 0, jnp.where(back < 0, back + self.size, back), onward)

    def hop(self, group: Any) -> Any:
        return group >> self._bits()

    def chunk(self, group: Any) -> Any:
        return group & (self.parts.chunks - 1)

    def _bits(self) -> int:
        return self.parts.chunks.bit_length() - 1

    def place(self, p: Any, group: Any) -> tuple[Any, Any, Any]:
        """Batches, block and rows of a part of a group in [B, R, m, ...]."""
        batches, rows = self.parts.in_block(p, self.chunk(group))
        return batches, self.block(p, group), rows

    def send_own(self) -> None:
        """Starts to send the own block."""
        with jax.named_scope("send"):
            for chunk in range(self.parts.chunks):
                for p in range(self.parts.count):
                    self._trip(p, chunk, own=True).start()

    def send(self, group: Any) -> None:
        """Starts to send a group onward, which must be here; those of the last hop stay."""
        with jax.named_scope("send"):
            for p in range(self.parts.count):
                pl.when(self.hop(group) < self.size - 1)(self._trip(p, group).start)

    def receive(self, group: Any) -> None:
        """Waits for a group."""
        with jax.named_scope("receive"):
            for p in range(self.parts.count):
                self._trip(p, group - self.parts.chunks).wait_recv()

    def copy_own(self) -> Any:
        """The copy of the own block to its place in `gathered`."""
        return pltpu.make_async_copy(self.x, self.gathered.at[:, self.index], self.semaphores.own)

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        for p in range(self.parts.count):

            @pl.loop(0, (self.size - 1) * self.parts.chunks)
            def _(group: Any, p: int = p) -> None:
                self._trip(p, group).wait_send()

    def _trip(self, p: int, group: Any, *, own: bool = False) -> Any:
        if self.kept is not None:
            where = self.parts.in_group(p)
            source, there = self.kept.at[group, *where], self.kept.at[group + self.parts.chunks, *where]
        else:
            source = there = self.gathered.at[self.place(p, group)]
        if own:
            source = self.x.at[self.parts.in_block(p, group)]
        sems = self.semaphores.send.at[p], self.semaphores.recv.at[p, group]
        return pltpu.make_async_remote_copy(source, there, *sems, device_id=device_at(self.axis_name, self._shift(p)))

    def _shift(self, p: int) -> int:
        return 1 - 2 * p
