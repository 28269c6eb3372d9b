"""reduce_scatter(sum of x_i @ w_i) as one Pallas TPU kernel: each sum leaves, tile by tile, as soon as it is finished.

```
x_i  [B, R*m, k_i]   all rows, this device's part of the contraction     (R devices on the axis, B batches)
w_i  [k_i, n]        or [n, k_i], where transposed
y    [B, m, n]       this device's rows of the sum over all devices

step         0             1             ...   R - 1
core         a b c d       a b c d             a b c d      tiles of a block of rows: others' first, the own one last
link           a b c d       a b c d                        from vector memory into the neighbour's place for that tile
neighbour                  + a b c d           + a b c d    adds what came, in float32, rounds, sends on or keeps
```

A tile that came is needed one step after it was sent: it has all of a step for its trip. Half of the tiles of a block
run around the ring one way and half the other way, each for the owner whose turn it is that way (`ring.reduced_owner`).
The products are one flat walk (`reduce_walk`) in which tiles are fetched one product ahead, over all borders.

A neighbour's places are two sets, used in turn. A place is written again only when the neighbour has said that it has
read it: one count each way, since tiles are sent and read in one order. All waits are for what an earlier tile left
behind, so no circle of waits can close.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.neighbours import HBM, check_ring, enter
from flaxasync.kernels.reduce_walk import Place, ReduceWalk, Scratch, check_reduce, plan_reduce
from flaxasync.kernels.row_tiles import landed
from flaxasync.kernels.tiles import LANES, Tiles, split, vmem_limit
from flaxasync.transport.devices import at


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
    """Returns y, of x's dtype; see the file. Inside `jax.shard_map`. Sums travel in that dtype.

    Args:
      xs: each [B, R*m, k_i], float32 or bfloat16, in whole hardware tiles; so is m.
      ws: each [k_i, n]; or [n, k_i], where `transposed`.
      axis_name: the mesh axis, of two devices or more.
      transposed: the products are x @ w.T.
      tiles: of a product, at most; those used divide m (or hold whole batches), every k_i, and n.
      directions: 1, or 2 to send half of the tiles each way.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes that do not fit each other or hardware tiles; tiles that exceed vector memory; an axis of size
        one.
      NotImplementedError: another dtype; more tiles than there are semaphores.
    """
    caller = "matmul_reduce_scatter"
    size = check_ring(caller, axis_name, directions)
    check_reduce(caller, xs, ws, transposed, size)
    (batch, all_rows, _), dtype = xs[0].shape, xs[0].dtype
    m, n = all_rows // size, ws[0].shape[0 if transposed else 1]
    ks = [x.shape[2] for x in xs]
    walk, side_k, side_n, need = plan_reduce(caller, batch, m, ks, n, tiles, size, directions, dtype)
    kind = jax.typeof(xs[0]).mat
    kind = kind.update(varying=kind.varying.union(*(jax.typeof(v).mat.varying for v in (*xs, *ws))))
    moved = batch * m * n * dtype.itemsize
    streamed = walk.products * (walk.rows.size + side_n) * side_k * dtype.itemsize
    kernel = functools.partial(_kernel, axis_name, walk, ks, side_k, side_n, transposed, collective_id)
    return pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, m, n), dtype, manual_axis_type=kind),
            jax.ShapeDtypeStruct((2, batch, m, n), dtype, manual_axis_type=kind),
        ],
        in_specs=[HBM] * (2 * len(xs)),
        out_specs=[HBM, HBM],
        scratch_shapes=[Scratch.shapes(walk, side_k, side_n, transposed, dtype)],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=vmem_limit(need)),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * all_rows * sum(ks) * n,
            transcendentals=0,
            bytes_accessed=streamed + moved + 2 * (size - 1) * moved,
            remote_bytes_transferred=(size - 1) * moved,
        ),
        name=caller,
    )(*(x.reshape(batch, size, m, -1) for x in xs), *ws)[0]


def _kernel(
    axis_name: str,
    walk: ReduceWalk,
    ks: list[int],
    side_k: int,
    side_n: int,
    transposed: bool,
    collective_id: int | None,
    *refs: Any,  # xs [B, R, m, k_i] HBM; ws [k_i, n] or [n, k_i] HBM; y [B, m, n] HBM; places [2, B, m, n] HBM; scratch
) -> None:
    count = len(ks)
    body = _Body(axis_name, walk, ks, side_k, side_n, transposed, refs[:count], refs[count : 2 * count], *refs[-3:])
    tag = f"matmul_reduce_scatter {axis_name} {walk.ways} {transposed} {count}"
    enter(tag, [at(axis_name, -shift) for shift in body.shifts], collective_id)
    body.fetch(walk.at(0))
    body.clear_sums()
    pl.loop(0, walk.products)(body.product)
    body.finish()


class _Body:
    """What one device does, product by product: the names that all of its parts need."""

    def __init__(
        self, axis_name: str, walk: ReduceWalk, ks: list[int], side_k: int, side_n: int, transposed: bool, *refs: Any
    ) -> None:
        self.axis_name, self.walk, self.ks, self.side_k, self.side_n = axis_name, walk, ks, side_k, side_n
        self.transposed, (self.xs, self.ws, self.y, self.places, self.scratch) = transposed, refs
        self.index = lax.axis_index(axis_name)
        self.shifts = (1, -1)[: walk.ways]
        self.ahead = walk.tiles > 1  # a neighbour sends the next tile's sum before it needs this one's

    def product(self, p: Any) -> None:
        """Fetches for the next product, multiplies, and lets go what is finished."""
        here, walk, scratch = self.walk.at(p), self.walk, self.scratch
        following = walk.at(p + 1)
        more, last = p + 1 < walk.products, here.t == walk.depth - 1

        @pl.when(more)
        def _() -> None:
            self.fetch(following)
            if self.ahead:
                self.fetch_sum(following)

        with jax.named_scope("wait"):
            pl.when(here.x_new)(lambda: landed(scratch.x.at[here.x_slot], scratch.x_sem.at[here.x_slot]))
            landed(scratch.w.at[here.w_slot], scratch.w_sem.at[here.w_slot])
            pl.when(last)(lambda: self.make_room(here))
            pl.when(last & (here.step > 0))(lambda: self.take_sum(here))
        self.multiply(here)
        pl.when(last)(lambda: self.let_go(here))
        if not self.ahead:
            pl.when(more)(lambda: self.fetch_sum(following))

    def multiply(self, here: Place) -> None:
        scratch, depth = self.scratch, self.walk.depth
        _, room = split(here.number, self.walk.leaving)
        _, slot = split(here.number, 2)

        def part(index: Any, rows: int) -> jax.Array:
            x = scratch.x[(here.x_slot, *index)].reshape(rows, self.side_k)
            w = scratch.w[here.w_slot]
            contracting = ((1,), (1 if self.transposed else 0,))
            product = lax.dot_general(x, w, (contracting, ((), ())), preferred_element_type=jnp.float32)
            return product.reshape(-1, rows if self.walk.rows.batches == 1 else self.walk.rows.rows, self.side_n)

        def store(index: Any, rows: int) -> None:
            scratch.total[index] = part(index, rows)

        def add(index: Any, rows: int) -> None:
            scratch.total[index] += part(index, rows)

        def end(index: Any, rows: int) -> None:
            total = part(index, rows)
            if depth > 1:
                total += scratch.total[index]
            total += scratch.came[(slot, *index)].astype(jnp.float32)
            scratch.leaving[(room, *index)] = total.astype(scratch.leaving.dtype)

        each, last = self.walk.rows.each_part, here.t == depth - 1
        with jax.named_scope("multiply"):
            if depth > 1:
                pl.when(here.t == 0)(lambda: each(store))
            if depth > 2:
                pl.when((here.t > 0) & jnp.logical_not(last))(lambda: each(add))
            pl.when(last)(lambda: each(end))

    def fetch(self, place: Place) -> None:
        """Starts the copies of a product's tiles."""
        scratch, first = self.scratch, 0
        columns = self._columns(place)
        with jax.named_scope("fetch"):
            for x, w, k in zip(self.xs, self.ws, self.ks, strict=True):

                def copy(x: Any = x, w: Any = w, first: int = first) -> None:
                    depth = pl.ds(pl.multiple_of((place.t - first) * self.side_k, LANES), self.side_k)
                    batches, rows = self.walk.rows.at(place.i)
                    x_tile, w_tile = scratch.x.at[place.x_slot], scratch.w.at[place.w_slot]
                    source = x.at[batches, self._owner(place), rows, depth]
                    pl.when(place.x_new)(
                        lambda: pltpu.make_async_copy(source, x_tile, scratch.x_sem.at[place.x_slot]).start()
                    )
                    source_w = w.at[columns, depth] if self.transposed else w.at[depth, columns]
                    pltpu.make_async_copy(source_w, w_tile, scratch.w_sem.at[place.w_slot]).start()

                tiles = k // self.side_k
                if len(self.ks) == 1:
                    copy()
                else:
                    pl.when((place.t >= first) & (place.t < first + tiles))(copy)
                first += tiles

    def clear_sums(self) -> None:
        """Nothing has come in the first step. To add zeros takes no second form of the product in the code."""
        came = self.scratch.came

        @pl.loop(0, 2)
        def _(slot: Any) -> None:
            def clear(index: Any, _: int) -> None:
                part = came.at[(slot, *index)]
                part[...] = jnp.zeros(part.shape, part.dtype)

            self.walk.rows.each_part(clear)

    def fetch_sum(self, place: Place) -> None:
        """Once the neighbour's sum of a tile has come: starts its copy, where the next product finishes that tile."""
        with jax.named_scope("fetch_sum"):

            @pl.when((place.step > 0) & (place.t == self.walk.depth - 1))
            def _() -> None:
                self._send(place, place.step - 1, self.shifts[0]).wait_recv()
                _, slot = split(place.number, 2)
                source = self._place(place, place.step - 1)
                pltpu.make_async_copy(source, self.scratch.came.at[slot], self.scratch.came_sem.at[slot]).start()

    def take_sum(self, here: Place) -> None:
        """Waits for the sum that came to be in vector memory; its place in HBM is free then."""
        _, slot = split(here.number, 2)
        landed(self.scratch.came.at[slot], self.scratch.came_sem.at[slot])
        pl.when(here.step < self.walk.size - 2)(lambda: self.each_way(here, self.say_read))

    def say_read(self, way: int, shift: int) -> None:
        """To the sender: a tile was read, whose place it will write again two steps after."""
        pl.semaphore_signal(self.scratch.read_sem.at[way], device_id=at(self.axis_name, -shift))

    def wait_read(self, way: int) -> None:
        """Until the receiver has read the tile in the place that is to be written again."""
        pl.semaphore_wait(self.scratch.read_sem.at[way])

    def make_room(self, here: Place) -> None:
        """Waits until the tile has left that lay where the next one is to be rounded into."""
        _, room = split(here.number, self.walk.leaving)
        pl.when(here.number >= self.walk.leaving)(
            lambda: landed(self.scratch.leaving.at[room], self.scratch.leave_sem.at[room])
        )

    def let_go(self, here: Place) -> None:
        """Sends a finished tile to the neighbour whose turn is next; stores it, where it is this device's own."""
        _, room = split(here.number, self.walk.leaving)

        def send(way: int, shift: int) -> None:
            pl.when(here.step >= 2)(lambda: self.wait_read(way))
            self._send(here, here.step, shift).start()

        with jax.named_scope("let_go"):
            pl.when(here.step < self.walk.size - 1)(lambda: self.each_way(here, send))

            @pl.when(here.step == self.walk.size - 1)
            def _() -> None:
                batches, rows = self.walk.rows.at(here.i)
                place = self.y.at[batches, rows, self._columns(here)]
                pltpu.make_async_copy(self.scratch.leaving.at[room], place, self.scratch.leave_sem.at[room]).start()

    def each_way(self, here: Place, use: Callable[[int, int], None]) -> None:
        """Calls `use(way, shift)` for the way that a tile travels."""
        for way, shift in enumerate(self.shifts):
            pl.when(here.way == way)(functools.partial(use, way, shift))

    def finish(self) -> None:
        """Waits for all that is still leaving."""
        with jax.named_scope("finish"):
            for room in range(min(self.walk.leaving, self.walk.size * self.walk.tiles)):
                landed(self.scratch.leaving.at[room], self.scratch.leave_sem.at[room])

    def _owner(self, place: Place) -> Any:
        """Whose rows: (index - shift * (step + 1)) modulo the ring's size."""
        size = self.walk.size
        back = lax.rem(self.index + size - (place.step + 1), size)
        return (
            back if self.walk.ways == 1 else jnp.where(place.way == 0, back, lax.rem(self.index + place.step + 1, size))
        )

    def _columns(self, place: Place) -> Any:
        return pl.ds(pl.multiple_of(place.j * self.side_n, LANES), self.side_n)

    def _place(self, place: Place, step: Any) -> Any:
        """Where the sum of a tile arrives that was sent in a step."""
        batches, rows = self.walk.rows.at(place.i)
        return self.places.at[split(step, 2)[1], batches, rows, self._columns(place)]

    def _send(self, place: Place, step: Any, shift: int) -> Any:
        _, room = split(place.number, self.walk.leaving)
        return pltpu.make_async_remote_copy(
            self.scratch.leaving.at[room],
            self._place(place, step),
            self.scratch.leave_sem.at[room],
            self.scratch.recv_sem.at[split(step, 2)[1], place.tile],
            device_id=at(self.axis_name, shift),
        )
