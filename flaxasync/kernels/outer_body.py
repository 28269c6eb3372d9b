"""What one device does in `gather_outer`, product by product of its walk.

Tiles lie at the beginning of their buffers. Beyond a narrow tile a buffer holds what was there: columns of x and of dy
reach only such rows and columns of the product, which go nowhere; rows are contracted, and those are not multiplied.
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
from flaxasync.kernels.outer_walk import ROOMS, SETS, OuterPlace, OuterWalk
from flaxasync.kernels.row_tiles import landed, parts_of
from flaxasync.kernels.tiles import LANES, split
from flaxasync.mesh import device_at


class Body:
    """What one device does, product by product: the names that all of its parts need."""

    def __init__(self, axis_name: str, walk: OuterWalk, *refs: Any) -> None:
        self.axis_name, self.walk, (self.x, self.dys, self.dws, self.places, self.scratch) = axis_name, walk, refs
        self.index = lax.axis_index(axis_name)
        self.shifts = (1, -1)[: walk.ways]

    def product(self, p: Any) -> None:
        """Fetches for the next product, multiplies, and stores what is finished."""
        walk = self.walk
        here, following = walk.at(p), walk.at(p + 1)
        with jax.named_scope("wait"):
            walk.rows.at(here.i, functools.partial(self.wait, here))

        @pl.when(p + 1 < walk.products)
        def _() -> None:
            pl.when((following.i == 0) & (following.j == 0))(lambda: self.begin(following))
            self.fetch(following)

        self.multiply(here)

    def wait(self, here: OuterPlace, batches: Any, rows: Any) -> None:
        """Until the tiles of x and dy have landed."""
        x, y = self.scratch.x.at[here.x_slot], self.scratch.y.at[here.y_slot]
        x_sem, y_sem = self.scratch.x_sem.at[here.x_slot], self.scratch.y_sem.at[here.y_slot]
        lanes = pl.ds(0, batches.size * rows.size)

        def wait_x(chunk: int) -> None:
            landed(x.at[pl.ds(0, chunk), lanes], x_sem)

        def wait_y(n: int) -> None:
            landed(y.at[inside(batches), inside(rows), pl.ds(0, n)], y_sem)

        pl.when(here.j == 0)(lambda: self.walk.chunk.sized(here.chunk, wait_x))
        self.walk.columns.sized(here.j, wait_y)

    def begin(self, place: OuterPlace) -> None:
        """Begins a step: waits for what arrives in it and for what was sent in the one before, and sends on."""

        def hops(chunk: Any, way: int, shift: int) -> None:
            hop = functools.partial(self._hop, place, chunk, way, shift)
            before = hop(jnp.maximum(place.step - 1, 0), own=True)
            pl.when(place.step > 0)(lambda: before.wait())
            onward = (place.step > 0) & (place.step < self.walk.size - 1)
            pl.when(onward)(lambda: hop(place.step).start())
            pl.when(place.step == 0)(lambda: hop(place.step, own=True).start())

        def all_ways(_: int, chunk: Any) -> None:
            for way, shift in enumerate(self.shifts):
                hops(chunk, way, shift)

        with jax.named_scope("hop"):
            self.walk.chunk.at(place.chunk, all_ways)

    def fetch(self, place: OuterPlace) -> None:
        """Starts the copies of a product's tiles."""
        walk = self.walk
        owner = lax.rem(self.index + walk.size - place.step, walk.size)
        if walk.ways == 2:
            owner = jnp.where(place.way == 0, owner, lax.rem(self.index + place.step, walk.size))

        def tiles(batches: Any, rows: Any) -> None:
            lanes = pl.ds(pl.multiple_of(walk.rows.first(place.i), LANES), batches.size * rows.size)

            def copy_x(_: int, chunk: Any) -> None:
                slot = self.scratch.x_sem.at[place.x_slot]
                tile = self.scratch.x.at[place.x_slot, inside(chunk), inside(lanes)]

                def arrived() -> None:
                    source = self.places.at[split(place.chunk, SETS)[1], place.step - 1, inside(chunk), lanes]
                    pltpu.make_async_copy(source, tile, slot).start()

                own = self.x.at[chunk, lanes]
                pl.when(place.step == 0)(lambda: pltpu.make_async_copy(own, tile, slot).start())
                pl.when(place.step > 0)(arrived)

            def copy_y(number: int, columns: Any) -> None:
                source = self.dys[number].at[batches, owner, rows, columns]
                tile = self.scratch.y.at[place.y_slot, inside(batches), inside(rows), inside(columns)]
                pltpu.make_async_copy(source, tile, self.scratch.y_sem.at[place.y_slot]).start()

            pl.when(place.j == 0)(lambda: walk.chunk.at(place.chunk, copy_x))
            walk.columns.at(place.j, copy_y)

        with jax.named_scope("fetch"):
            walk.rows.at(place.i, tiles)

    def multiply(self, here: OuterPlace) -> None:
        """Adds a product to its sum; the last one rounds and stores it."""
        with jax.named_scope("multiply"):
            self.walk.columns.sized(here.j, functools.partial(self.multiply_columns, here))

    def multiply_columns(self, here: OuterPlace, n: int) -> None:
        """The product of a tile of so many columns."""
        scratch, walk = self.scratch, self.walk
        number = here.chunk * walk.across + here.j
        _, room = split(number, ROOMS)
        first = (here.step == 0) & (here.i == 0)
        last = (here.step == walk.size - 1) & (here.i == walk.rows.count - 1)

        def each(use: Callable, batches: int, rows: int) -> None:
            held = walk.held

            def one(g: Any) -> None:
                part = pl.ds(pl.multiple_of(g * held, held), held)
                x = scratch.x[here.x_slot, part, : batches * rows]
                y = scratch.y[here.y_slot, :batches, :rows, :n].reshape(batches * rows, n)
                use(part, jnp.dot(x, y, preferred_element_type=jnp.float32))

            pl.loop(0, parts_of(walk.chunk, held, here.chunk))(one)

        def store(part: Any, product: jax.Array) -> None:
            scratch.total[here.j, part, :n] = product

        def add(part: Any, product: jax.Array) -> None:
            scratch.total[here.j, part, :n] += product

        def end(part: Any, product: jax.Array) -> None:
            total = scratch.total[here.j, part, :n] + product
            scratch.leaving[room, part, :n] = total.astype(scratch.leaving.dtype)

        pl.when(first)(lambda: each(store, *walk.rows.sides(0)))
        middle = jnp.logical_not(first | last)
        pl.when(middle)(lambda: walk.rows.at(here.i, lambda batches, rows: each(add, batches.size, rows.size)))

        def put(dw: int, columns: Any) -> None:
            def of_chunk(_: int, chunk: Any) -> None:
                source = scratch.leaving.at[room, inside(chunk), inside(columns)]
                place = self.dws[dw].at[chunk, columns]
                pltpu.make_async_copy(source, place, scratch.leave_sem.at[room]).start()

            walk.chunk.at(here.chunk, of_chunk)

        def finished() -> None:
            pl.when(number >= ROOMS)(lambda: self.wait_left(number - ROOMS, room))
            each(end, *walk.rows.sides(-1))
            walk.columns.at(here.j, put)

        pl.when(last)(finished)

    def wait_left(self, number: Any, room: Any) -> None:
        """Until a tile of the result has left its room."""
        chunk, j = split(number, self.walk.across)
        tile, sem = self.scratch.leaving.at[room], self.scratch.leave_sem.at[room]

        def wait(c: int) -> None:
            self.walk.columns.sized(j, lambda n: landed(tile.at[pl.ds(0, c), pl.ds(0, n)], sem))

        self.walk.chunk.sized(chunk, wait)

    def finish(self) -> None:
        """Waits for what is still leaving."""
        numbers = self.walk.chunks * self.walk.across
        with jax.named_scope("finish"):
            for number in range(max(0, numbers - ROOMS), numbers):
                self.wait_left(jnp.int32(number), number % ROOMS)

    def _hop(self, place: OuterPlace, chunk: Any, way: int, shift: int, step: Any, *, own: bool = False) -> Any:
        """The transfer of a block's half that begins in a step: from where it arrived, or from x."""
        turn, lanes = split(place.chunk, SETS)[1], pl.ds(*self.walk.halves[way])
        rows = inside(chunk)
        source = self.x.at[chunk, lanes] if own else self.places.at[turn, step - 1, rows, lanes]
        return pltpu.make_async_remote_copy(
            source,
            self.places.at[turn, step, rows, lanes],
            self.scratch.send_sem.at[way],
            self.scratch.recv_sem.at[turn, way, step],
            device_id=device_at(self.axis_name, shift),
        )
