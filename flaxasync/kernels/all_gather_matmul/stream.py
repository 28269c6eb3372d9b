"""The order of work of all_gather_matmul where x streams from HBM: arrival by arrival, as they
come.

```
links   arrival 1 ->    arrival 2 ->    arrival 3 -> ...
core    arrival 0       arrival 1       arrival 2        ...
          columns 0       columns 1 ...                    of all ws
            t=0 t=1 ...                                    of k: a tile of w for all rows
              i=0 i=1 ...                                  of rows, each with a sum
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

from flaxasync.kernels.all_gather_matmul.work import GatherOperands, GatherResults, GatherWork
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
from flaxasync.kernels.engine.vector_memory import (
    SEMAPHORES,
    available,
    check_vmem,
    matmul_bytes,
)

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
        trips = arrivals * passes
        x = trips * self.accumulators * self.tiles.rows.size
        w = self.tiles.joined * self.tiles.columns.size
        if not self.tiles.w_stays:
            w *= trips
        k = depth * self.tiles.contraction.size
        rows = self.work.layout.arrival_rows
        arriving = 2 * (arrivals - self.work.layout.chunks) * rows * k
        operands = self.work.operands * arrivals * rows * sum(self.tiles.columns.lengths)
        return columns * k * (x + w) + arriving + operands

    def new_w(self, there: StreamStep) -> Condition:
        """Returns whether the tile of w of a step has to come from HBM."""
        if self.tiles.w_stays:
            return (there.row == 0) & (there.arrival == 0)
        return there.i == 0

    def at(self, step: Scalar) -> StreamStep:
        arrival, pass_, column, t, i = self.grid.coordinates(step)
        round_ = split(step, self.tiles.contraction.count * self.accumulators)[0]
        w_slot = self.tiles.w_slot(t, column, split(step, self.accumulators)[0])
        row = pass_ * self.accumulators + i
        number = round_ * self.accumulators + i
        return StreamStep(arrival, row, column, t, i, number, w_slot)

    def scratch(self) -> StreamScratch:
        work = self.work
        tiles = self.tiles
        slots = self.operand_slots
        if work.epilogue:
            results = work.epilogue.results
        else:
            results = 1
        maxima = None
        if work.measured is not None:
            maxima = OutgoingTiles.allocate(2, (*tiles.rows.shape, LANES), jnp.float32)
        scales = None
        if work.scaled:
            scales = Scales.allocate(slots, tiles.rows.shape, tiles.joined * tiles.columns.size)
        return StreamScratch(
            tiles.scratch(
                work.dtype,
                work.w_dtype,
                outgoing=2,
                accumulators=self.accumulators,
                result=work.result,
            ),
            (OutgoingTiles.allocate(2, tiles.result, work.result),) * (results - 1),
            (IncomingTiles.allocate(slots, tiles.result, work.result),) * work.operands,
            maxima,
            scales,
        )


def plan(work: GatherWork) -> StreamSchedule:
    """Returns the schedule with the largest tiles up to those asked for; raises if they exceed
    vector memory.

    The products of the last arrival have no transfer beside them. So where a hop takes longer than
    its products, each half-block travels in chunks, if w stays in vector memory, since otherwise
    HBM would bring it again for each of them, and if there are semaphores for so many arrivals.
    """
    layout = work.layout
    chip = work.cores.rates()
    rows = layout.batches * layout.rows
    hop = rows * work.k * jnp.dtype(work.dtype).itemsize / chip.link_bandwidth
    if hop > 2 * layout.arrival_rows * work.k * sum(work.widths) / chip.flops:
        counts = [count for count in CHUNKS if rows >= count * CHUNK_ROWS]
        for chunked in filter(None, map(layout.in_chunks, counts)):
            found = _plan_of(dataclasses.replace(work, layout=chunked))
            if found.tiles.w_stays and found.work.semaphores <= SEMAPHORES:
                return found
    return _plan_of(work)


def _plan_of(work: GatherWork) -> StreamSchedule:
    """Returns the schedule of half-blocks in given chunks."""
    layout = work.layout
    asked = work.tiles or TILES
    joined = 1
    results = 1
    lengths = work.widths
    if work.epilogue is not None:
        joined = len(work.widths)
        results = work.epilogue.results
        lengths = work.widths[:1]
    rows = RowTiling.of(layout.batches, layout.rows, asked.m, layout.unit)
    columns = Tiling.of(lengths, asked.n)
    tiles = MatmulTiles(rows, columns, Tiling.of((work.k,), asked.k), work.transposed, joined)
    room = max(1, ACCUMULATORS // (4 * rows.size * joined * columns.size))
    accumulators = largest_divisor(layout.directions * rows.count, room, 1)
    operand_slots = max(2, accumulators)
    result_sized = 2 * results + operand_slots * work.operands  # buffers as large as a result's

    def need(t: Tiles) -> int:
        wide = Tiles(t.m, t.k, joined * t.n)
        total = matmul_bytes(wide, work.dtype, 0, accumulators)
        total += result_sized * t.m * t.n * jnp.dtype(work.result).itemsize
        if work.scaled:
            total += Scales.nbytes(operand_slots, wide.m, wide.n)
        if work.measured is not None:
            total += 2 * 4 * t.m * LANES
        return total

    sizes = Tiles(rows.size, tiles.contraction.size, columns.size)
    # what a column takes is multiplied by all w, operands and results of an epilogue
    if work.epilogue is not None and columns.size > LANES and need(sizes) > available():
        narrower = Tiles(asked.m, asked.k, columns.size // 2)
        return _plan_of(dataclasses.replace(work, tiles=narrower))
    tiles, vmem_bytes = tiles.keeping_w(check_vmem(CALLER, sizes, need), work.dtype)
    return StreamSchedule(work, tiles, accumulators, vmem_bytes)


@dataclasses.dataclass(frozen=True)
class Stream:
    schedule: StreamSchedule
    gather: Gather
    operands: GatherOperands
    results: GatherResults
    keep_gathered: bool
    scratch: StreamScratch

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

        @pl.when(step + 1 < schedule.grid.steps)
        def _() -> None:
            self.prefetch(step + 1)

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
                slot = operand.slot(here.number)
                when(last, tiles.wait_result, operand, slot, i, here.column)
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
        of_one = (*index[:2], slice(0, n))
        products = tuple(value[..., part * n : (part + 1) * n] for part in range(joined))
        tiles = tuple(
            operand.tiles[operand.slot(number), *of_one].astype(jnp.float32)
            for operand in self.scratch.operands
        )
        results = epilogue(products, tiles)
        for outgoing, result in zip(self.scratch.outgoing, results, strict=True):
            outgoing.put(slot, result, of_one)
        maxima = self.scratch.maxima
        measured = self.schedule.work.measured
        if maxima is not None and measured is not None:
            maxima.put(slot, self.largest_magnitudes(results[measured]), of_one[:2])

    def largest_magnitudes(self, results: Sequence[jax.Array]) -> jax.Array:
        """Returns the largest magnitude, in each row and lane, of results as they are stored."""
        rounded = [result.astype(self.schedule.work.result) for result in results]
        magnitudes = [jnp.abs(result.astype(jnp.float32)) for result in rounded]
        starts = range(0, magnitudes[0].shape[-1], LANES)
        parts = [one[..., first : first + LANES] for one in magnitudes for first in starts]
        return functools.reduce(jnp.maximum, parts)

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

        def own(_: int, batches: pl.Slice, rows: pl.Slice, depth: pl.Slice) -> Ref:
            here = gather.layout.in_block(direction, chunk, batches, rows)
            return gather.x.at[*here, depth]

        def arrived(_: int, batches: pl.Slice, rows: pl.Slice, depth: pl.Slice) -> Ref:
            of_block, in_block = gather.layout.in_block(direction, chunk, batches, rows)
            return gather.gathered.at[of_block, block, in_block, depth]

        with jax.named_scope("prefetch"):
            ws = self.operands.ws
            new_w = self.schedule.new_w(there)
            when(new_w, tiles.start_w, scratch.w, there.w_slot, there.t, there.column, ws)
            start_x = functools.partial(tiles.start_x, scratch.x, remainder(step, 2), i, there.t)
            when(is_own, start_x, own)
            when(jnp.logical_not(is_own), start_x, arrived)
            early = there.t == max(0, tiles.contraction.count - 2)
            when(early, self.prefetch_operands, there)

    def prefetch_operands(self, there: StreamStep) -> None:
        """Starts to fetch the tiles of the epilogue's operands for a sum, and its scales."""
        for operand, source in zip(self.scratch.operands, self.operands.of_epilogue, strict=True):

            def start(
                _: int, *tile: Index, operand: IncomingTiles = operand, source: Ref = source
            ) -> None:
                operand.start(operand.slot(there.number), source.at[*tile])

            self.on_result(there, start)

        if self.scratch.scales is not None:
            self.fetch_scales(self.scratch.scales, there)

    def fetch_scales(self, scales: Scales, there: StreamStep) -> None:
        of_rows, *of_columns = self.operands.scales

        def of_tile(
            number: int, batches: pl.Slice, block: Scalar, rows: pl.Slice, columns: pl.Slice
        ) -> None:
            joined = of_columns[number : number + self.schedule.tiles.joined]
            parts = [part.at[:, columns] for part in joined]
            scales.start(scales.rows.slot(there.number), of_rows.at[batches, block, rows], parts)

        self.on_result(there, of_tile)

    def wait_for_scales(self, scales: Scales, here: StreamStep) -> None:
        def of_tile(
            _: int, batches: pl.Slice, block: Scalar, rows: pl.Slice, columns: pl.Slice
        ) -> None:
            slot = scales.rows.slot(here.number)
            n = self.schedule.tiles.joined * columns.size
            scales.wait(slot, batches.size, rows.size, n)

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
        if 2 * batches <= steps:
            every = 2
        else:
            every = 1
        batch, rest = split(step, every)
        when((rest == 0) & (batch < batches), self.gather.start_copy_own, batch)

    def store_last(self, step: Scalar) -> None:
        """Starts the copies of the tiles that the step before has finished to their places.

        They stand in HBM's queue behind the tiles of the next step, which are needed first.
        """
        here = self.schedule.at(jnp.maximum(step - 1, 0))
        slot = self.scratch.matmul.outgoing.slot(here.number)

        def store(number: int, *tile: Index) -> None:
            # an epilogue has all ys
            for outgoing, y in zip(self.scratch.outgoing, self.results.ys[number:], strict=False):
                outgoing.store(slot, y.at[*tile])
            if self.scratch.maxima is not None and self.results.maxima is not None:
                lanes = aligned(here.column * LANES, LANES, LANES)
                self.scratch.maxima.store(slot, self.results.maxima.at[*tile[:-1], lanes])

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
            of_block, in_block = gather.layout.in_block(direction, chunk, batches, rows)
            use(number, of_block, block, in_block, columns)

        self.schedule.tiles.on_result(i, here.column, of_tile)

    def wait_until_left(self, number: Scalar) -> None:
        schedule = self.schedule
        tiles = self.schedule.tiles
        round_, i = split(number, schedule.accumulators)
        _, pass_, column = IterationGrid(schedule.grid.sizes[:3]).coordinates(round_)
        row = remainder(pass_ * schedule.accumulators + i, tiles.rows.count)
        for outgoing in self.scratch.outgoing:
            tiles.wait_result(outgoing, outgoing.slot(number), row, column)
        maxima = self.scratch.maxima
        if maxima is not None:
            slot = maxima.slot(number)

            def wait_for(batches: pl.Slice, rows: pl.Slice) -> None:
                maxima.wait(slot, batches.size, rows.size, LANES)

            tiles.rows.on_slice(row, wait_for)
