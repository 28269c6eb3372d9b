"""LHS[M_X, K_Y] . RHS[K_X, N] on X x Y devices as one kernel in which every transfer hides behind a
product.

```
x  [m, k]   this mesh row's rows, this mesh column's part of the contraction        m = M/X, k = K/Y
w  [k', n]  the part of the contraction that this mesh *row* holds                  k' = K/X
o  [m, n]   this mesh row's rows of the product, the same in all mesh columns
```

Without `reduce` nothing travels around the mesh row: o is then the part of the product that this
mesh column has.

A device multiplies its rows with the k rows of RHS of its mesh column, which arrive in blocks
(`weights`). Each of the Y devices of a mesh row owns one of Y blocks of its rows. `schedule` has
the order of all steps. Around the mesh row travel partial sums as in a reduce-scatter, and then
results as in an all-gather, tile by tile:

```
phase s      device c multiplies the rows of device c - s - 1, adds the partial sums of them that its neighbour sent in
             phase s - 1, and sends the sums to the next device, c + 1
phase Y - 1  these are the own rows: the device adds, stores the result, and sends it to the next device
next round   a tile of the result that has come over h hops is sent on in phase h - 1, until every device has it

                  round 0                                     round 1
core              rows of c-1   rows of c-2   ...   own rows  rows of c-1   rows of c-2   ...
around the column blocks of w, as long as it takes: those of round 1 while round 0 is multiplied
around the row                  sums          sums  ...       results       results, sent on   ...
```

With two directions, half of the rows of each tile travel the other way: they belong to device c + s
+ 1 instead.

Everything that arrives has its own receive buffer and its own semaphore. So nothing is
acknowledged.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.matmul import MatmulScratch, MatmulTiles
from flaxasync.kernels.engine.operands import (
    HBM,
    LANES,
    Index,
    Ref,
    Scalar,
    Tiles,
    aligned,
    beginning,
    output,
    sublanes,
    when,
)
from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.engine.slots import IncomingTiles, start_copy, start_send, wait
from flaxasync.kernels.engine.tiling import remainder, split
from flaxasync.kernels.engine.vector_memory import vmem_limit
from flaxasync.kernels.gemm import cost
from flaxasync.kernels.mesh_matmul.schedule import MeshSchedule, MeshStep, plan
from flaxasync.kernels.mesh_matmul.weights import WeightBlocks, Weights, WeightScratch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OverlappedScratch:
    """Scratch memory of the kernel. A tile of rows is [directions, rows]."""

    # with an accumulator for each tile of rows; what leaves are partial sums and results
    matmul: MatmulScratch
    weights: WeightScratch
    received: IncomingTiles  # [1, directions, rows, n] partial sums of the neighbour
    recv_sem: Ref  # [hops of sums and results * rounds, tiles of rows] DMA semaphores
    onward_sem: Ref  # DMA semaphore of the results that are sent on


def overlapped(
    x: jax.Array,
    w: jax.Array,
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    reduce: bool = True,
    tiles: Tiles | None = None,
    directions: int | None = None,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns o; see the head of this file, and that of `flaxasync.kernels`. Something has to
    travel.

    `reduce` says whether to sum over the mesh columns. The tiles of rows and of the contraction
    divide their blocks.

    Raises:
      ValueError: the rows or the contraction cannot be divided into blocks.
      NotImplementedError: there are more tiles than semaphores.
    """
    used = plan(x, w, axis_names, reduce, tiles, directions)
    schedule = used.schedule
    ring = used.row
    tiling = used.tiles
    block_rows = used.tiles.contraction.size
    blocks = WeightBlocks(
        used.column, axis_names[1], block_rows, schedule.depth, w.shape[0] // block_rows
    )
    m, k = x.shape
    n = w.shape[1]
    phases = ring.size
    both = ring.directions
    size = x.dtype.itemsize
    half_block = m // phases // both
    # no buffer can be empty
    unused = (sublanes(x.dtype), LANES)
    of_w = unused
    of_sums: tuple[int, ...] = unused
    w_sems = (1, 1)
    sums_sems = (1, 1)
    sums_tile: tuple[int, ...] = (1, *unused)
    travels = blocks.ring.size > 1
    if travels:
        of_w = (k, n)
        w_sems = (schedule.chunks, blocks.needed)
    if phases > 1:
        of_sums = (phases - 1, both, half_block, n)
        sums_sems = (2 * (phases - 1) * schedule.rounds, schedule.rows)
        sums_tile = tiling.result
    dma = pltpu.SemaphoreType.DMA
    scratch: Ref = OverlappedScratch(
        matmul=tiling.scratch(x.dtype, w.dtype, outgoing=used.outgoing, accumulators=schedule.rows),
        weights=WeightScratch(*blocks.tables(), dma, dma(w_sems)),
        received=IncomingTiles.allocate(1, sums_tile, x.dtype),
        recv_sem=dma(sums_sems),
        onward_sem=dma,
    )

    def body(
        x_ref: Ref,
        w_ref: Ref,
        o_ref: Ref,
        w_received: Ref,
        sums_received: Ref,
        scratch: OverlappedScratch,
    ) -> None:
        weights = Weights(
            schedule, blocks, tiling.columns, w_ref, w_received, scratch.matmul.w, scratch.weights
        )
        device = _Device(schedule, ring, tiling, weights, x_ref, o_ref, sums_received, scratch)
        device.run(f"{used.caller} {both}", collective_id)

    shapes = ((phases, both, half_block, n), of_w, of_sums)
    invarying = axis_names[1:] if reduce else ()
    matmul = cost(Tiles(tiling.rows.size, block_rows, tiling.columns.size), m, k, n, size)
    sent = (k * n * travels + 2 * (m - m // phases) * n) * size
    o, *_ = pl.pallas_call(
        body,
        out_shape=[output(shape, x, invarying=invarying) for shape in shapes],
        in_specs=[HBM] * 2,
        out_specs=[HBM] * len(shapes),
        scratch_shapes=[scratch],
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id,
            vmem_limit_bytes=vmem_limit(used.vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=matmul.flops,
            transcendentals=0,
            bytes_accessed=matmul.bytes_accessed + sent,
            remote_bytes_transferred=sent,
        ),
        name=f"{used.caller}_mesh_matmul",
    )(x.reshape(phases, both, half_block, k), w)
    return o.reshape(m, n)


@dataclasses.dataclass(frozen=True)
class _Device:
    schedule: MeshSchedule
    ring: Ring  # the mesh row
    tiles: MatmulTiles
    weights: Weights
    x: Ref  # [Y, directions, half-block, k] HBM
    o: Ref  # [Y, directions, half-block, n] HBM
    # [Y - 1, directions, half-block, n] HBM: partial sums of the neighbour, phase by phase
    sums_received: Ref
    scratch: OverlappedScratch

    def run(self, tag: str, collective_id: int | None) -> None:
        """Does all steps; `tag` is that of the entry barrier."""
        senders = []
        if self.ring.size > 1:
            senders = [self.ring.sender(direction) for direction in self.ring.both]
        self.weights.blocks.enter(tag, collective_id, senders)
        self.weights.begin()
        self.prefetch(self.schedule.at(0), 0)
        pl.loop(0, self.schedule.grid.steps)(self.step)
        with jax.named_scope("finish"):
            self.finish()
            self.weights.finish()

    def step(self, step: Scalar) -> None:
        """Starts the transfers of the next step, multiplies, and sends a tile that is finished."""
        schedule = self.schedule
        scratch = self.scratch.matmul
        here = schedule.at(step)
        slot = remainder(step, 2)
        last = here.t == schedule.depth - 1

        @pl.when(step + 1 < schedule.grid.steps)
        def _() -> None:
            self.prefetch(schedule.at(step + 1), 1 - slot)

        self.weights.send(here)
        if self.ring.size > 2:  # what has arrived of the results of the round before is sent on
            i, t = split(here.position, schedule.depth)
            due = (here.round > 0) & (here.phase < self.ring.size - 2) & (t == schedule.depth - 1)

            @pl.when(due)
            def _() -> None:
                self._send_result_on(here.round - 1, here.phase + 1, i)

        if self.ring.size > 1:
            when(last & (here.phase > 0), self.fetch_received, here)
        with jax.named_scope("wait"):
            scratch.x.wait(slot, *scratch.x.tiles.shape[1:])
            self.weights.wait(here)
            when(last, scratch.outgoing.free, here.number, self.wait_until_left)
        self.multiply(here, slot)

        @pl.when(last)
        def _() -> None:
            if self.ring.size > 1:
                self.round(here)
            self.send(here)

    def prefetch(self, there: MeshStep, slot: Scalar) -> None:
        x = self.scratch.matmul.x
        columns = self.weights.blocks.needed_rows(self.weights.block(there))
        with jax.named_scope("prefetch"):
            for direction in self.ring.both:
                half_block = self.x.at[self.ring.behind(there.phase + 1, direction), direction]
                tile = half_block.at[self._rows(there.panel, there.i), columns]
                start_copy(tile, x.tiles.at[slot, direction], x.sems.at[slot])
            self.weights.prefetch(there)

    def fetch_received(self, here: MeshStep) -> None:
        """Waits until the neighbour's partial sums of a tile have arrived, and starts to fetch
        them.

        Waiting one step earlier, so that the last product could add them, would cost more than
        `round` does.
        """

        def fetch(_: int, columns: pl.Slice) -> None:
            rows = self._rows(here.panel, here.i)
            self.scratch.received.start(0, self.sums_received.at[here.phase - 1, :, rows, columns])

        with jax.named_scope("fetch_received"):
            self._wait_for_arrival(here.phase - 1, here.round, here.i)
            self.tiles.columns.on_slice(here.chunk, fetch)

    def multiply(self, here: MeshStep, slot: Scalar) -> None:
        """Adds the product of two tiles to its sum. With one mesh column, a finished sum is rounded
        at once.
        """
        scratch = self.scratch.matmul
        accumulator = self.scratch.matmul.accumulators.at[here.accumulator]

        def finish(value: jax.Array, index: tuple[Index, ...]) -> None:
            if self.ring.size > 1:
                accumulator[index] = value
            else:
                scratch.outgoing.put(scratch.outgoing.slot(here.number), value, index)

        x_tile = scratch.x.tiles.at[slot]
        w_tile = scratch.w.tiles.at[here.w_slot]
        self.tiles.multiply(0, here.t, here.chunk, x_tile, w_tile, accumulator, finish)

    def round(self, here: MeshStep) -> None:
        """Rounds a finished sum, with the neighbour's partial sums, into the slot that it leaves
        from.
        """
        received = self.scratch.received
        outgoing = self.scratch.matmul.outgoing
        slot = outgoing.slot(here.number)
        accumulator = self.scratch.matmul.accumulators.at[here.accumulator]

        def store(value: jax.Array) -> None:
            outgoing.tiles[slot] = value.astype(outgoing.tiles.dtype)

        @pl.when(here.phase == 0)
        def _() -> None:
            store(accumulator[...])

        @pl.when(here.phase > 0)
        def _() -> None:
            wait_for = functools.partial(received.wait, 0, *self.tiles.rows.shape)
            self.tiles.columns.on_size(here.chunk, wait_for)
            store(accumulator[...] + received.tiles[0].astype(jnp.float32))

    def send(self, here: MeshStep) -> None:
        """Sends a finished tile to the next device. Stores it, too, if its rows are the own
        ones.
        """
        outgoing = self.scratch.matmul.outgoing
        ring = self.ring
        slot = outgoing.slot(here.number)
        recv_sem = self._recv_sem(here.phase, here.round, here.i)

        def send(own: bool, _: int, columns: pl.Slice) -> None:
            for direction in ring.both:
                tile = outgoing.tiles.at[slot, direction, :, *beginning(int(columns.size))]
                if own:
                    block = self.o.at[ring.index]
                else:
                    block = self.sums_received.at[here.phase]
                target = block.at[direction, self._rows(here.panel, here.i), columns]
                if own:
                    start_copy(tile, target, outgoing.sems.at[slot])
                if ring.size > 1:
                    start_send(
                        tile, target, outgoing.sems.at[slot], recv_sem, ring.receiver(direction)
                    )

        with jax.named_scope("send"):
            own = here.phase == ring.size - 1
            columns = self.tiles.columns
            when(own, columns.on_slice, here.chunk, functools.partial(send, True))
            if ring.size > 1:
                others = functools.partial(send, False)
                when(jnp.logical_not(own), columns.on_slice, here.chunk, others)

    def wait_until_left(self, number: Scalar) -> None:
        chunk, _, phase, _ = self.schedule.results.coordinates(number)
        outgoing = self.scratch.matmul.outgoing

        def wait_for(n: int) -> None:
            left = functools.partial(
                outgoing.wait, outgoing.slot(number), *self.tiles.rows.shape, n
            )
            left()
            if self.ring.size > 1:  # results are both stored and sent
                when(phase == self.ring.size - 1, left)

        self.tiles.columns.on_size(chunk, wait_for)

    def finish(self) -> None:
        """Sends on the last results, and waits until everything has left and arrived."""
        schedule = self.schedule
        size = self.ring.size
        self.scratch.matmul.outgoing.finish(schedule.results.steps, self.wait_until_left)
        for hops in range(1, size - 1):
            pl.loop(0, schedule.rows)(
                functools.partial(self._send_result_on, schedule.rounds - 1, hops)
            )
        if size > 1:
            all_results = schedule.rounds * schedule.rows

            @pl.loop(0, all_results)
            def wait_for_result(tile: Scalar) -> None:
                self._wait_for_arrival(2 * size - 3, *split(tile, schedule.rows))

        for _ in range(1, size - 1):
            wait(self.o.at[0], self.scratch.onward_sem)  # one block was sent on after the other

    def _send_result_on(self, round_: Scalar, hops: Scalar, i: Scalar) -> None:
        """Waits for a tile of the result that comes over a number of hops, and sends it to the next
        device.
        """
        chunk, panel = split(round_, self.schedule.panels)
        hop = self.ring.size - 2 + hops

        def send(_: int, columns: pl.Slice) -> None:
            for direction in self.ring.both:
                half_block = self.o.at[self.ring.behind(hops, direction), direction]
                tile = half_block.at[self._rows(panel, i), columns]
                recv_sem = self._recv_sem(hop + 1, round_, i)
                start_send(
                    tile, tile, self.scratch.onward_sem, recv_sem, self.ring.receiver(direction)
                )

        with jax.named_scope("send_on"):
            self._wait_for_arrival(hop, round_, i)
            self.tiles.columns.on_slice(chunk, send)

    def _wait_for_arrival(self, hop: Scalar, round_: Scalar, i: Scalar) -> None:
        """Waits for a tile that arrives; see `_recv_sem`. The wait depends on the size of the tile,
        not on its rows.
        """
        recv_sem = self._recv_sem(hop, round_, i)
        rows = self.tiles.rows.rows.size
        chunk, _ = split(round_, self.schedule.panels)

        def wait_for(n: int) -> None:
            wait(self.o.at[0, :, *beginning(rows, n)], recv_sem)

        self.tiles.columns.on_size(chunk, wait_for)

    def _recv_sem(self, hop: Scalar, round_: Scalar, i: Scalar) -> Ref:
        """Returns the semaphore of a tile that arrives: partial sums in hops 0 .. Y-2, results in
        hops Y-1 .. 2Y-3.
        """
        return self.scratch.recv_sem.at[hop * self.schedule.rounds + round_, i]

    def _rows(self, panel: Scalar, i: Scalar) -> pl.Slice:
        side = self.tiles.rows.rows.size
        return aligned(jnp.int32((panel * self.schedule.rows + i) * side), side, side)
