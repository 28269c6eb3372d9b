"""The order of work of all_gather_matmul where x streams from HBM: arrival by arrival, as they come.

```
links   arrival 1 ->    arrival 2 ->    arrival 3 -> ...
core    arrival 0       arrival 1       arrival 2        ...
          columns 0       columns 1 ...                    of all ws
            t=0 t=1 ...                                    tiles of the contraction: one of w for all rows
              i=0 i=1 ...                                  tiles of rows, with an accumulator for each
```

A flat loop over all of this prefetches the tiles of the next step over all borders. An arrival is waited for when its
first tile is fetched, and sent onward at once. Where an arrival has more rows than there are accumulators, all columns
are gone through in several passes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.gather import BlockLayout, Gather
from flaxasync.kernels.engine.grid import IterationGrid, remainder, split
from flaxasync.kernels.engine.matmul import MatmulScratch, MatmulTiles
from flaxasync.kernels.engine.operands import Tiles, largest_divisor
from flaxasync.kernels.engine.refs import DType, Ref, Scalar, ScratchShapes
from flaxasync.kernels.engine.tiling import RowTiling, Tiling
from flaxasync.kernels.engine.vmem import check_vmem, matmul_bytes

CALLER = "all_gather_matmul"
TILES = Tiles(1024, 1024, 2048)
ACCUMULATORS = 32 * 2**20  # bytes of float32 sums, at most


class Coordinates(NamedTuple):
    """What one step works on."""

    arrival: Scalar
    row: Scalar  # tile of rows in the arrival
    column: Scalar  # tile of the columns of all ws
    t: Scalar  # tile of the contraction
    i: Scalar  # tile of rows in its pass
    number: Scalar  # of the tile of the result
    w_slot: Scalar


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps."""

    size: int  # devices of the ring
    layout: BlockLayout  # how blocks are divided; half-blocks have one chunk
    tiles: MatmulTiles  # tiles of a half-block, of the columns of all ws, and of the contraction
    accumulators: int  # tiles of rows in a pass
    vmem_bytes: int  # of all buffers

    @property
    def grid(self) -> IterationGrid:
        tiles = self.tiles
        passes = self.layout.directions * tiles.rows.count // self.accumulators
        return IterationGrid((self.size, passes, tiles.columns.count, tiles.contraction.count, self.accumulators))

    @property
    def elements_read(self) -> int:
        """Elements of x and w that are read from HBM, and elements that arrive there and are sent on."""
        size, passes, columns, depth, _ = self.grid.sizes
        x, w = self.accumulators * self.tiles.rows.size, self.tiles.columns.size
        k = depth * self.tiles.contraction.size
        return size * passes * columns * k * (x + w) + 2 * (size - 1) * self.layout.arrival_rows * k

    def at(self, step: Scalar) -> Coordinates:
        """Returns the coordinates of a step."""
        arrival, pass_, column, t, i = self.grid.coordinates(step)
        round_ = split(step, self.tiles.contraction.count * self.accumulators)[0]
        w_slot = remainder(split(step, self.accumulators)[0], 2)
        row, number = pass_ * self.accumulators + i, round_ * self.accumulators + i
        return Coordinates(arrival, row, column, t, i, number, w_slot)

    def scratch(self, dtype: DType) -> ScratchShapes:
        """Returns the scratch memory to allocate."""
        return self.tiles.scratch(dtype, outgoing=2, accumulators=self.accumulators)


def plan(
    layout: BlockLayout, size: int, k: int, widths: Sequence[int], transposed: bool, tiles: Tiles | None, dtype: DType
) -> Schedule:
    """Returns the schedule with the largest tiles up to those asked for; raises if they exceed vector memory."""
    tiles = tiles or TILES
    rows = RowTiling.of(layout.batches, layout.rows, tiles.m, layout.unit)
    used = MatmulTiles(rows, Tiling.of(widths, tiles.n), Tiling.of((k,), tiles.k), transposed)
    room = max(1, ACCUMULATORS // (4 * rows.size * used.columns.size))
    accumulators = largest_divisor(layout.directions * rows.count, room, 1)

    sizes = Tiles(rows.size, used.contraction.size, used.columns.size)
    vmem_bytes = check_vmem(CALLER, sizes, lambda t: matmul_bytes(t, dtype, results=2, sums=accumulators))
    return Schedule(size, layout, used, accumulators, vmem_bytes)


@dataclasses.dataclass(frozen=True)
class Stream:
    """What one device does."""

    schedule: Schedule
    gather: Gather
    ws: Sequence[Ref]
    ys: Sequence[Ref]
    keep_gathered: bool
    scratch: MatmulScratch

    def begin(self) -> None:
        """Does what needs no neighbour: fetches the first tiles."""
        self.prefetch(jnp.int32(0))

    def run(self) -> None:
        """Does the rest, once the neighbours have entered."""
        self.gather.send_own()
        pl.loop(0, self.schedule.grid.steps)(self.step)
        with jax.named_scope("finish"):
            results = self.schedule.grid.steps // self.schedule.tiles.contraction.count
            self.scratch.outgoing.finish(results, self.wait_until_left)
            self.gather.finish()
            if self.keep_gathered:
                self.gather.wait_for_own()

    def step(self, step: Scalar) -> None:
        """Starts the transfers of the next step, multiplies, and stores a tile that is finished."""
        schedule, scratch, tiles = self.schedule, self.scratch, self.schedule.tiles
        here, x_slot = schedule.at(step), remainder(step, 2)
        pl.when(step + 1 < schedule.grid.steps)(lambda: self.prefetch(step + 1))
        if self.keep_gathered:
            self.copy_own(step)
        i, slot = remainder(here.row, tiles.rows.count), scratch.outgoing.slot(here.number)
        last = here.t == tiles.contraction.count - 1
        with jax.named_scope("wait"):
            tiles.wait_x(scratch.x, x_slot, i, here.t)
            pl.when(here.i == 0)(lambda: tiles.wait_w(scratch.w, here.w_slot, here.t, here.column))
            pl.when(last)(lambda: scratch.outgoing.free(here.number, self.wait_until_left))

        x_tile, w_tile = scratch.x.tiles.at[x_slot], scratch.w.tiles.at[here.w_slot]
        accumulator, finish = scratch.accumulators.at[here.i], functools.partial(scratch.outgoing.put, slot)
        tiles.multiply(i, here.t, here.column, x_tile, w_tile, accumulator, finish)
        pl.when(last)(lambda: self.store(here, slot))

    def prefetch(self, step: Scalar) -> None:
        """Starts to fetch the tiles of a step, of w if it is another one. Waits for an arrival at its first use."""
        there, tiles, scratch, gather = self.schedule.at(step), self.schedule.tiles, self.scratch, self.gather
        first = (there.row == 0) & (there.column == 0) & (there.t == 0)

        @pl.when(first & (there.arrival > 0))
        def _() -> None:
            gather.receive(there.arrival)
            gather.send(there.arrival)

        direction, i = split(there.row, tiles.rows.count)
        block = gather.block(direction, there.arrival)

        def start_x(is_own: bool) -> None:
            def source(_: int, batches: pl.Slice, rows: pl.Slice, depth: pl.Slice) -> Ref:
                batches, rows = self.schedule.layout.in_block(direction, batches, rows)
                return gather.x.at[batches, rows, depth] if is_own else gather.gathered.at[batches, block, rows, depth]

            tiles.start_x(scratch.x, x_slot, i, there.t, source)

        with jax.named_scope("prefetch"):
            pl.when(there.i == 0)(lambda: tiles.start_w(scratch.w, there.w_slot, there.t, there.column, self.ws))
            x_slot = remainder(step, 2)
            pl.when(there.arrival == 0)(lambda: start_x(True))
            pl.when(there.arrival > 0)(lambda: start_x(False))

    def copy_own(self, step: Scalar) -> None:
        """Copies a batch of the own block to its place at every second step.

        A copy of the whole block would hold up the tiles that stand behind it in HBM's queue.
        """
        batches, steps = self.gather.x.shape[0], self.schedule.grid.steps
        if batches > steps:
            pl.when(step == 0)(self.gather.start_copy_own)
            return
        batch, rest = split(step, 2 if 2 * batches <= steps else 1)
        pl.when((rest == 0) & (batch < batches))(lambda: self.gather.start_copy_own(batch))

    def store(self, here: Coordinates, slot: Scalar) -> None:
        """Starts the copy of a finished tile of the result to its place."""
        direction, i = split(here.row, self.schedule.tiles.rows.count)
        block = self.gather.block(direction, here.arrival)

        def store(number: int, batches: pl.Slice, rows: pl.Slice, columns: pl.Slice) -> None:
            batches, rows = self.schedule.layout.in_block(direction, batches, rows)
            self.scratch.outgoing.store(slot, self.ys[number].at[batches, block, rows, columns])

        with jax.named_scope("store"):
            self.schedule.tiles.on_result(i, here.column, store)

    def wait_until_left(self, number: Scalar) -> None:
        """Waits until a tile of the result has left its slot."""
        schedule, outgoing, tiles = self.schedule, self.scratch.outgoing, self.schedule.tiles
        round_, i = split(number, schedule.accumulators)
        _, pass_, column = IterationGrid(schedule.grid.sizes[:3]).coordinates(round_)
        row = remainder(pass_ * schedule.accumulators + i, tiles.rows.count)
        tiles.wait_result(outgoing, outgoing.slot(number), row, column)
