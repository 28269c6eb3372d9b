"""dw = all_gather(x).T @ dy as one Pallas TPU kernel: the weight gradient of all_gather_matmul,
while x travels again.

```
x     [B, m, k]       this device's rows                (R devices on the axis, B batches)
dy_i  [B, R*m, n_i]   all rows, this device's columns; several share one trip of x
dw_i  [k, n_i]        sums over all rows

chunk   0 of columns of x         1                            ...
core    own  s=1  s=2  ... R-1    own  s=1  ...                products with rows of dy; float32 sums of all columns
links    s=1  s=2  ...      | s=1  s=2                         each block one hop further, just before it is multiplied
```

A chunk of columns of x goes around the ring block by block, half of its rows in each direction.
Each block is multiplied by all columns of dy where it is, so that the chunk's rows of dw are summed
in vector memory and stored once. A hop moves a block while the block before is multiplied, from the
first chunk on, so that no chunk is waited for.

Where several cores of a device run the kernel (`engine.cores`), each has equally many columns of x,
in chunks and receive buffers of its own.

Of 8-bit values the sums are int32, or float32 of fp8. Before they are rounded and stored, they are
multiplied with the scales of columns of x and of dy.

XLA transposes x once, before the kernel: the matrix unit takes a left operand whose contraction
lies along lanes.

In the last hop of a chunk nothing is sent on, so the own block of the next chunk leaves then.

There are two sets of receive buffers, for even and for odd chunks, and no device acknowledges what
it read. Invariant: when a device sends a block of chunk c, its receiver has read all that arrived
there in chunk c - 2. For R > 2, the last block that a device multiplies in a chunk is its
receiver's own, which the receiver sent when it had read the buffers of the chunk before.
`test_what_is_overwritten_was_read` (tests/kernels/test_weight_gradient.py) derives the invariant
from the waits and sends of `_Device.begin_hop`, for any ring and any number of chunks. On a ring of
two, a chunk's own block leaves when the chunk begins.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.cores import Cores, call_on_cores
from flaxasync.kernels.engine.matmul import Scales, accumulate, dot, laid_out_scales, sums_dtype
from flaxasync.kernels.engine.operands import (
    LANES,
    DType,
    Ref,
    Scalar,
    Tiles,
    aligned,
    beginning,
    output,
    when,
)
from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.engine.slots import IncomingTiles, OutgoingTiles, start_send, wait
from flaxasync.kernels.engine.tiling import remainder, split
from flaxasync.kernels.weight_gradient_schedule import (
    BUFFER_SETS,
    CALLER,
    OUTGOING,
    WeightGradientSchedule,
    WeightGradientStep,
    cores_of,
    plan_schedule,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightGradientScratch:
    x: IncomingTiles  # [2, chunk, rows] of the transposed x
    y: IncomingTiles  # [2, batches, rows, n] of dy
    outgoing: OutgoingTiles  # [OUTGOING, chunk, n] rounded sums
    accumulator: Ref  # [tiles of columns, chunk, n] VMEM, of 32 bits
    # if x and dys are 8-bit values: [1, chunk, LANES] of columns of x, and of columns of dy
    scales: Scales | None
    send_sem: Ref  # [directions] DMA semaphores
    recv_sem: Ref  # [BUFFER_SETS, directions, R - 1] DMA semaphores


class WeightGradientOperands(NamedTuple):
    """The operands, in HBM."""

    x: Ref  # [k, B*m]
    dys: Sequence[Ref]  # [B, R, m, n_i]
    # of columns of x, [1, k, LANES], and of columns of each dy, [SUBLANES, n_i]; or none
    scales: Sequence[Ref]

    def on_core(self, cores: Cores) -> "WeightGradientOperands":
        """Returns the part of one core: its columns of x, and all of dy."""
        of_x = [cores.part(one, 1) for one in self.scales[:1]]
        return WeightGradientOperands(cores.part(self.x, 0), self.dys, of_x + list(self.scales[1:]))


class WeightGradientResults(NamedTuple):
    """The results, in HBM."""

    dws: Sequence[Ref]  # [k, n_i]
    # [BUFFER_SETS, R - 1, chunk, B*m]; of all cores [BUFFER_SETS, R - 1, cores * chunk, B*m]
    receive_buffers: Ref

    def on_core(self, cores: Cores) -> "WeightGradientResults":
        """Returns the part of one core: its rows of dw."""
        dws = [cores.part(dw, 0) for dw in self.dws]
        return WeightGradientResults(dws, cores.part(self.receive_buffers, 2))


def gather_weight_gradient(
    x: jax.Array,
    dys: tuple[jax.Array, ...],
    axis_name: str,
    *,
    scales: tuple[jax.Array, Sequence[jax.Array]] | None = None,
    result: DType | None = None,
    tiles: Tiles | None = None,
    directions: int = 2,
    cores: int | None = None,
    collective_id: int | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the dws; see the head of this file and that of `flaxasync.kernels`.

    B*m is a multiple of 128. `tiles.m` counts columns of x in a chunk. `tiles.k` counts rows of x
    in a product, and `tiles.n` columns of dy.

    Args beside those: scales: those of the columns of x, [k], and of each dy, [n], in float32, if x
    and dys are 8-bit values. result: the dtype of the dws; that of x by default.
    """
    size = lax.axis_size(axis_name)
    result = jnp.dtype(result or x.dtype)
    batch, m, k = x.shape
    itemsize = x.dtype.itemsize
    widths = [dy.shape[2] for dy in dys]
    on = cores_of(k, cores)
    schedule, vmem_bytes = plan_schedule(
        x, k // on.count, widths, tiles, size, directions, result, scales is not None
    )
    laid_out = []
    if scales is not None:
        of_x, of_dys = scales
        laid_out = laid_out_scales(of_x[None], of_dys)
    ring = Ring(axis_name, size, schedule.directions, on)
    chunks = schedule.chunks
    sets = min(BUFFER_SETS, chunks.count)
    receive_buffers = (sets, size - 1, on.count * chunks.size, batch * m)

    def body(
        given: WeightGradientOperands, made: WeightGradientResults, scratch: WeightGradientScratch
    ) -> None:
        device = _Device(ring, schedule, given.on_core(on), made.on_core(on), scratch)
        ring.enter(f"{CALLER} {len(dys)}", collective_id)
        device.run()

    dma = pltpu.SemaphoreType.DMA
    n = schedule.columns.size
    scratch: Ref = WeightGradientScratch(
        x=IncomingTiles.allocate(2, (chunks.size, schedule.rows.size), x.dtype),
        y=IncomingTiles.allocate(2, (*schedule.rows.shape, n), dys[0].dtype),
        outgoing=OutgoingTiles.allocate(OUTGOING, (chunks.size, n), result),
        accumulator=pltpu.VMEM((schedule.columns.count, chunks.size, n), sums_dtype(x.dtype)),
        send_sem=dma((ring.directions,)),
        recv_sem=dma((BUFFER_SETS, ring.directions, size - 1)),
        scales=None if scales is None else Scales.allocate(2, (1, chunks.size), n),
    )
    readings = on.count * chunks.count  # of every dy
    streamed = readings * size * batch * m * sum(widths) + (3 * size - 2) * x.size
    x_transposed = x.reshape(batch * m, k).T
    by_block = [dy.reshape(batch, size, m, -1) for dy in dys]
    dws = [output((k, n), x, *dys, dtype=result) for n in widths]
    operands = WeightGradientOperands(x_transposed, by_block, laid_out)
    results = WeightGradientResults(dws, output(receive_buffers, x, *dys))
    made = call_on_cores(
        body,
        operands,
        results,
        [scratch],
        cores=on,
        collective_id=collective_id,
        vmem_bytes=vmem_bytes,
        flops=2 * size * x.size * sum(widths),
        moved=itemsize * streamed + k * sum(widths) * result.itemsize,
        sent=(size - 1) * x.size * itemsize,
        name=CALLER,
    )
    return tuple(made.dws)


@dataclasses.dataclass(frozen=True)
class _Device:
    ring: Ring
    schedule: WeightGradientSchedule
    operands: WeightGradientOperands
    results: WeightGradientResults
    scratch: WeightGradientScratch

    def run(self) -> None:
        self.begin_hop(self.schedule.at(0))
        self.prefetch(self.schedule.at(0))
        pl.loop(0, self.schedule.grid.steps)(self.step)
        with jax.named_scope("finish"):
            results = self.schedule.chunks.count * self.schedule.columns.count
            self.scratch.outgoing.finish(results, self.wait_until_left)

    def step(self, step: Scalar) -> None:
        """Starts the transfers of the next step, multiplies, and stores a tile that is finished."""
        schedule = self.schedule
        here = schedule.at(step)
        following = schedule.at(step + 1)
        with jax.named_scope("wait"):
            self.wait_for_operands(here)

        @pl.when(step + 1 < schedule.grid.steps)
        def _() -> None:
            when((following.i == 0) & (following.j == 0), self.begin_hop, following)
            self.prefetch(following)

        with jax.named_scope("multiply"):
            schedule.columns.on_size(here.j, functools.partial(self.multiply, here))

    def begin_hop(self, there: WeightGradientStep) -> None:
        """Begins a hop: waits for what arrives in it and for what was sent in the one before, and
        sends on.
        """

        def begin(_: int, chunk: pl.Slice) -> None:
            for direction in self.ring.both:
                # `when` computes its operands in hop 0, too
                before = jnp.maximum(there.hop - 1, 0)
                when(there.hop > 0, self._wait_for_hop, there, before, chunk, direction)
                onward = (there.hop > 0) & (there.hop < self.schedule.size - 1)
                arrived = self._buffer(there, there.hop - 1, chunk, direction)
                when(onward, self._send, there, arrived, chunk, direction)

        schedule = self.schedule
        # whether the own block of the next chunk leaves in the last hop of this one
        leaves_early = schedule.size > 2
        following = there._replace(
            chunk=there.chunk + 1, hop=0, buffers=remainder(there.chunk + 1, BUFFER_SETS)
        )
        with jax.named_scope("hop"):
            schedule.chunks.on_slice(there.chunk, begin)
            when((there.hop == 0) & ((there.chunk == 0) | (not leaves_early)), self.send_own, there)
            last = leaves_early & (there.hop == schedule.size - 1)
            when(last & (following.chunk < schedule.chunks.count), self.send_own, following)

    def send_own(self, there: WeightGradientStep) -> None:
        """Sends the own block in the first hop of a chunk."""

        def send(_: int, chunk: pl.Slice) -> None:
            for direction, rows in zip(self.ring.both, self.schedule.half_blocks, strict=True):
                self._send(there, self.operands.x.at[chunk, rows], chunk, direction)

        self.schedule.chunks.on_slice(there.chunk, send)

    def prefetch(self, there: WeightGradientStep) -> None:
        schedule = self.schedule
        scratch = self.scratch
        owner = self.ring.behind(there.hop, there.direction)

        def fetch(batches: pl.Slice, rows: pl.Slice) -> None:
            (rows_of_batch,) = schedule.rows.rows.lengths
            first = batches.start * rows_of_batch + rows.start
            lanes = aligned(first, batches.size * rows.size, LANES)

            def fetch_x(_: int, chunk: pl.Slice) -> None:
                place = beginning(chunk.size)
                arrived = self.results.receive_buffers.at[
                    there.buffers, there.hop - 1, *place, lanes
                ]
                own = self.operands.x.at[chunk, lanes]
                when(there.hop == 0, scratch.x.start, there.x_slot, own)
                when(there.hop > 0, scratch.x.start, there.x_slot, arrived)

            def fetch_y(number: int, columns: pl.Slice) -> None:
                scratch.y.start(
                    there.y_slot, self.operands.dys[number].at[batches, owner, rows, columns]
                )

            when(there.j == 0, schedule.chunks.on_slice, there.chunk, fetch_x)
            schedule.columns.on_slice(there.j, fetch_y)

        with jax.named_scope("prefetch"):
            schedule.rows.on_slice(there.i, fetch)
            if scratch.scales is not None:
                when(schedule.is_last(there), self.fetch_scales, scratch.scales, there)

    def fetch_scales(self, scales: Scales, there: WeightGradientStep) -> None:
        of_x, *of_dys = self.operands.scales

        def on_chunk(_: int, chunk: pl.Slice) -> None:
            def fetch(number: int, columns: pl.Slice) -> None:
                slot = scales.rows.slot(self.schedule.result(there))
                scales.start(slot, of_x.at[:, chunk], [of_dys[number].at[:, columns]])

            self.schedule.columns.on_slice(there.j, fetch)

        self.schedule.chunks.on_slice(there.chunk, on_chunk)

    def wait_for_operands(self, here: WeightGradientStep) -> None:
        schedule = self.schedule
        scratch = self.scratch

        def on_rows(batches: pl.Slice, rows: pl.Slice) -> None:
            size = batches.size * rows.size

            def wait_x(chunk: int) -> None:
                scratch.x.wait(here.x_slot, chunk, size)

            wait_y = functools.partial(scratch.y.wait, here.y_slot, batches.size, rows.size)
            when(here.j == 0, schedule.chunks.on_size, here.chunk, wait_x)
            schedule.columns.on_size(here.j, wait_y)

        schedule.rows.on_slice(here.i, on_rows)
        if scratch.scales is not None:
            when(schedule.is_last(here), self.wait_for_scales, scratch.scales, here)

    def wait_for_scales(self, scales: Scales, here: WeightGradientStep) -> None:
        slot = scales.rows.slot(self.schedule.result(here))

        def on_chunk(chunk: int) -> None:
            wait_for = functools.partial(scales.wait, slot, 1, chunk)
            self.schedule.columns.on_size(here.j, wait_for)

        self.schedule.chunks.on_size(here.chunk, on_chunk)

    def multiply(self, here: WeightGradientStep, n: int) -> None:
        """Adds the product of two tiles, `n` columns wide, to its sum; a finished sum is rounded
        and stored.
        """
        schedule = self.schedule
        scratch = self.scratch
        outgoing = self.scratch.outgoing
        number = schedule.result(here)
        last = schedule.is_last(here)
        slot = outgoing.slot(number)
        first = (here.hop == 0) & (here.i == 0)
        rows_of_batch = schedule.rows.rows.size

        def product(depth: int, index: tuple[pl.Slice, slice]) -> jax.Array:
            rows = min(depth, rows_of_batch)
            batches = depth // rows
            x = scratch.x.tiles[here.x_slot, index[0], :depth]
            return dot(x, scratch.y.tiles[here.y_slot, :batches, :rows, :n].reshape(depth, n))

        def finish(sums: jax.Array, index: tuple[pl.Slice, slice]) -> None:
            if scratch.scales is not None:
                of_tile = scratch.scales.rows.slot(number)
                (sums,) = scratch.scales.apply(of_tile, sums[None], (slice(0, 1), *index))
            outgoing.put(slot, sums, index)

        def for_each_sub_block(use: Callable[..., None]) -> None:
            def on_columns(columns: pl.Slice) -> None:
                use((columns, slice(0, n)))

            schedule.chunks.for_each_sub_block(here.chunk, on_columns)

        when(last, outgoing.free, number, self.wait_until_left)
        accumulate(
            schedule.rows.flattened(),
            here.i,
            repeats=schedule.size,
            first=first,
            last=last,
            accumulator=scratch.accumulator.at[here.j],
            for_each_sub_block=for_each_sub_block,
            product=product,
            finish=finish,
        )

        def store(number: int, columns: pl.Slice) -> None:
            def of_chunk(_: int, chunk: pl.Slice) -> None:
                outgoing.store(slot, self.results.dws[number].at[chunk, columns])

            schedule.chunks.on_slice(here.chunk, of_chunk)

        when(last, schedule.columns.on_slice, here.j, store)

    def wait_until_left(self, number: Scalar) -> None:
        chunk, j = split(number, self.schedule.columns.count)
        outgoing = self.scratch.outgoing
        columns = self.schedule.columns

        def on_chunk(rows: int) -> None:
            def wait_for(n: int) -> None:
                outgoing.wait(outgoing.slot(number), rows, n)

            columns.on_size(j, wait_for)

        self.schedule.chunks.on_size(chunk, on_chunk)

    def _buffer(
        self, there: WeightGradientStep, hop: Scalar, chunk: pl.Slice, direction: int
    ) -> Ref:
        """Returns where the half-block that is sent in a hop arrives."""
        lanes = self.schedule.half_blocks[direction]
        return self.results.receive_buffers.at[there.buffers, hop, *beginning(chunk.size), lanes]

    def _send(
        self, there: WeightGradientStep, source: Ref, chunk: pl.Slice, direction: int
    ) -> None:
        target = self._buffer(there, there.hop, chunk, direction)
        send_sem = self.scratch.send_sem.at[direction]
        recv_sem = self.scratch.recv_sem.at[there.buffers, direction, there.hop]
        start_send(source, target, send_sem, recv_sem, self.ring.receiver(direction))

    def _wait_for_hop(
        self, there: WeightGradientStep, hop: Scalar, chunk: pl.Slice, direction: int
    ) -> None:
        """Waits until what was sent in a hop has left, and what is sent to this device has
        arrived.
        """
        moved = self._buffer(there, hop, chunk, direction)
        scratch = self.scratch
        wait(moved, scratch.send_sem.at[direction])
        wait(moved, scratch.recv_sem.at[there.buffers, direction, hop])
