"""What one device does in `matmul_reduce_scatter`, product by product of its walk.

Tiles lie at the beginning of their buffers. Beyond a narrow tile a buffer holds what was there: rows and columns of it
reach only such rows and columns of the product, which go nowhere, and of the contraction it is not multiplied.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.cut import inside
from flaxasync.kernels.reduce_walk import Place, ReduceWalk
from flaxasync.kernels.row_tiles import landed
from flaxasync.kernels.tiles import split
from flaxasync.mesh import device_at


class Body:
    """What one device does, product by product: the names that all of its parts need."""

    def __init__(self, axis_name: str, walk: ReduceWalk, transposed: bool, *refs: Any) -> None:
        self.axis_name, self.walk, self.transposed = axis_name, walk, transposed
        self.xs, self.ws, self.y, self.places, self.scratch = refs
        self.index = lax.axis_index(axis_name)
        self.shifts = (1, -1)[: walk.ways]
        self.ahead = walk.tiles > 1  # a neighbour sends the next tile's sum before it needs this one's

    def product(self, p: Any) -> None:
        """Fetches for the next product, multiplies, and lets go what is finished."""
        here, walk = self.walk.at(p), self.walk
        following = walk.at(p + 1)
        more, last = p + 1 < walk.products, here.t == walk.depth - 1

        @pl.when(more)
        def _() -> None:
            self.fetch(following)
            if self.ahead:
                self.fetch_sum(following)

        with jax.named_scope("wait"):
            walk.contraction.sized(here.t, functools.partial(self.wait, here))
            pl.when(last)(lambda: self.make_room(here))
            pl.when(last & (here.step > 0))(lambda: self.take_sum(here))
        self.multiply(here)
        pl.when(last)(lambda: self.let_go(here))
        if not self.ahead:
            pl.when(more)(lambda: self.fetch_sum(following))

    def wait(self, here: Place, k: int) -> None:
        """Until the tiles of x and w have landed; k of the contraction."""
        x, w = self.scratch.x.at[here.x_slot], self.scratch.w.at[here.w_slot]
        x_sem, w_sem = self.scratch.x_sem.at[here.x_slot], self.scratch.w_sem.at[here.w_slot]
        depth = pl.ds(0, k)

        def wait_x(batches: Any, rows: Any) -> None:
            landed(x.at[inside(batches), inside(rows), depth], x_sem)

        def wait_w(_: int, columns: Any) -> None:
            landed(w.at[inside(columns), depth] if self.transposed else w.at[depth, inside(columns)], w_sem)

        pl.when(here.x_new)(lambda: self.walk.rows.at(here.i, wait_x))
        self.walk.columns.at(here.j, wait_w)

    def multiply(self, here: Place) -> None:
        with jax.named_scope("multiply"):
            self.walk.columns.sized(here.j, functools.partial(self.multiply_columns, here))

    def multiply_columns(self, here: Place, n: int) -> None:
        """The product of a tile of so many columns."""
        scratch, depth = self.scratch, self.walk.depth
        _, room = split(here.number, self.walk.leaving)
        _, slot = split(here.number, 2)

        def part(index: Any, rows: int, k: int) -> jax.Array:
            x = scratch.x[(here.x_slot, *index, slice(0, k))].reshape(rows, k)
            w = scratch.w[here.w_slot, :n, :k] if self.transposed else scratch.w[here.w_slot, :k, :n]
            contracting = ((1,), (1 if self.transposed else 0,))
            product = lax.dot_general(x, w, (contracting, ((), ())), preferred_element_type=jnp.float32)
            return product.reshape(-1, rows if self.walk.rows.batches == 1 else self.walk.rows.rows, n)

        def store(k: int, index: Any, rows: int) -> None:
            scratch.total[(*index, slice(0, n))] = part(index, rows, k)

        def add(k: int, index: Any, rows: int) -> None:
            scratch.total[(*index, slice(0, n))] += part(index, rows, k)

        def end(k: int, index: Any, rows: int) -> None:
            total, index = part(index, rows, k), (*index, slice(0, n))
            if depth > 1:
                total += scratch.total[index]
            total += scratch.came[(slot, *index)].astype(jnp.float32)
            scratch.leaving[(room, *index)] = total.astype(scratch.leaving.dtype)

        def each(use: Callable, k: int) -> None:
            self.walk.rows.each_part(functools.partial(use, k), here.i)

        ks, last = self.walk.contraction.widths, here.t == depth - 1
        if depth > 1:
            pl.when(here.t == 0)(lambda: each(store, ks[0]))
        if depth > 2:
            middle = (here.t > 0) & jnp.logical_not(last)
            self.walk.contraction.sized(here.t, functools.partial(each, add), range(1, depth - 1), middle)
        pl.when(last)(lambda: each(end, ks[-1]))

    def fetch(self, place: Place) -> None:
        """Starts the copies of a product's tiles."""
        x_tile, w_tile = self.scratch.x.at[place.x_slot], self.scratch.w.at[place.w_slot]
        x_sem, w_sem = self.scratch.x_sem.at[place.x_slot], self.scratch.w_sem.at[place.w_slot]

        def copy(pair: int, depth: Any) -> None:
            def copy_x(batches: Any, rows: Any) -> None:
                source = self.xs[pair].at[batches, self._owner(place), rows, depth]
                pltpu.make_async_copy(source, x_tile.at[*map(inside, (batches, rows, depth))], x_sem).start()

            def copy_w(_: int, columns: Any) -> None:
                sides = (columns, depth) if self.transposed else (depth, columns)
                pltpu.make_async_copy(self.ws[pair].at[*sides], w_tile.at[*map(inside, sides)], w_sem).start()

            pl.when(place.x_new)(lambda: self.walk.rows.at(place.i, copy_x))
            self.walk.columns.at(place.j, copy_w)

        with jax.named_scope("fetch"):
            self.walk.contraction.at(place.t, copy)

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

        def fetch(tile: Any, *part: Any) -> None:
            self._send(place, place.step - 1, self.shifts[0], part).wait_recv()
            _, slot = split(place.number, 2)
            source = self._place(place.step - 1, part)
            pltpu.make_async_copy(source, self.scratch.came.at[slot, *tile], self.scratch.came_sem.at[slot]).start()

        with jax.named_scope("fetch_sum"):
            pl.when((place.step > 0) & (place.t == self.walk.depth - 1))(lambda: self._on_tile(place.i, place.j, fetch))

    def take_sum(self, here: Place) -> None:
        """Waits for the sum that came to be in vector memory; its place in HBM is free then."""
        _, slot = split(here.number, 2)
        came, sem = self.scratch.came, self.scratch.came_sem.at[slot]
        self._on_tile(here.i, here.j, lambda tile, *_: landed(came.at[slot, *tile], sem))
        pl.when(here.step < self.walk.size - 2)(lambda: self.each_way(here, self.say_read))

    def say_read(self, way: int, shift: int) -> None:
        """To the sender: a tile was read, whose place it will write again two steps after."""
        pl.semaphore_signal(self.scratch.read_sem.at[way], device_id=device_at(self.axis_name, -shift))

    def wait_read(self, way: int) -> None:
        """Until the receiver has read the tile in the place that is to be written again."""
        pl.semaphore_wait(self.scratch.read_sem.at[way])

    def make_room(self, here: Place) -> None:
        """Waits until the tile has left that lay where the next one is to be rounded into."""
        _, room = split(here.number, self.walk.leaving)
        before = here.number - self.walk.leaving
        pl.when(here.number >= self.walk.leaving)(lambda: self.wait_left(before, room))

    def wait_left(self, number: Any, room: Any) -> None:
        """Until a tile has left its room."""
        leaving, sem = self.scratch.leaving, self.scratch.leave_sem.at[room]
        self._on_tile(*self.walk.tile_at(number), lambda tile, *_: landed(leaving.at[room, *tile], sem))

    def let_go(self, here: Place) -> None:
        """Sends a finished tile to the neighbour whose turn is next; stores it, where it is this device's own."""
        _, room = split(here.number, self.walk.leaving)

        def send(way: int, shift: int) -> None:
            pl.when(here.step >= 2)(lambda: self.wait_read(way))
            self._on_tile(here.i, here.j, lambda _, *part: self._send(here, here.step, shift, part).start())

        def store(tile: Any, *part: Any) -> None:
            source, sem = self.scratch.leaving.at[room, *tile], self.scratch.leave_sem.at[room]
            pltpu.make_async_copy(source, self.y.at[*part], sem).start()

        with jax.named_scope("let_go"):
            pl.when(here.step < self.walk.size - 1)(lambda: self.each_way(here, send))
            pl.when(here.step == self.walk.size - 1)(lambda: self._on_tile(here.i, here.j, store))

    def each_way(self, here: Place, use: Callable[[int, int], None]) -> None:
        """Calls `use(way, shift)` for the way that a tile travels."""
        for way, shift in enumerate(self.shifts):
            pl.when(here.way == way)(functools.partial(use, way, shift))

    def finish(self) -> None:
        """Waits for all that is still leaving."""
        rooms, numbers = self.walk.leaving, self.walk.size * self.walk.tiles
        with jax.named_scope("finish"):
            for number in range(max(0, numbers - rooms), numbers):
                self.wait_left(jnp.int32(number), number % rooms)

    def _owner(self, place: Place) -> Any:
        """Whose rows: (index - shift * (step + 1)) modulo the ring's size."""
        size = self.walk.size
        back = lax.rem(self.index + size - (place.step + 1), size)
        return (
            back if self.walk.ways == 1 else jnp.where(place.way == 0, back, lax.rem(self.index + place.step + 1, size))
        )

    def _on_tile(self, i: Any, j: Any, use: Callable[..., None]) -> None:
        """Calls use(where a tile of the result lies in a buffer for one, its batches, its rows, its columns)."""

        def of_rows(batches: Any, rows: Any) -> None:
            def of_columns(_: int, columns: Any) -> None:
                use((inside(batches), inside(rows), inside(columns)), batches, rows, columns)

            self.walk.columns.at(j, of_columns)

        self.walk.rows.at(i, of_rows)

    def _place(self, step: Any, part: tuple[Any, Any, Any]) -> Any:
        """Where the sum of a tile arrives that was sent in a step."""
        return self.places.at[split(step, 2)[1], *part]

    def _send(self, place: Place, step: Any, shift: int, part: tuple[Any, Any, Any]) -> Any:
        _, room = split(place.number, self.walk.leaving)
        return pltpu.make_async_remote_copy(
            self.scratch.leaving.at[room, *map(inside, part)],
            self._place(step, part),
            self.scratch.leave_sem.at[room],
            self.scratch.recv_sem.at[split(step, 2)[1], place.tile],
            device_id=device_at(self.axis_name, shift),
        )
