"""The order of work of all_gather_matmul where x streams from HBM: arrival by arrival, as they
come.

```
links   arrival 1 ->    arrival 2 ->    arrival 3 -> ...
core    arrival 0       arrival 1       arrival 2        ...
          columns 0       columns 1 ...                    of all ws
            t=0 t=1 ...                                    tiles of the contraction: one of w for all rows
              i=0 i=1 ...                                  tiles of rows, with an accumulator for each
```

A flat loop over all of this prefetches the tiles of the next step over all borders. An arrival is
waited for when its first tile is fetched, and sent onward at once. Where an arrival has more rows
than there are accumulators, all columns are gone through in several passes.

With an epilogue all w are joined: a tile of columns is the same one of each w. The tiles of its
operands are fetched when a sum begins, so that they have the time of all of its contraction, and
there are slots for all sums of a pass.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxasync.kernels.all_gather_matmul.work import GatherWork
from flaxasync.kernels.engine.call import available, check_vmem, chip_in_use, matmul_bytes
from flaxasync.kernels.engine.gather import Gather
from flaxasync.kernels.engine.matmul import MatmulScratch, MatmulTiles, Scales
from flaxasync.kernels.engine.operands import (
    LANES,
    Condition,
    Index,
    Ref,
    Scalar,
    Tiles,
    aligned,
    largest_divisor,
    when,
)
from flaxasync.kernels.engine.slots import IncomingTiles, OutgoingTiles
from flaxasync.kernels.engine.tiling import IterationGrid, RowTiling, Tiling, remainder, split

CALLER = "all_gather_matmul"
TILES = Tiles(1024, 1024, 2048)
ACCUMULATORS = 32 * 2**20  # bytes of float32 sums, at most
CHUNKS = (4, 2)  # chunks of a half-block to choose from, where there are several
CHUNK_ROWS = 256  # rows of a chunk, at least


class StreamStep(NamedTuple):
    arrival: Scalar
    row: Scalar  # tile of rows in the arrival
    column: Scalar  # tile of the columns of all ws
    t: Scalar  # tile of the contraction
    i: Scalar  # tile of rows in its pass
    number: Scalar  # of the tile of the result
    w_slot: Scalar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamScratch:
    matmul: MatmulScratch
    more_outgoing: tuple[OutgoingTiles, ...]  # for each result of an epilogue but the first
    # [operand slots, batches, rows, n], for each operand of an epilogue
    operands: tuple[IncomingTiles, ...]
    # [2, batches, rows, LANES] the largest magnitudes of each row, one for each lane
    maxima: OutgoingTiles | None
    scales: Scales | None  # if x and w are 8-bit values

    @property
    def outgoing(self) -> tuple[OutgoingTiles, ...]:
        """The slots of each result of an epilogue; without one, those of all results."""
        return self.matmul.outgoing, *self.more_outgoing


@dataclasses.dataclass(frozen=True)
class StreamSchedule:
    work: GatherWork
    tiles: MatmulTiles  # tiles of a half-block, of the columns of all ws, and of the contraction
    accumulators: int  # tiles of rows in a pass
    vmem_bytes: int  # of all buffers

    @property
    def grid(self) -> IterationGrid:
        tiles = self.tiles
        passes = self.work.layout.directions * tiles.rows.count // self.accumulators
        return IterationGrid(
            (
                self.work.arrivals,
                passes,
                tiles.columns.count,
                tiles.contraction.count,
                self.accumulators,
            )
        )

    @property
    def operand_slots(self) -> int:
        """Slots for the tiles of each operand of the epilogue, and for scales: for all sums of a
        pass.
        """
        return max(2, self.accumulators)

    @property
    def elements_read(self) -> int:
        """Elements of x and w that are read from HBM, and elements that arrive there and are sent
        on.
        """
        arrivals, passes, columns, depth, _ = self.grid.sizes
        x = self.accumulators * self.tiles.rows.size
        w = self.tiles.joined * self.tiles.columns.size
        w *= 1 if self.tiles.w_stays else arrivals * passes
        k = depth * self.tiles.contraction.size
        rows = self.work.layout.arrival_rows
        arriving = 2 * (arrivals - self.work.layout.chunks) * rows * k
        operands = self.work.operands * arrivals * rows * sum(self.tiles.columns.lengths)
        return columns * k * (arrivals * passes * x + w) + arriving + operands

    def new_w(self, there: StreamStep) -> Condition:
        """Returns whether the tile of w of a step has to come from HBM."""
        return (there.row == 0) & (there.arrival == 0) if self.tiles.w_stays else there.i == 0

    def at(self, step: Scalar) -> StreamStep:
        arrival, pass_, column, t, i = self.grid.coordinates(step)
        round_ = split(step, self.tiles.contraction.count * self.accumulators)[0]
        w_slot = self.tiles.w_slot(t, column, split(step, self.accumulators)[0])
        row = pass_ * self.accumulators + i
        number = round_ * self.accumulators + i
        return StreamStep(arrival, row, column, t, i, number, w_slot)

    def scratch(self) -> StreamScratch:
        work = self.work
        result = self.tiles.result
        results = work.epilogue.results if work.epilogue else 1
        columns = self.tiles.joined * self.tiles.columns.size
        return StreamScratch(
            self.tiles.scratch(
                work.dtype,
                work.w_dtype,
                outgoing=2,
                accumulators=self.accumulators,
                result=work.result,
            ),
            tuple(OutgoingTiles.allocate(2, result, work.result) for _ in range(results - 1)),
            tuple(
                IncomingTiles.allocate(self.operand_slots, result, work.result)
                for _ in range(work.operands)
            ),
            OutgoingTiles.allocate(2, (*self.tiles.rows.shape, LANES), jnp.float32)
            if work.measured is not None
            else None,
            Scales.allocate(self.operand_slots, self.tiles.rows.shape, columns)
            if work.scaled
            else None,
        )


def plan(work: GatherWork) -> StreamSchedule:
    """Returns the schedule with the largest tiles up to those asked for; raises if they exceed
    vector memory.

    The products of the last arrival have no transfer beside them. So where a hop takes longer than
    its products, each half-block travels in chunks, if w stays in vector memory: otherwise HBM
    would bring it again for each of them.
    """
    layout = work.layout
    chip = chip_in_use()
    rows = layout.batches * layout.rows
    hop = rows * work.k * jnp.dtype(work.dtype).itemsize / chip.link_bandwidth
    if hop > 2 * layout.arrival_rows * work.k * sum(work.widths) / chip.flops:
        counts = [count for count in CHUNKS if rows >= count * CHUNK_ROWS]
        for chunked in filter(None, map(layout.in_chunks, counts)):
            found = _plan_of(dataclasses.replace(work, layout=chunked))
            if found.tiles.w_stays:
                return found
    return _plan_of(work)


def _plan_of(work: GatherWork) -> StreamSchedule:
    """Returns the schedule of half-blocks in given chunks."""
    layout = work.layout
    epilogue = work.epilogue
    dtype = work.dtype
    asked = work.tiles or TILES
    rows = RowTiling.of(layout.batches, layout.rows, asked.m, layout.unit)
    joined, results = (len(work.widths), epilogue.results) if epilogue else (1, 1)
    columns = Tiling.of(work.widths[:1] if epilogue else work.widths, asked.n)
    used = MatmulTiles(rows, columns, Tiling.of((work.k,), asked.k), work.transposed, joined)
    room = max(1, ACCUMULATORS // (4 * rows.size * joined * columns.size))
    accumulators = largest_divisor(layout.directions * rows.count, room, 1)
    slots = 2 * results + max(2, accumulators) * work.operands

    def need(t: Tiles) -> int:
        wide = Tiles(t.m, t.k, joined * t.n)
        scales = Scales.nbytes(max(2, accumulators), wide.m, wide.n) if work.scaled else 0
        scales += 2 * 4 * t.m * LANES if work.measured is not None else 0
        results_bytes = slots * t.m * t.n * jnp.dtype(work.result).itemsize
        return matmul_bytes(wide, dtype, 0, accumulators) + results_bytes + scales

    sizes = Tiles(rows.size, used.contraction.size, columns.size)
    if epilogue and columns.size > LANES and need(sizes) > available():
        return _plan_of(dataclasses.replace(work, tiles=Tiles(asked.m, asked.k, columns.size // 2)))
    used, vmem_bytes = used.keeping_w(check_vmem(CALLER, sizes, need), dtype)
    return StreamSchedule(work, used, accumulators, vmem_bytes)


@dataclasses.dataclass(frozen=True)
class Stream:
    schedule: StreamSchedule
    gather: Gather
    ws: Sequence[Ref]
    ys: Sequence[Ref]
    keep_gathered: bool
    scratch: StreamScratch
    operands: Sequence[Ref]  # of the epilogue, [B, R, m, n] HBM
    # of the rows, [B, R, m, LANES], and of the columns of each w, [SUBLANES, n] HBM; or none
    scales: Sequence[Ref]
    maxima: Ref | None  # [B, R, m, tiles of columns * LANES] HBM

    def begin(self) -> None:
        """Does what needs no neighbour: fetches the first tiles."""
        self.prefetch(jnp.int32(0))

    def run(self) -> None:
        """Does the rest, once the neighbours have entered."""
        self.gather.send_own()
        pl.loop(0, self.schedule.grid.steps)(self.step)
        self.store_last(jnp.int32(self.schedule.grid.steps))
        with jax.named_scope("finish"):
            results = self.schedule.grid.steps // self.schedule.tiles.contraction.count
            self.scratch.matmul.outgoing.finish(results, self.wait_until_left)
            self.gather.finish()
            if self.keep_gathered:
                self.gather.wait_for_own()

    def step(self, step: Scalar) -> None:
        """Starts the transfers of the next step, multiplies, and stores a tile that is finished."""
        schedule = self.schedule
        scratch = self.scratch.matmul
        tiles = self.schedule.tiles
        here = schedule.at(step)
        x_slot = remainder(step, 2)
        pl.when(step + 1 < schedule.grid.steps)(lambda: self.prefetch(step + 1))
        self.store_last(step)
        if self.keep_gathered:
            self.copy_own(step)
        i = remainder(here.row, tiles.rows.count)
        last = here.t == tiles.contraction.count - 1
        with jax.named_scope("wait"):
            tiles.wait_x(scratch.x, x_slot, i, here.t)
            when(schedule.new_w(here), tiles.wait_w, scratch.w, here.w_slot, here.t, here.column)
            when(last, scratch.outgoing.free, here.number, self.wait_until_left)
            for operand in self.scratch.operands:
                arrived = functools.partial(
                    tiles.wait_result, operand, operand.slot(here.number), i, here.column
                )
                when(last, arrived)
            if self.scratch.scales is not None:
                when(last, self.wait_for_scales, self.scratch.scales, here)

        x_tile = scratch.x.tiles.at[x_slot]
        w_tile = scratch.w.tiles.at[here.w_slot]
        accumulator = scratch.accumulators.at[here.i]
        finish = functools.partial(self.finish, here.number)
        tiles.multiply(i, here.t, here.column, x_tile, w_tile, accumulator, finish)

    def finish(self, number: Scalar, value: jax.Array, index: tuple[Index, ...]) -> None:
        """Puts a sub-block of a finished sum, or what the epilogue makes of it, where it leaves
        from.
        """
        slot = self.scratch.matmul.outgoing.slot(number)
        epilogue = self.schedule.work.epilogue
        scales = self.scratch.scales
        if scales is not None:
            value = scales.apply(scales.rows.slot(number), value, index)
        if epilogue is None:
            self.scratch.matmul.outgoing.put(slot, value, index)
            return
        joined = self.schedule.tiles.joined
        n = value.shape[-1] // joined
        index = (*index[:2], slice(0, n))
        products = tuple(value[..., part * n : (part + 1) * n] for part in range(joined))
        tiles = (operand.tiles[operand.slot(number), *index] for operand in self.scratch.operands)
        results = epilogue(products, tuple(tile.astype(jnp.float32) for tile in tiles))
        for outgoing, result in zip(self.scratch.outgoing, results, strict=True):
            outgoing.put(slot, result, index)
        if (
            self.scratch.maxima is not None
            and (measured := self.schedule.work.measured) is not None
        ):
            rounded = [result.astype(self.schedule.work.result) for result in results[measured]]
            magnitudes = [jnp.abs(result.astype(jnp.float32)) for result in rounded]
            parts = [
                one[..., first : first + LANES]
                for one in magnitudes
                for first in range(0, n, LANES)
            ]
            self.scratch.maxima.put(slot, functools.reduce(jnp.maximum, parts), index[:2])

    def prefetch(self, step: Scalar) -> None:
        """Starts to fetch the tiles of a step, of w if it is another one. Waits for an arrival at
        its first use.
        """
        there = self.schedule.at(step)
        tiles = self.schedule.tiles
        scratch = self.scratch.matmul
        gather = self.gather
        first = (there.row == 0) & (there.column == 0) & (there.t == 0)
        is_own = there.arrival < gather.layout.chunks

        @pl.when(first & jnp.logical_not(is_own))
        def _() -> None:
            gather.receive(there.arrival)
            gather.send(there.arrival)

        direction, i = split(there.row, tiles.rows.count)
        block = gather.block(direction, there.arrival)
        chunk = remainder(there.arrival, gather.layout.chunks)

        def start_x(own: bool) -> None:
            def source(_: int, batches: pl.Slice, rows: pl.Slice, depth: pl.Slice) -> Ref:
                batches, rows = gather.layout.in_block(direction, chunk, batches, rows)
                return (
                    gather.x.at[batches, rows, depth]
                    if own
                    else gather.gathered.at[batches, block, rows, depth]
                )

            tiles.start_x(scratch.x, x_slot, i, there.t, source)

        with jax.named_scope("prefetch"):
            new_w = functools.partial(
                tiles.start_w, scratch.w, there.w_slot, there.t, there.column, self.ws
            )
            when(self.schedule.new_w(there), new_w)
            x_slot = remainder(step, 2)
            when(is_own, start_x, True)
            when(jnp.logical_not(is_own), start_x, False)
            when(there.t == max(0, tiles.contraction.count - 2), self.prefetch_operands, there)

    def prefetch_operands(self, there: StreamStep) -> None:
        """Starts to fetch the tiles of the epilogue's operands for a sum, and its scales."""
        for operand, source in zip(self.scratch.operands, self.operands, strict=True):

            def start(
                _: int, *tile: Index, operand: IncomingTiles = operand, source: Ref = source
            ) -> None:
                operand.start(operand.slot(there.number), source.at[*tile])

            self.on_result(there, start)

        if self.scratch.scales is not None:
            self.fetch_scales(self.scratch.scales, there)

    def fetch_scales(self, scales: Scales, there: StreamStep) -> None:
        def of_tile(
            number: int, batches: pl.Slice, block: Scalar, rows: pl.Slice, columns: pl.Slice
        ) -> None:
            of_rows, *of_columns = self.scales
            parts = [
                part.at[:, columns]
                for part in of_columns[number : number + self.schedule.tiles.joined]
            ]
            scales.start(scales.rows.slot(there.number), of_rows.at[batches, block, rows], parts)

        self.on_result(there, of_tile)

    def wait_for_scales(self, scales: Scales, here: StreamStep) -> None:
        def of_tile(
            _: int, batches: pl.Slice, block: Scalar, rows: pl.Slice, columns: pl.Slice
        ) -> None:
            joined = self.schedule.tiles.joined
            scales.wait(
                scales.rows.slot(here.number), batches.size, rows.size, joined * columns.size
            )

        self.on_result(here, of_tile)

    def copy_own(self, step: Scalar) -> None:
        """Copies a batch of the own block to its place at every second step.

        A copy of the whole block would hold up the tiles that stand behind it in HBM's queue.
        """
        batches = self.gather.x.shape[0]
        steps = self.schedule.grid.steps
        if batches > steps:
            when(step == 0, self.gather.start_copy_own)
            return
        batch, rest = split(step, 2 if 2 * batches <= steps else 1)
        when((rest == 0) & (batch < batches), self.gather.start_copy_own, batch)

    def store_last(self, step: Scalar) -> None:
        """Starts the copies of the tiles that the step before has finished to their places.

        They stand in HBM's queue behind the tiles of the next step, which are needed first.
        """
        here = self.schedule.at(jnp.maximum(step - 1, 0))
        slot = self.scratch.matmul.outgoing.slot(here.number)

        def store(number: int, *tile: Index) -> None:
            # an epilogue has all ys
            for outgoing, y in zip(self.scratch.outgoing, self.ys[number:], strict=False):
                outgoing.store(slot, y.at[*tile])
            if self.scratch.maxima is not None and self.maxima is not None:
                lanes = aligned(here.column * LANES, LANES, LANES)
                self.scratch.maxima.store(slot, self.maxima.at[*tile[:-1], lanes])

        with jax.named_scope("store"):
            finished = (step > 0) & (here.t == self.schedule.tiles.contraction.count - 1)
            when(finished, self.on_result, here, store)

    def on_result(self, here: StreamStep, use: Callable[..., None]) -> None:
        """Calls `use(number of the w, batches, block, rows, columns)` with where a tile lies in a
        result.
        """
        gather = self.gather
        direction, i = split(here.row, self.schedule.tiles.rows.count)
        block = gather.block(direction, here.arrival)
        chunk = remainder(here.arrival, gather.layout.chunks)

        def of_tile(number: int, batches: pl.Slice, rows: pl.Slice, columns: pl.Slice) -> None:
            batches, rows = gather.layout.in_block(direction, chunk, batches, rows)
            use(number, batches, block, rows, columns)

        self.schedule.tiles.on_result(i, here.column, of_tile)

    def wait_until_left(self, number: Scalar) -> None:
        schedule = self.schedule
        tiles = self.schedule.tiles
        round_, i = split(number, schedule.accumulators)
        _, pass_, column = IterationGrid(schedule.grid.sizes[:3]).coordinates(round_)
        row = remainder(pass_ * schedule.accumulators + i, tiles.rows.count)
        for outgoing in self.scratch.outgoing:
            tiles.wait_result(outgoing, outgoing.slot(number), row, column)
        if (maxima := self.scratch.maxima) is not None:
            slot = maxima.slot(number)
            tiles.rows.on_slice(
                row, lambda batches, rows: maxima.wait(slot, batches.size, rows.size, LANES)
            )
