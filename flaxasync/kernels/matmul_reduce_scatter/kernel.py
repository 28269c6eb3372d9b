"""reduce_scatter(sum of x_i @ w_i) as one Pallas TPU kernel: a partial sum is sent, tile by tile, as it is finished.

```
x_i  [B, R*m, k_i]   all rows, this device's part of the contraction     (R devices on the axis, B batches)
w_i  [k_i, n]        or [n, k_i] if transposed
y    [B, m, n]       this device's rows of the sum over all devices

hop          0             1             ...   R - 1
core         a b c d       a b c d             a b c d      tiles of a block of rows: others' first, the own one last
link           a b c d       a b c d                        each from vector memory to the neighbour's receive buffer
neighbour                  + a b c d           + a b c d    adds what it received, in float32; sends on or stores
```

A tile that arrives is needed one hop after it was sent, so it has the time of a whole block for its trip. Half of the
tiles of a block go around the ring in each direction: in hop s a device works for the owner that is s + 1 devices
behind it in that direction (`ring.reduced_owner`).

The receiver has two receive buffers for a block, used in turn. A tile is sent only after the receiver has acknowledged
that it read the tile that lies there, which was sent two hops earlier. One count for each direction is enough, since
tiles are sent and read in one order. Every wait is for something that an earlier tile causes, so waits cannot form a
circle.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.call import call
from flaxasync.kernels.engine.grid import remainder, split
from flaxasync.kernels.engine.matmul import MatmulTiles
from flaxasync.kernels.engine.operands import LANES, Tiles, check_operands, check_rows, output
from flaxasync.kernels.engine.refs import Index, Ref, Scalar
from flaxasync.kernels.engine.ring import Acknowledgements, Ring, check_ring
from flaxasync.kernels.engine.slots import IncomingTiles, OutgoingTiles, wait
from flaxasync.kernels.matmul_reduce_scatter.schedule import CALLER, Coordinates, Schedule, plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Scratch memory of the kernel. A tile of rows is [batches, rows]."""

    x: IncomingTiles  # [2, batches, rows, k]
    w: IncomingTiles  # [2, k, n], or [2, n, k] if transposed
    received: IncomingTiles  # [2, batches, rows, n] partial sums of the neighbour, for this tile and the next one
    outgoing: OutgoingTiles  # [outgoing, batches, rows, n] rounded sums
    accumulator: Ref  # [batches, rows, n] VMEM, float32, if a tile of the result takes several steps
    recv_sem: Ref  # [2, tiles of a block] DMA semaphores, one for each place in the receive buffers
    read: Acknowledgements


def matmul_reduce_scatter(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    axis_name: str,
    *,
    transposed: bool = False,
    tiles: Tiles | None = None,
    directions: int = 2,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns y, of x's dtype; see the head of this file. For use inside `jax.shard_map`. Sums travel in that dtype.

    Args:
      xs: each [B, R*m, k_i], float32 or bfloat16, in whole hardware tiles; so is m.
      ws: each [k_i, n], or [n, k_i] if `transposed`.
      axis_name: the mesh axis, of two devices or more.
      transposed: multiply by w.T.
      tiles: the largest tiles of a product. Where no such tiles divide a dimension well, the last ones are partial.
      directions: 1, or 2 to send half of the tiles each way.
      collective_id: the id of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes do not fit each other or hardware tiles, tiles exceed vector memory, or the axis has
        one device.
      NotImplementedError: another dtype, or more tiles than there are semaphores.
    """
    size = check_ring(CALLER, axis_name, directions)
    _check(xs, ws, transposed, axis_name, size)
    (batch, all_rows, _), dtype, pairs = xs[0].shape, xs[0].dtype, len(xs)
    m, n, ks = all_rows // size, ws[0].shape[0 if transposed else 1], [x.shape[2] for x in xs]
    schedule, vmem_bytes = plan(xs, ws, transposed, tiles, size, directions)
    ring, used = Ring(axis_name, size, schedule.directions), schedule.tiles

    def body(*refs: Ref) -> None:
        device = _Device(ring, schedule, refs[:pairs], refs[pairs : 2 * pairs], *refs[2 * pairs :])
        ring.enter(f"{CALLER} {transposed} {pairs}", collective_id)
        device.run()

    result, block_bytes = (*used.rows.shape, used.columns.size), batch * m * n * dtype.itemsize
    scratch = Scratch(
        x=used.x_slots(dtype),
        w=used.w_slots(dtype),
        received=IncomingTiles.allocate(2, result, dtype),
        outgoing=OutgoingTiles.allocate(schedule.outgoing, result, dtype),
        accumulator=pltpu.VMEM(result if schedule.depth > 1 else (1, 8, LANES), jnp.float32),
        recv_sem=pltpu.SemaphoreType.DMA((2, schedule.block)),
        read=Acknowledgements(pltpu.SemaphoreType.REGULAR((ring.directions,))),
    )
    streamed = size * sum(ks) * (used.columns.count * batch * m + used.rows.count * n) * dtype.itemsize
    y, _ = call(
        body,
        [*(x.reshape(batch, size, m, -1) for x in xs), *ws],
        name=CALLER,
        results=[output((batch, m, n), *xs, *ws), output((2, batch, m, n), *xs, *ws)],
        scratch=[scratch],
        collective_id=collective_id,
        vmem_bytes=vmem_bytes,
        flops=2 * batch * all_rows * sum(ks) * n,
        hbm_bytes=streamed + (2 * size - 1) * block_bytes,
        sent=(size - 1) * block_bytes,
    )
    return y


def _check(xs: Sequence[jax.Array], ws: Sequence[jax.Array], transposed: bool, axis_name: str, size: int) -> None:
    form = "[n, k]" if transposed else "[k, n]"
    if not xs or len(xs) != len(ws) or any(x.ndim != 3 for x in xs) or any(w.ndim != 2 for w in ws):
        raise ValueError(
            f"{CALLER} needs pairs of x [B, R*m, k] and w {form}: got {[list(x.shape) for x in xs]} and "
            f"{[list(w.shape) for w in ws]}"
        )
    n, (_, rows, _) = ws[0].shape[0 if transposed else 1], xs[0].shape
    for x, w in zip(xs, ws, strict=True):
        if x.shape[:2] != xs[0].shape[:2] or w.shape != ((n, x.shape[2]) if transposed else (x.shape[2], n)):
            raise ValueError(
                f"{CALLER} sums products x [B, R*m, k] @ w {form} of one shape: got {list(x.shape)} and {list(w.shape)}"
                f" beside {list(xs[0].shape)} and {list(ws[0].shape)}"
            )
    check_operands(CALLER, {"x": xs, "w": ws})
    if n % LANES:
        raise ValueError(f"{CALLER} needs n to be a multiple of {LANES}: got n={n}; pad w")
    check_rows(CALLER, axis_name, size, rows, xs[0].dtype)


@dataclasses.dataclass(frozen=True)
class _Device:
    """What one device does."""

    ring: Ring
    schedule: Schedule
    xs: Sequence[Ref]  # [B, R, m, k_i] HBM
    ws: Sequence[Ref]  # [k_i, n] or [n, k_i] HBM
    y: Ref  # [B, m, n] HBM
    receive_buffers: Ref  # [2, B, m, n] HBM
    scratch: Scratch

    @property
    def tiles(self) -> MatmulTiles:
        return self.schedule.tiles

    def run(self) -> None:
        """Does all steps, once the neighbours have entered."""
        self.prefetch(self.schedule.at(0))
        self.clear_received()
        pl.loop(0, self.schedule.grid.steps)(self.step)
        with jax.named_scope("finish"):
            self.scratch.outgoing.finish(self.schedule.size * self.schedule.block, self.wait_until_left)

    def step(self, step: Scalar) -> None:
        """Starts the transfers of the next step, multiplies, and sends or stores a tile that is finished."""
        schedule, scratch, tiles = self.schedule, self.scratch, self.tiles
        here, following = schedule.at(step), schedule.at(step + 1)
        more, last = step + 1 < schedule.grid.steps, here.t == schedule.depth - 1
        ahead = schedule.block > 1  # or else the neighbour sends the next sum only after it has this step's

        @pl.when(more)
        def _() -> None:
            self.prefetch(following)
            if ahead:
                self.prefetch_received(following)

        with jax.named_scope("wait"):
            pl.when(here.new_x)(lambda: tiles.wait_x(scratch.x, here.x_slot, here.i, here.t))
            tiles.wait_w(scratch.w, here.w_slot, here.t, here.j)
            pl.when(last)(lambda: scratch.outgoing.free(here.number, self.wait_until_left))
            pl.when(last & (here.hop > 0))(lambda: self.wait_for_received(here))
        self.multiply(here)
        pl.when(last)(lambda: self.send(here))
        if not ahead:
            pl.when(more)(lambda: self.prefetch_received(following))

    def prefetch(self, there: Coordinates) -> None:
        """Starts to fetch the tiles of x and w of a step."""
        scratch, owner = self.scratch, self.ring.behind(there.hop + 1, there.direction)

        def source(pair: int, batches: pl.Slice, rows: pl.Slice, depth: pl.Slice) -> Ref:
            return self.xs[pair].at[batches, owner, rows, depth]

        with jax.named_scope("prefetch"):
            pl.when(there.new_x)(lambda: self.tiles.start_x(scratch.x, there.x_slot, there.i, there.t, source))
            self.tiles.start_w(scratch.w, there.w_slot, there.t, there.j, self.ws)

    def multiply(self, here: Coordinates) -> None:
        """Adds the product of two tiles to its sum. A finished sum is rounded into the slot that it leaves from."""
        received, outgoing = self.scratch.received, self.scratch.outgoing
        slot, out_slot = received.slot(here.number), outgoing.slot(here.number)

        def finish(value: jax.Array, index: tuple[Index, ...]) -> None:
            value += received.tiles[slot, *index].astype(jnp.float32)
            outgoing.tiles[out_slot, *index] = value.astype(self.y.dtype)

        x_tile, w_tile = self.scratch.x.tiles.at[here.x_slot], self.scratch.w.tiles.at[here.w_slot]
        self.tiles.multiply(here.i, here.t, here.j, x_tile, w_tile, self.scratch.accumulator, finish)

    def clear_received(self) -> None:
        """Clears the slots of received sums: adding zeros in the first hop saves a second form of the product."""
        received = self.scratch.received.tiles

        @pl.loop(0, 2)
        def _(slot: Scalar) -> None:
            def clear(index: tuple[Index, ...], _: int) -> None:
                part = received.at[slot, *index]
                part[...] = jnp.zeros(part.shape, part.dtype)

            self.tiles.rows.for_each_sub_block(0, clear)

    def prefetch_received(self, there: Coordinates) -> None:
        """Waits until the neighbour's sum has arrived and starts to fetch it, if that step finishes a tile."""
        buffer, received = remainder(there.hop - 1, 2), self.scratch.received

        def fetch(_: int, *tile: pl.Slice) -> None:
            source = self.receive_buffers.at[buffer, *tile]
            wait(source, self.scratch.recv_sem.at[buffer, there.tile])
            received.start(received.slot(there.number), source)

        with jax.named_scope("prefetch_received"):
            finishes = (there.hop > 0) & (there.t == self.schedule.depth - 1)
            pl.when(finishes)(lambda: self.tiles.on_result(there.i, there.j, fetch))

    def wait_for_received(self, here: Coordinates) -> None:
        """Waits until the neighbour's sum is in vector memory, and acknowledges that its receive buffer was read.

        The buffers of the last two hops are not written again, so nobody waits for those acknowledgements.
        """
        received = self.scratch.received
        self.tiles.wait_result(received, received.slot(here.number), here.i, here.j)
        acknowledge = functools.partial(self.scratch.read.send, self.ring)
        pl.when(here.hop < self.schedule.size - 2)(lambda: self._in_direction(here, acknowledge))

    def send(self, here: Coordinates) -> None:
        """Sends a finished tile to the neighbour; stores it if its rows are this device's own."""
        outgoing, buffer = self.scratch.outgoing, remainder(here.hop, 2)
        slot, recv_sem = outgoing.slot(here.number), self.scratch.recv_sem.at[buffer, here.tile]

        def send(direction: int) -> None:
            pl.when(here.hop >= 2)(lambda: self.scratch.read.wait(direction))

            def of_tile(_: int, *tile: pl.Slice) -> None:
                outgoing.send(slot, self.receive_buffers.at[buffer, *tile], recv_sem, self.ring.receiver(direction))

            self.tiles.on_result(here.i, here.j, of_tile)

        with jax.named_scope("send"):
            own = here.hop == self.schedule.size - 1
            pl.when(jnp.logical_not(own))(lambda: self._in_direction(here, send))
            pl.when(own)(
                lambda: self.tiles.on_result(here.i, here.j, lambda _, *tile: outgoing.store(slot, self.y.at[*tile]))
            )

    def wait_until_left(self, number: Scalar) -> None:
        """Waits until a tile of the result, by its number over all blocks, has left its slot."""
        i, j = split(remainder(number, self.schedule.block), self.tiles.columns.count)
        self.tiles.wait_result(self.scratch.outgoing, self.scratch.outgoing.slot(number), i, j)

    def _in_direction(self, here: Coordinates, use: Callable[[int], None]) -> None:
        """Calls `use(direction)` for the direction, a static number, in which a tile travels."""
        for direction in self.ring.both:
            pl.when(here.direction == direction)(functools.partial(use, direction))
