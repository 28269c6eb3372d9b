"""The blocks of w on their way in the overlapped kernel: around a mesh column, chunk by chunk, in the order of use.

An owner sends its blocks of a chunk `AHEAD` chunks before they are used. The other devices send a block on

    in chunk 0, or in every chunk if there is one mesh column   when they use it, since they did not have it before
    in the later chunks                                         one chunk before they use it, in the phases after 0

because a device that sends on what it is about to use makes the next device late by a hop in every chunk. In those
phases blocks of fewer hops are sent on first, at steps that are the same on all devices. So what a device waits for
there was sent on by the device before it at an earlier step.

Every block of every chunk has its own receive buffer and semaphore. So nothing is acknowledged.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.grid import split
from flaxasync.kernels.engine.refs import Ref, Scalar
from flaxasync.kernels.engine.slots import IncomingTiles, start_send, wait
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.mesh_matmul.blocks import WeightBlocks
from flaxasync.kernels.mesh_matmul.schedule import Coordinates, Schedule

AHEAD = 2  # chunks of w that are on their way before they are used


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightScratch:
    """Scratch memory for the blocks of w."""

    tiles: IncomingTiles  # [2, k, n]
    order: Ref  # [needed + 1] SMEM: blocks in the order of their use
    first: Ref  # [mesh rows] SMEM: where in `order` the blocks of each number of hops begin
    send_sem: Ref  # DMA semaphore
    recv_sem: Ref  # [chunks, needed] DMA semaphores, if blocks travel


@dataclasses.dataclass(frozen=True)
class Weights:
    """What one device does with w."""

    schedule: Schedule
    blocks: WeightBlocks
    columns: Tiling  # in chunks
    w: Ref  # [k', n] HBM
    received: Ref  # [k, n] HBM: the blocks of other devices
    scratch: WeightScratch

    @property
    def turns(self) -> int:
        """Turns to send on a block of the next chunk; 0 if blocks are sent on when they are used."""
        early = self.blocks.ring.size > 2 and self.schedule.phases > 1 and self.schedule.chunks > 1
        return self.blocks.most_alike * (self.blocks.ring.size - 2) if early else 0

    def begin(self) -> None:
        """Finds the order of use, and sends the first chunks."""
        self.blocks.sort(self.scratch.order, self.scratch.first)
        for chunk in range(min(AHEAD, self.schedule.chunks)):
            self._send_own(chunk)

    def block(self, there: Coordinates) -> jax.Array:
        """Returns the block that a step multiplies with."""
        return self.scratch.order[there.t]

    def prefetch(self, there: Coordinates) -> None:
        """Starts to fetch the tile of a step, if it is another one. Waits for its block at its first use."""
        t, blocks, start = self.block(there), self.blocks, functools.partial(self.scratch.tiles.start, there.w_slot)
        own = blocks.hops(t) == 0

        def fetch(source: Ref, rows: pl.Slice) -> None:
            self.columns.on_slice(there.chunk, lambda _, columns: start(source.at[rows, columns]))

        pl.when(there.new_w & own)(lambda: fetch(self.w, blocks.held_rows(t)))
        if blocks.ring.size > 1:

            @pl.when(there.new_w & jnp.logical_not(own))
            def _() -> None:
                first_use = (there.phase == 0) & (there.panel == 0)
                if self.turns:  # in the later chunks, a block that goes on was waited for when it was sent on
                    first_use &= (there.chunk == 0) | jnp.logical_not(blocks.goes_on(t))
                pl.when(first_use)(lambda: self._receive(there.chunk, t))
                fetch(self.received, blocks.needed_rows(t))

    def wait(self, here: Coordinates) -> None:
        """Waits for the tile of a step."""
        wait = functools.partial(self.scratch.tiles.wait, here.w_slot, self.blocks.rows)
        pl.when(here.new_w)(lambda: self.columns.on_size(here.chunk, wait))

    def send(self, here: Coordinates) -> None:
        """Sends what is due in this step: own blocks of a later chunk, and the next chunk's blocks of other devices."""
        begins = (here.phase == 0) & (here.position == 0) & (here.panel == 0)
        pl.when(begins & (here.chunk + AHEAD < self.schedule.chunks))(lambda: self._send_own(here.chunk + AHEAD))
        if self.turns:
            self._send_on(here)

    def finish(self) -> None:
        """Waits until everything that was sent has left."""
        if self.blocks.ring.size > 1:

            @pl.loop(0, self.blocks.needed)
            def _(t: Scalar) -> None:
                all_chunks = self.received.at[self.blocks.needed_rows(t), :]
                pl.when(self.blocks.goes_on(t))(lambda: wait(all_chunks, self.scratch.send_sem))

    def _send_own(self, chunk: Scalar) -> None:
        if self.blocks.ring.size > 1:

            @pl.loop(0, self.blocks.needed)
            def _(t: Scalar) -> None:
                def send(_: int, columns: pl.Slice) -> None:
                    self._send(chunk, t, columns, self.w.at[self.blocks.held_rows(t), columns])

                pl.when(self.blocks.hops(t) == 0)(lambda: self.columns.on_slice(chunk, send))

    def _send_on(self, here: Coordinates) -> None:
        """Sends on those blocks of the next chunk whose turn it is."""
        blocks, first, steps = self.blocks, self.scratch.first, (self.schedule.phases - 1) * self.schedule.phase_steps
        gap, together = max(1, steps // self.turns), pl.cdiv(self.turns, steps)
        interval, rest = split((here.phase - 1) * self.schedule.phase_steps + here.position, gap)

        @pl.when((here.phase > 0) & (here.panel == 0) & (here.chunk + 1 < self.schedule.chunks) & (rest == 0))
        def _() -> None:
            for turn in (interval * together + one for one in range(together)):
                before, rank = split(turn, blocks.most_alike)
                hops = jnp.minimum(before + 1, blocks.ring.size - 2)
                t = self.scratch.order[jnp.minimum(first[hops] + rank, blocks.needed)]
                exists = (turn < self.turns) & (first[hops] + rank < first[hops + 1])
                pl.when(exists)(functools.partial(self._receive, here.chunk + 1, t))

    def _receive(self, chunk: Scalar, t: Scalar) -> None:
        """Waits for a block, and sends it on if another device still needs it."""

        def receive(_: int, columns: pl.Slice) -> None:
            block = self.received.at[self.blocks.needed_rows(t), columns]
            wait(block, self.scratch.recv_sem.at[chunk, t])
            if self.blocks.ring.size > 2:
                pl.when(self.blocks.goes_on(t))(lambda: self._send(chunk, t, columns, block))

        self.columns.on_slice(chunk, receive)

    def _send(self, chunk: Scalar, t: Scalar, columns: pl.Slice, block: Ref) -> None:
        """Starts to send a block to the next device."""
        target, recv_sem = self.received.at[self.blocks.needed_rows(t), columns], self.scratch.recv_sem.at[chunk, t]
        with jax.named_scope("send_weights"):
            start_send(block, target, self.scratch.send_sem, recv_sem, self.blocks.receiver(t))
