"""reduce_scatter(sum of x_i @ w_i) as one Pallas TPU kernel: a partial sum is sent, tile by tile,
as it is finished.

```
x_i  [B, R*m, k_i]   all rows, this device's part of k     (R devices on the axis, B batches)
w_i  [k_i, n]        or [n, k_i] if transposed
y    [B, m, n]       this device's rows of the sum over all devices

hop          0             1             ...   R - 1
core         a b c d       a b c d             a b c d      tiles of a block: the own one last
link           a b c d       a b c d                        to the neighbour's receive buffer
neighbour                  + a b c d           + a b c d    adds them; sends on, or stores
```

A tile that arrives is needed one hop after it was sent, so it has the time of a whole block for its
trip. Half of the tiles of a block go around the ring in each direction: in hop s a device works for
the owner that is s + 1 devices behind it in that direction (`Ring.behind`).

The receiver has two receive buffers for a block, used in turn. A tile is sent only after the
receiver has acknowledged that it read the tile that lies there, which was sent two hops earlier.
One count for each direction is enough, since tiles are sent and read in one order. Every wait is
for something that an earlier tile causes, so waits cannot form a circle. Where links take longer
than the products, the kernel can compute weight gradients meanwhile: `engine.beside`.

Where several cores of a device run the kernel (`engine.cores`), each has equally many rows of every
block.
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

from flaxasync.kernels.engine import beside
from flaxasync.kernels.engine.cores import CoreRows, call_on_cores
from flaxasync.kernels.engine.matmul import MatmulScratch, MatmulTiles, Scales, laid_out_scales
from flaxasync.kernels.engine.operands import (
    DType,
    Index,
    Ref,
    Scalar,
    Tiles,
    output,
    sublanes,
    when,
)
from flaxasync.kernels.engine.ring import Acknowledgements, Ring
from flaxasync.kernels.engine.slots import IncomingTiles, wait
from flaxasync.kernels.engine.tiling import remainder, split
from flaxasync.kernels.engine.vector_memory import available
from flaxasync.kernels.reduce_scatter_schedule import (
    CALLER,
    BlockOfRows,
    ReduceScatterSchedule,
    ReduceScatterStep,
    plan_schedule,
)


class ReduceScatterOperands(NamedTuple):
    """The operands, in HBM."""

    xs: Sequence[Ref]  # [B, R, m, k_i]
    ws: Sequence[Ref]  # [k_i, n] or [n, k_i]
    # of the rows, [B, R, m, LANES], and of the columns, [SUBLANES, n]; or none
    scales: Sequence[Ref]
    beside: Sequence[Ref]  # of the weight gradients

    def of_batches(self, first: int, count: int) -> "ReduceScatterOperands":
        """Returns the part of some batches, and all of w."""
        return self._replace(
            xs=[x.at[pl.ds(first, count)] for x in self.xs],
            scales=[one.at[pl.ds(first, count)] for one in self.scales[:1]] + list(self.scales[1:]),
        )

    def on_core(self, share: CoreRows) -> "ReduceScatterOperands":
        """Returns the part of one core: its rows, and all of w."""
        return ReduceScatterOperands(
            [share.part(x, 0, 2) for x in self.xs],
            self.ws,
            [share.part(one, 0, 2) for one in self.scales[:1]] + list(self.scales[1:]),
            self.beside,
        )


class ReduceScatterResults(NamedTuple):
    """The results, in HBM."""

    y: Ref  # [B, m, n]
    receive_buffers: Ref  # [2, B, m, n]
    dws: Sequence[Ref]  # [k, n] in whole tiles

    def on_core(self, share: CoreRows) -> "ReduceScatterResults":
        """Returns the part of one core: its rows."""
        return ReduceScatterResults(
            share.part(self.y, 0, 1), share.part(self.receive_buffers, 1, 2), self.dws
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReduceScatterScratch:
    matmul: MatmulScratch  # with one accumulator, if a tile of the result takes several steps
    # [2, batches, rows, n] partial sums of the neighbour, for this tile and the next one
    received: IncomingTiles
    recv_sem: Ref  # [2, tiles of a block] DMA semaphores, one for each place in the receive buffers
    read: Acknowledgements
    scales: Scales | None  # if x and w are 8-bit values
    beside: beside.BesideScratch | None  # if weight gradients are computed beside the sums


def matmul_reduce_scatter(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    axis_name: str,
    *,
    transposed: bool = False,
    scales: tuple[jax.Array, jax.Array] | None = None,
    result: DType | None = None,
    gradients: Sequence[beside.WeightGradient] = (),
    batches: range | None = None,
    tiles: Tiles | None = None,
    directions: int = 2,
    cores: int | None = None,
    collective_id: int | None = None,
) -> tuple[jax.Array, ...]:
    """Returns y, in the dtype in which sums travel, too, and each dw; see the heads of this file
    and of the package.

    Args beside those: scales: those of all rows, [B, R*m], and of the columns, [n], in float32, if
      the only x and w are 8-bit values. result: the dtype of y and the dws; that of x by default.
      gradients: what is computed beside the sums. Where any are asked for, they have all vector
      memory that y leaves. batches: those of x that y has; all by default.

    Raises:
      NotImplementedError: there are more tiles than semaphores.
    """
    size = lax.axis_size(axis_name)
    all_batches, all_rows, _ = xs[0].shape
    part = batches or range(all_batches)
    batch = len(part)
    dtype = xs[0].dtype
    m = all_rows // size
    n = ws[0].shape[0 if transposed else 1]
    ks = [x.shape[2] for x in xs]
    result = jnp.dtype(result or dtype)
    # tiles travel in either direction: the rows of a core need no halves
    share = CoreRows.of(CALLER, batch, m, sublanes(dtype), 1, cores)
    block = BlockOfRows(share.batches, share.rows, n, sublanes(dtype))
    schedule, vmem_bytes = plan_schedule(
        block, ks, dtype, transposed, tiles, size, directions, result, scales is not None
    )
    ring = Ring(axis_name, size, schedule.directions, share.cores)
    used = schedule.tiles
    laid_out = []
    if scales is not None:
        laid_out = laid_out_scales(scales[0].reshape(all_batches, size, m), scales[1:])
    more = beside.BesidePlan.of(gradients, result, available() - vmem_bytes, share.cores)
    local = beside.operands(more, gradients)

    def body(
        given: ReduceScatterOperands, made: ReduceScatterResults, scratch: ReduceScatterScratch
    ) -> None:
        if batch != all_batches:
            given = given.of_batches(part.start, batch)
        given = given.on_core(share)
        made = made.on_core(share)
        others = None
        if scratch.beside is not None:
            factors, dws = more.on_core(given.beside, made.dws)
            others = beside.Beside(more, factors, dws, scratch.beside)
        device = _Device(ring, schedule, used, given, made, scratch, others)
        ring.enter(f"{CALLER} {transposed} {len(xs)}", collective_id)
        device.run()

    def of_result(*shape: int) -> jax.ShapeDtypeStruct:
        return output(shape, *xs, *ws, *local, dtype=result)

    scratch: Ref = ReduceScatterScratch(
        matmul=used.scratch(
            dtype,
            ws[0].dtype,
            outgoing=schedule.outgoing,
            accumulators=int(schedule.depth > 1),
            result=result,
        ),
        received=IncomingTiles.allocate(2, used.result, result),
        recv_sem=pltpu.SemaphoreType.DMA((2, schedule.tiles_of_block)),
        read=Acknowledgements(pltpu.SemaphoreType.REGULAR((ring.directions,))),
        scales=None if scales is None else Scales.allocate(2, used.rows.shape, used.columns.size),
        beside=more.scratch() if gradients else None,
    )
    block_bytes = batch * m * n * result.itemsize
    if used.w_stays:
        w_trips = 1
    else:
        w_trips = size * used.rows.count
    x_elements = batch * all_rows * sum(ks)
    w_elements = sum(ks) * n
    w_trips *= share.cores.count
    streamed = (used.columns.count * x_elements + w_trips * w_elements) * dtype.itemsize
    # every block is written once, and all but one come back as a neighbour's sum
    sums_bytes = (2 * size - 1) * block_bytes
    by_block = [x.reshape(all_batches, size, m, -1) for x in xs]
    padded = [more.padded(sum_) for sum_ in range(len(gradients))]
    dws = [of_result(each.m, each.n) for each in padded]
    operands = ReduceScatterOperands(by_block, ws, laid_out, local)
    results = ReduceScatterResults(of_result(batch, m, n), of_result(2, batch, m, n), dws)
    made = call_on_cores(
        body,
        operands,
        results,
        [scratch],
        cores=share.cores,
        collective_id=collective_id,
        vmem_bytes=vmem_bytes + more.vmem_bytes,
        flops=2 * batch * all_rows * sum(ks) * n + more.flops,
        moved=streamed + sums_bytes + more.hbm_bytes,
        sent=(size - 1) * block_bytes,
        name=CALLER,
    )
    sums = zip(made.dws, gradients, strict=True)
    return made.y, *(dw[: each.x.shape[1], : each.y.shape[1]] for dw, each in sums)


@dataclasses.dataclass(frozen=True)
class _Device:
    ring: Ring
    schedule: ReduceScatterSchedule
    tiles: MatmulTiles
    operands: ReduceScatterOperands
    results: ReduceScatterResults
    scratch: ReduceScatterScratch
    beside: beside.Beside | None

    def run(self) -> None:
        self.prefetch(self.schedule.at(0))
        if self.beside is not None:
            self.beside.begin()
        self.clear_received()
        pl.loop(0, self.schedule.grid.steps)(self.step)
        with jax.named_scope("finish"):
            if self.beside is not None:
                self.beside.finish()
            self.scratch.matmul.outgoing.finish(
                self.schedule.size * self.schedule.tiles_of_block, self.wait_until_left
            )

    def step(self, step: Scalar) -> None:
        """Starts the transfers of the next step, multiplies, and sends or stores a tile that is
        finished.
        """
        schedule = self.schedule
        scratch = self.scratch.matmul
        tiles = self.tiles
        here = schedule.at(step)
        following = schedule.at(step + 1)
        more = step + 1 < schedule.grid.steps
        last = here.t == schedule.depth - 1
        # or else the neighbour sends the next sum only after it has this step's
        ahead = schedule.tiles_of_block > 1

        @pl.when(more)
        def _() -> None:
            self.prefetch(following)
            if ahead:
                self.prefetch_received(following)

        with jax.named_scope("wait"):
            when(here.new_x, tiles.wait_x, scratch.x, here.x_slot, here.i, here.t)
            when(here.new_w, tiles.wait_w, scratch.w, here.w_slot, here.t, here.j)
            when(last, scratch.outgoing.free, here.number, self.wait_until_left)
            when(last & (here.hop > 0), self.wait_for_received, here)
            if self.scratch.scales is not None:
                when(last, self.wait_for_scales, self.scratch.scales, here)
        self.multiply(here)
        when(last, self.send, here)
        if self.beside is not None:
            self.beside.between(step, schedule.grid.steps)
        if not ahead:
            when(more, self.prefetch_received, following)

    def prefetch(self, there: ReduceScatterStep) -> None:
        scratch = self.scratch.matmul
        owner = self.ring.behind(there.hop + 1, there.direction)

        def source(pair: int, batches: pl.Slice, rows: pl.Slice, depth: pl.Slice) -> Ref:
            return self.operands.xs[pair].at[batches, owner, rows, depth]

        with jax.named_scope("prefetch"):
            tiles = self.tiles
            ws = self.operands.ws
            when(there.new_x, tiles.start_x, scratch.x, there.x_slot, there.i, there.t, source)
            when(there.new_w, tiles.start_w, scratch.w, there.w_slot, there.t, there.j, ws)
            scales = self.scratch.scales
            if scales is not None:
                last = there.t == self.schedule.depth - 1
                when(last, self.fetch_scales, scales, there, owner)

    def fetch_scales(self, scales: Scales, there: ReduceScatterStep, owner: Scalar) -> None:
        """Starts to fetch the scales of a tile."""

        def fetch(_: int, batches: pl.Slice, rows: pl.Slice, columns: pl.Slice) -> None:
            of_rows, of_columns = self.operands.scales
            slot = scales.rows.slot(there.number)
            scales.start(slot, of_rows.at[batches, owner, rows], [of_columns.at[:, columns]])

        self.tiles.on_result(there.i, there.j, fetch)

    def wait_for_scales(self, scales: Scales, here: ReduceScatterStep) -> None:
        self.tiles.wait_result(scales, scales.rows.slot(here.number), here.i, here.j)

    def multiply(self, here: ReduceScatterStep) -> None:
        """Adds the product of two tiles to its sum. A finished sum is rounded into the slot that it
        leaves from.
        """
        received = self.scratch.received
        scratch = self.scratch.matmul
        scales = self.scratch.scales
        slot = received.slot(here.number)
        out_slot = scratch.outgoing.slot(here.number)

        def finish(value: jax.Array, index: tuple[Index, ...]) -> None:
            if scales is not None:
                value = scales.apply(scales.rows.slot(here.number), value, index)
            arrived = received.tiles[slot, *index].astype(jnp.float32)
            scratch.outgoing.put(out_slot, value + arrived, index)

        x_tile = scratch.x.tiles.at[here.x_slot]
        w_tile = scratch.w.tiles.at[here.w_slot]
        self.tiles.multiply(
            here.i, here.t, here.j, x_tile, w_tile, scratch.accumulators.at[0], finish
        )

    def clear_received(self) -> None:
        """Clears the slots of received sums: adding zeros in the first hop saves a second form of
        the product.
        """
        received = self.scratch.received.tiles

        @pl.loop(0, 2)
        def _(slot: Scalar) -> None:
            def clear(index: tuple[Index, ...], _: int) -> None:
                part = received.at[slot, *index]
                part[...] = jnp.zeros(part.shape, part.dtype)

            self.tiles.rows.for_each_sub_block(0, clear)

    def prefetch_received(self, there: ReduceScatterStep) -> None:
        """Waits until the neighbour's sum has arrived and starts to fetch it, if that step finishes
        a tile.
        """
        buffer = remainder(there.hop - 1, 2)
        received = self.scratch.received

        def fetch(_: int, *tile: pl.Slice) -> None:
            source = self.results.receive_buffers.at[buffer, *tile]
            wait(source, self.scratch.recv_sem.at[buffer, there.tile])
            received.start(received.slot(there.number), source)

        with jax.named_scope("prefetch_received"):
            finishes = (there.hop > 0) & (there.t == self.schedule.depth - 1)
            when(finishes, self.tiles.on_result, there.i, there.j, fetch)

    def wait_for_received(self, here: ReduceScatterStep) -> None:
        """Waits until the neighbour's sum is in vector memory, and acknowledges that its receive
        buffer was read.

        The buffers of the last two hops are not written again, so nobody waits for those
        acknowledgements.
        """
        received = self.scratch.received
        self.tiles.wait_result(received, received.slot(here.number), here.i, here.j)
        acknowledge = functools.partial(self.scratch.read.send, self.ring)
        when(here.hop < self.schedule.size - 2, self._in_direction, here, acknowledge)

    def send(self, here: ReduceScatterStep) -> None:
        """Sends a finished tile to the neighbour; stores it if its rows are this device's own."""
        outgoing = self.scratch.matmul.outgoing
        buffer = remainder(here.hop, 2)
        slot = outgoing.slot(here.number)
        recv_sem = self.scratch.recv_sem.at[buffer, here.tile]

        def send(direction: int) -> None:
            when(here.hop >= 2, self.scratch.read.wait, direction)

            def of_tile(_: int, *tile: pl.Slice) -> None:
                target = self.results.receive_buffers.at[buffer, *tile]
                outgoing.send(slot, target, recv_sem, self.ring.receiver(direction))

            self.tiles.on_result(here.i, here.j, of_tile)

        def store(_: int, *tile: pl.Slice) -> None:
            outgoing.store(slot, self.results.y.at[*tile])

        with jax.named_scope("send"):
            own = here.hop == self.schedule.size - 1
            when(jnp.logical_not(own), self._in_direction, here, send)
            when(own, self.tiles.on_result, here.i, here.j, store)

    def wait_until_left(self, number: Scalar) -> None:
        i, j = split(remainder(number, self.schedule.tiles_of_block), self.tiles.columns.count)
        outgoing = self.scratch.matmul.outgoing
        self.tiles.wait_result(outgoing, outgoing.slot(number), i, j)

    def _in_direction(self, here: ReduceScatterStep, use: Callable[[int], None]) -> None:
        """Calls `use(direction)` for the direction, a static number, in which a tile travels."""
        for direction in self.ring.both:
            when(here.direction == direction, use, direction)
