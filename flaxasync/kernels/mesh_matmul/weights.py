"""The blocks of w: which ones a device multiplies with, from whom each comes, and when it goes on
to whom.

LHS[M_X, K_Y] . RHS[K_X, N] divides the contraction among mesh columns on the left and among mesh
rows on the right. In blocks whose size divides both shares, mesh row r holds blocks r*held ..
(r+1)*held-1 of RHS, and every device of mesh column c multiplies with blocks c*needed ..
(c+1)*needed-1, which are called t = 0 .. needed-1 there. Each of them has one owner in that column,
and goes around the column from there, from device to device:

    2 x 2   the device on the diagonal owns the only block of its column, and sends it to the other device
    4 x 1   every device owns a quarter of the blocks that all need
    1 x 4   a device holds what all columns need: nothing travels
    2 x 4   mesh row c // 2 owns what column c needs, which is half of its blocks

With two directions, blocks with an even t go onward and the others backward. A device uses blocks
in the order of their hops, its own first, and may send each one on when it uses it. So a device
that waits for a block of h hops waits for one that has waited for blocks of fewer hops only, and no
device waits for itself.

An owner sends its blocks of a chunk of columns `AHEAD` chunks before they are used. The other
devices send a block on

    in chunk 0, or in every chunk if there is one phase   when they use it, since they did not have it before
    in the later chunks                                   one chunk before they use it, in the phases after 0

because a device that sends on what it is about to use makes the next device late by a hop in every
chunk. In those phases blocks of fewer hops are sent on first, at steps that are the same on all
devices. So what a device waits for there was sent on by the device before it at an earlier step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.operands import Condition, Ref, Scalar, aligned, when
from flaxasync.kernels.engine.ring import Device, Ring, enter
from flaxasync.kernels.engine.slots import IncomingTiles, start_send, wait
from flaxasync.kernels.engine.tiling import Tiling, remainder, split
from flaxasync.kernels.mesh_matmul.schedule import MeshSchedule, MeshStep

AHEAD = 2  # chunks of w that are on their way before they are used


@dataclasses.dataclass(frozen=True)
class WeightBlocks:
    """The blocks of w; methods are called inside a kernel."""

    ring: Ring  # the devices of a mesh column, and the directions of the blocks
    axis_name: str  # the mesh axis of the mesh columns
    rows: int  # rows of w in a block
    needed: int  # blocks that a device multiplies with
    held: int  # blocks that a device holds

    @property
    def most_alike(self) -> int:
        """How many blocks may come to a device over one number of hops, at most."""
        return min(self.held, self.needed) + self.ring.directions - 1

    def hops(self, t: Scalar) -> jax.Array:
        """Returns how many hops a block takes to get to this device; 0 if the device owns it."""
        return self.hops_to(self.ring.index, lax.axis_index(self.axis_name), t)

    def hops_to(self, row: Scalar, column: Scalar, t: Scalar) -> jax.Array:
        """Returns how many hops block t of a mesh column takes to a mesh row."""
        onward = row - split(column * self.needed + t, self.held)[0]
        return remainder(
            self.ring.size + jnp.where(self.direction(t) == 0, onward, -onward), self.ring.size
        )

    def arrives(self, t: Scalar) -> jax.Array:
        """Returns whether a block comes to this device from another one."""
        return self.hops(t) > 0

    def goes_on(self, t: Scalar) -> jax.Array:
        """Returns whether this device sends a block to the next one."""
        return self.hops(t) < self.ring.size - 1

    def held_rows(self, t: Scalar) -> pl.Slice:
        """Returns where a block lies in this device's w, if the device owns it."""
        return self.needed_rows(
            lax.axis_index(self.axis_name) * self.needed + t - self.ring.index * self.held
        )

    def needed_rows(self, t: Scalar) -> pl.Slice:
        """Returns where a block lies among all that this device multiplies with, which are as many
        columns of x.
        """
        return aligned(jnp.int32(t * self.rows), self.rows, self.rows)

    def tables(self) -> tuple[Ref, Ref]:
        """Returns the scratch memory of the two tables that `sort` fills."""
        return pltpu.SMEM((self.needed + 1,), jnp.int32), pltpu.SMEM((self.ring.size,), jnp.int32)

    def sort(self, order: Ref, first: Ref) -> None:
        """Fills the tables: blocks in the `order` of their use, and where the `first` of each
        number of hops stands.
        """

        def put(hops: Scalar, count: Scalar) -> jax.Array:
            def one(t: Scalar, count: Scalar) -> jax.Array:
                order[count] = t  # the next block overwrites it unless this one has so many hops
                return count + (self.hops(t) == hops).astype(jnp.int32)

            first[hops] = count
            return lax.fori_loop(0, self.needed, one, count)

        lax.fori_loop(0, self.ring.size, put, jnp.int32(0))

    def enter(self, tag: str, collective_id: int | None, senders: Sequence[Device] = ()) -> None:
        """Waits until the receivers have entered the kernel; `senders` are those outside of the
        mesh column.

        In a mesh column only some devices send to the next one. See `engine.ring.enter`.
        """
        ring = self.ring

        def any_block(direction: int, moves: Callable[[Scalar], Condition]) -> jax.Array:
            def found(t: Scalar, before: jax.Array) -> jax.Array:
                return before | ((self.direction(t) == direction) & moves(t)).astype(jnp.int32)

            return lax.fori_loop(0, self.needed, found, jnp.int32(0)) > 0

        columns = []
        if ring.size > 1:
            for direction in ring.both:
                sender = ring.sender(direction)
                sends = any_block(direction, self.arrives)
                receives = any_block(direction, self.goes_on)
                columns.append((sender, sends, receives))
        enter(
            f"{tag} {ring.axis_name} {self.axis_name} {ring.directions}",
            senders,
            collective_id,
            conditional=columns,
        )

    def direction(self, t: Scalar) -> jax.Array:
        return remainder(t, self.ring.directions)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightScratch:
    order: Ref  # [needed + 1] SMEM: blocks in the order of their use
    first: Ref  # [mesh rows] SMEM: where in `order` the blocks of each number of hops begin
    send_sem: Ref  # DMA semaphore
    recv_sem: Ref  # [chunks, needed] DMA semaphores, if blocks travel


@dataclasses.dataclass(frozen=True)
class Weights:
    schedule: MeshSchedule
    blocks: WeightBlocks
    columns: Tiling  # in chunks
    w: Ref  # [k', n] HBM
    received: Ref  # [k, n] HBM: the blocks of other devices
    tiles: IncomingTiles  # [2, k, n] the tiles that are multiplied
    scratch: WeightScratch

    @property
    def places(self) -> int:
        """Places for a block of the next chunk that is sent on; 0 if blocks are sent on when they
        are used. Place p is that of block p % `most_alike` among those of p // `most_alike` + 1 hops.
        """
        size = self.blocks.ring.size
        if size > 2 and self.schedule.phases > 1 and self.schedule.chunks > 1:
            return self.blocks.most_alike * (size - 2)
        return 0

    def begin(self) -> None:
        """Finds the order of use, and sends the first chunks."""
        self.blocks.sort(self.scratch.order, self.scratch.first)
        for chunk in range(min(AHEAD, self.schedule.chunks)):
            self._send_own(chunk)

    def block(self, there: MeshStep) -> jax.Array:
        return self.scratch.order[there.t]

    def prefetch(self, there: MeshStep) -> None:
        """Starts to fetch the tile of a step, if it is another one. Waits for its block at its
        first use.
        """
        t = self.block(there)
        blocks = self.blocks
        own = blocks.hops(t) == 0

        def fetch(source: Ref, rows: pl.Slice) -> None:
            def start(_: int, columns: pl.Slice) -> None:
                self.tiles.start(there.w_slot, source.at[rows, columns])

            self.columns.on_slice(there.chunk, start)

        @pl.when(there.new_w & own)
        def _() -> None:
            fetch(self.w, blocks.held_rows(t))

        if blocks.ring.size > 1:

            @pl.when(there.new_w & jnp.logical_not(own))
            def _() -> None:
                first_use = (there.phase == 0) & (there.panel == 0)
                # in the later chunks, a block that goes on was waited for when it was sent on
                if self.places:
                    first_use &= (there.chunk == 0) | jnp.logical_not(blocks.goes_on(t))
                when(first_use, self._receive, there.chunk, t)
                fetch(self.received, blocks.needed_rows(t))

    def wait(self, here: MeshStep) -> None:
        wait = functools.partial(self.tiles.wait, here.w_slot, self.blocks.rows)
        when(here.new_w, self.columns.on_size, here.chunk, wait)

    def send(self, here: MeshStep) -> None:
        """Sends what is due in this step: own blocks of a later chunk, and the next chunk's blocks
        of other devices.
        """
        begins = (here.phase == 0) & (here.position == 0) & (here.panel == 0)

        @pl.when(begins & (here.chunk + AHEAD < self.schedule.chunks))
        def _() -> None:
            self._send_own(here.chunk + AHEAD)

        if self.places:
            self._send_on(here)

    def finish(self) -> None:
        """Waits until everything that was sent has left."""
        if self.blocks.ring.size > 1:

            @pl.loop(0, self.blocks.needed)
            def _(t: Scalar) -> None:
                all_chunks = self.received.at[self.blocks.needed_rows(t), :]
                when(self.blocks.goes_on(t), wait, all_chunks, self.scratch.send_sem)

    def _send_own(self, chunk: Scalar) -> None:
        if self.blocks.ring.size > 1:

            @pl.loop(0, self.blocks.needed)
            def _(t: Scalar) -> None:
                def send(_: int, columns: pl.Slice) -> None:
                    self._send(chunk, t, columns, self.w.at[self.blocks.held_rows(t), columns])

                when(self.blocks.hops(t) == 0, self.columns.on_slice, chunk, send)

    def _send_on(self, here: MeshStep) -> None:
        """Sends on those blocks of the next chunk whose places are due."""
        blocks = self.blocks
        first = self.scratch.first
        steps = (self.schedule.phases - 1) * self.schedule.phase_steps
        gap = max(1, steps // self.places)  # steps from one sending to the next
        together = pl.cdiv(self.places, steps)  # places in one step: one, if there are steps enough
        interval, rest = split((here.phase - 1) * self.schedule.phase_steps + here.position, gap)

        later = (here.phase > 0) & (here.panel == 0)
        due = later & (here.chunk + 1 < self.schedule.chunks) & (rest == 0)

        @pl.when(due)
        def _() -> None:
            for place in (interval * together + one for one in range(together)):
                before, rank = split(place, blocks.most_alike)
                hops = jnp.minimum(before + 1, blocks.ring.size - 2)
                t = self.scratch.order[jnp.minimum(first[hops] + rank, blocks.needed - 1)]
                exists = (place < self.places) & (first[hops] + rank < first[hops + 1])
                when(exists, self._receive, here.chunk + 1, t)

    def _receive(self, chunk: Scalar, t: Scalar) -> None:
        """Waits for a block, and sends it on if another device still needs it."""

        def receive(_: int, columns: pl.Slice) -> None:
            block = self.received.at[self.blocks.needed_rows(t), columns]
            wait(block, self.scratch.recv_sem.at[chunk, t])
            if self.blocks.ring.size > 2:
                when(self.blocks.goes_on(t), self._send, chunk, t, columns, block)

        self.columns.on_slice(chunk, receive)

    def _send(self, chunk: Scalar, t: Scalar, columns: pl.Slice, block: Ref) -> None:
        target = self.received.at[self.blocks.needed_rows(t), columns]
        recv_sem = self.scratch.recv_sem.at[chunk, t]
        with jax.named_scope("send_weights"):
            receiver = self.blocks.ring.receiver(self.blocks.direction(t))
            start_send(block, target, self.scratch.send_sem, recv_sem, receiver)
