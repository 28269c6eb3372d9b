"""The streams of sums and results in the overlapped kernel: a reduce-scatter and an all-gather around a mesh row.

```
phase s      device c multiplies the rows of column c - s - 1, adds what its neighbour gave it of them in phase s - 1,
             and gives the sums to the next device, c + 1
phase Y - 1  these are its own rows: it adds, stores the result, and sends it to the next device
the round    each tile of the result that has come over h hops is sent on in phase h - 1 of the next round, until it
after        has been everywhere
```

With two ways, half of the rows of each part go the other way: of a tile, the upper half is of column c - s - 1, the
lower half of column c + s + 1. Sums and own results leave from vector memory. All that comes has a place of its own in
HBM and a semaphore of its own: nothing is acknowledged.

The last chunk of columns may be narrower: of its tiles, what lies beyond is what was there, and goes nowhere. A wait
for what has left names the round in which it did.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.cut import Cut, inside
from flaxasync.kernels.mesh.scratch import KEPT, Scratch
from flaxasync.kernels.mesh.walk import Place, Walk
from flaxasync.kernels.neighbours import toward
from flaxasync.kernels.tiles import split


class Sums:
    """One device's part."""

    def __init__(
        self, axis_name: str, ways: int, walk: Walk, columns: Cut, x: Any, o: Any, sums_in: Any, scratch: Scratch
    ) -> None:
        self.axis_name, self.walk, self.columns, self.scratch = axis_name, walk, columns, scratch
        self.ways, self.side = range(ways), scratch.x.shape[1] // ways
        self.x, self.o, self.sums_in = x, o, sums_in
        self.column = lax.axis_index(axis_name)
        self.part = o.shape[0] // walk.phases  # rows

    def fetch_rows(self, place: Place, columns: Any, slot: Any) -> None:
        """Starts the copies of a step's tile of x."""
        for way in self.ways:
            rows = self._rows(place.round, place.i, way, self._behind(place.phase + 1, way))
            tile = self.scratch.x.at[slot, self._of_tile(way), :]
            pltpu.make_async_copy(self.x.at[rows, columns], tile, self.scratch.x_sem.at[slot]).start()

    def wait_rows(self, slot: Any) -> None:
        tile = self.scratch.x.at[slot]
        pltpu.make_async_copy(tile, tile, self.scratch.x_sem.at[slot]).wait()

    def fetch(self, place: Place) -> None:
        """Starts the copy of what the neighbour gave, once it is there."""
        with jax.named_scope("fetch_sums"):
            self._give(place.round, place.i, place.phase - 1, "wait_recv")
            self._copy_given(place, "start")

    def give(self, place: Place) -> None:
        """Adds the neighbour's sums of another column's rows, rounds, and gives them to the next device."""
        with jax.named_scope("give"):

            @pl.when((place.round > 0) | (place.phase > 0))
            def _() -> None:
                before = place.round - (place.phase == 0).astype(jnp.int32)
                self._give(before, place.i, place.phase, "wait_send")

            out = self.scratch.given.at[place.i]

            @pl.when(place.phase == 0)
            def _() -> None:
                out[...] = self.scratch.total[place.i].astype(out.dtype)

            if self.walk.phases > 2:

                @pl.when(place.phase > 0)
                def _() -> None:
                    out[...] = self._added(place, place.i).astype(out.dtype)

            self._give(place.round, place.i, place.phase, "start")

    def keep(self, place: Place) -> None:
        """Adds the neighbour's sums to the own ones, rounds, stores the result and sends it to the next device."""
        with jax.named_scope("keep"):
            number, total = place.round * self.walk.rows + place.i, jnp.where(place.outer, place.i, 0)
            slot = lax.rem(number, KEPT)

            @pl.when(number >= KEPT)
            def _() -> None:
                self._leave(*split(number - KEPT, self.walk.rows), slot, "wait")

            kept = self.scratch.kept.at[slot]
            if self.walk.phases > 1:
                kept[...] = self._added(place, total).astype(kept.dtype)
            else:
                kept[...] = self.scratch.total[total].astype(kept.dtype)
            self._leave(place.round, place.i, slot, "start")

    def send_on(self, place: Place) -> None:
        """Sends on what has come of the round before."""
        if self.walk.phases < 3:
            return
        i, t = lax.div(place.position, self.walk.depth), lax.rem(place.position, self.walk.depth)
        due = (place.round > 0) & (place.phase < self.walk.phases - 2) & (t == self.walk.depth - 1)
        pl.when(due)(lambda: self._send_on_tile(place.round - 1, place.phase + 1, i))

    def finish(self) -> None:
        """Sends on what is left, and waits for all that still leaves or comes."""
        walk = self.walk
        numbers = walk.rounds * walk.rows
        for number in range(max(0, numbers - KEPT), numbers):
            self._leave(*divmod(number, walk.rows), number % KEPT, "wait")
        if walk.phases == 1:
            return

        for hops in range(1, walk.phases - 1):
            pl.loop(0, walk.rows)(functools.partial(self._send_on_tile, walk.rounds - 1, hops))

        pl.loop(0, walk.rows)(lambda i: self._give(walk.rounds - 1, i, 0, "wait_send"))

        @pl.loop(0, walk.rounds)
        def _(round_: Any) -> None:
            @pl.loop(0, walk.rows)
            def _(i: Any) -> None:
                def wait(columns: Any) -> None:
                    for way in self.ways:
                        self._result(round_, i, columns, walk.phases - 1, way).wait_recv()
                        for _hops in range(1, walk.phases - 1):
                            self._result(round_, i, columns, 1, way).wait_send()

                self._on_columns(round_, wait)

    def _behind(self, hops: Any, way: int) -> Any:
        """The column whose rows get here in a number of hops, at most once around."""
        size = self.walk.phases
        there = self.column + (size - hops if way == 0 else hops)
        return lax.rem(there, jnp.int32(size))

    def _of_tile(self, way: int) -> Any:
        return pl.ds(way * self.side, self.side)

    def _rows(self, round_: Any, i: Any, way: int, part: Any) -> Any:
        """The rows of one way's half of a tile: in x and o."""
        return pl.ds(pl.multiple_of(part * self.part + self._row(round_, i, way), self.side), self.side)

    def _row(self, round_: Any, i: Any, way: int) -> Any:
        tile = lax.rem(round_, jnp.int32(self.walk.groups)) * self.walk.rows + i
        return way * (self.part // len(self.ways)) + tile * self.side

    def _on_columns(self, round_: Any, do: Callable[[Any], None]) -> None:
        """Calls do(the columns of a round)."""
        self.columns.at(lax.div(round_, jnp.int32(self.walk.groups)), lambda _, columns: do(columns))

    def _added(self, place: Place, total: Any) -> jax.Array:
        """The own sums and the neighbour's, which are waited for."""
        self._copy_given(place, "wait")
        return self.scratch.total[total] + self.scratch.added[...].astype(jnp.float32)

    def _given_place(self, round_: Any, i: Any, columns: Any, phase: Any, way: int) -> Any:
        row = pl.multiple_of(phase * self.part + self._row(round_, i, way), self.side)
        return self.sums_in.at[pl.ds(row, self.side), columns]

    def _copy_given(self, place: Place, action: str) -> None:
        """Starts, or waits for, the copy of what the neighbour gave."""

        def copy(columns: Any) -> None:
            for way in self.ways:
                source = self._given_place(place.round, place.i, columns, place.phase - 1, way)
                tile = self.scratch.added.at[self._of_tile(way), inside(columns)]
                getattr(pltpu.make_async_copy(source, tile, self.scratch.added_sem), action)()

        self._on_columns(place.round, copy)

    def _give(self, round_: Any, i: Any, phase: Any, action: str) -> None:
        """Starts, or waits for, the transfer to the next device of a tile of sums."""

        def give(columns: Any) -> None:
            for way in self.ways:
                hop = pltpu.make_async_remote_copy(
                    self.scratch.given.at[i, self._of_tile(way), inside(columns)],
                    self._given_place(round_, i, columns, phase, way),
                    self.scratch.given_send.at[i],
                    self.scratch.given_recv.at[phase * self.walk.rounds + round_, i],
                    device_id=toward(self.axis_name, way),
                )
                getattr(hop, action)()

        self._on_columns(round_, give)

    def _leave(self, round_: Any, i: Any, slot: Any, action: str) -> None:
        """Starts, or waits for, a tile of the result that is stored here and sent to the next device."""

        def leave(columns: Any) -> None:
            for way in self.ways:
                tile = self.scratch.kept.at[slot, self._of_tile(way), inside(columns)]
                here = self._result_place(round_, i, columns, way, self.column)
                store = pltpu.make_async_copy(tile, here, self.scratch.kept_store.at[slot])
                store.start() if action == "start" else store.wait()
                if self.walk.phases > 1:
                    hop = self._result(round_, i, columns, 1, way, tile, self.scratch.kept_send.at[slot])
                    hop.start() if action == "start" else hop.wait_send()

        self._on_columns(round_, leave)

    def _send_on_tile(self, round_: Any, hops: Any, i: Any) -> None:
        """Waits for a tile that comes over a number of hops, and sends it on."""

        def send_on(columns: Any) -> None:
            for way in self.ways:
                self._result(round_, i, columns, hops, way).wait_recv()
            for way in self.ways:
                self._result(round_, i, columns, hops + 1, way).start()

        with jax.named_scope("send_on"):
            self._on_columns(round_, send_on)

    def _result_place(self, round_: Any, i: Any, columns: Any, way: int, part: Any) -> Any:
        return self.o.at[self._rows(round_, i, way, part), columns]

    def _result(
        self, round_: Any, i: Any, columns: Any, hops: Any, way: int, source: Any = None, send_sem: Any = None
    ) -> Any:
        """The transfer to the next device of a tile for which it is a number of hops; of which this device is one less.

        As a receiver's descriptor, the rows that it names are not those that come; their number is.
        """
        there = self._result_place(round_, i, columns, way, self._behind(hops - 1, way))
        again = self.scratch.kept_again if self.walk.phases > 2 else self.scratch.kept_send.at[0]
        return pltpu.make_async_remote_copy(
            there if source is None else source,
            there,
            again if send_sem is None else send_sem,
            self.scratch.kept_recv.at[(hops - 1) * self.walk.rounds + round_, i],
            device_id=toward(self.axis_name, way),
        )
