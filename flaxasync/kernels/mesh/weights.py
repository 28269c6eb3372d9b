"""The stream of w in the overlapped kernel: pieces go around a mesh column, chunk by chunk, in the order of their use.

An owner sends its pieces of a chunk `AHEAD` chunks before they are used. The others send a piece on

    in chunk 0, or in every chunk of a mesh of one column    when they use it: nobody had it before
    in the chunks after it                                   one chunk before they use it, in the phases after the first

since a device that sends on what it is about to use makes the next one late by a hop in every chunk. Pieces of fewer
hops are sent on first, in a window of the walk that is the same on all devices (`due`): what a device waits for there
was sent on by the one before in an earlier window.

Every piece of every chunk has a place of its own and a semaphore of its own: nothing is acknowledged. The pieces of
the last chunk may be narrower.
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
from flaxasync.kernels.mesh.pieces import Pieces
from flaxasync.kernels.mesh.scratch import Scratch
from flaxasync.kernels.mesh.walk import Place, Walk

AHEAD = 2  # chunks of w that are on their way before they are used
NONE = -1  # in `due`: no piece


def window(pieces: Pieces) -> int:
    """How many pieces of one number of hops a device sends on, at most."""
    return min(pieces.held, pieces.depth) + pieces.ways - 1


def events(walk: Walk, pieces: Pieces) -> int:
    """Times at which a device may send a piece of the next chunk on; 0 where pieces are sent on when they are used."""
    ahead = pieces.size > 2 and walk.phases > 1 and walk.chunks > 1
    return window(pieces) * (pieces.size - 2) if ahead else 0


class Weights:
    """One device's part."""

    def __init__(self, walk: Walk, pieces: Pieces, columns: Cut, w: Any, w_in: Any, scratch: Scratch) -> None:
        self.walk, self.pieces, self.columns = walk, pieces, columns
        self.w, self.w_in, self.scratch = w, w_in, scratch
        self.ahead, self.events = AHEAD, events(walk, pieces)

    def begin(self) -> None:
        """Finds the order of use, and sends the first chunks."""
        self.pieces.sort(self.scratch.order)
        if self.events:
            self._plan()
        for chunk in range(min(self.ahead, self.walk.chunks)):
            self.send(chunk)

    def piece(self, place: Place) -> Any:
        """The piece that a step multiplies with."""
        return self.scratch.order[place.t]

    def fetch(self, place: Place) -> None:
        """Starts the copy of a step's tile, once it is there."""
        t = self.piece(place)
        own = self.pieces.own(t)
        pl.when(place.w_new & own)(lambda: self._own_copy(place, t, "start"))
        if self.pieces.size == 1:
            return

        @pl.when(place.w_new & jnp.logical_not(own))
        def _() -> None:
            first = (place.phase == 0) & (place.group == 0)
            if self.events:  # in later chunks, what goes on was waited for when it was sent on
                first &= (place.chunk == 0) | jnp.logical_not(self.pieces.goes_on(t))
            pl.when(first)(lambda: self._receive(place.chunk, t))
            self._copy(self.w_in, self.pieces.needed_rows(t), place, "start")

    def wait(self, place: Place) -> None:
        """Waits for the tile of a step."""
        pl.when(place.w_new)(lambda: self._own_copy(place, 0, "wait"))

    def send(self, chunk: Any) -> None:
        """Starts sending the own pieces of a chunk."""
        if self.pieces.size > 1:
            with jax.named_scope("send_weights"):

                @pl.loop(0, self.walk.depth)
                def _(t: Any) -> None:
                    pl.when(self.pieces.own(t))(lambda: self._hop(chunk, t, lambda hop: hop.start(), own=True))

    def send_on(self, place: Place) -> None:
        """Of the next chunk: what is due in this step."""
        if not self.events:
            return
        steps = (self.walk.phases - 1) * self.walk.area
        gap, together = max(1, steps // self.events), pl.cdiv(self.events, steps)
        offset = (place.phase - 1) * self.walk.area + place.position
        first = lax.div(offset, gap) * together

        @pl.when((place.phase > 0) & (place.group == 0) & (place.chunk + 1 < self.walk.chunks))
        def _() -> None:
            @pl.when((lax.rem(offset, gap) == 0) & (first < self.events))
            def _() -> None:
                with jax.named_scope("send_on"):
                    for event in range(together):
                        t = self.scratch.due[lax.min(first + event, self.events - 1)]
                        due = (t != NONE) & (first + event < self.events)
                        pl.when(due)(functools.partial(self._receive, place.chunk + 1, t))

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        if self.pieces.size > 1:

            @pl.loop(0, self.walk.depth)
            def _(t: Any) -> None:
                @pl.when(self.pieces.goes_on(t))
                def _() -> None:
                    pl.loop(0, self.walk.chunks)(lambda chunk: self._hop(chunk, t, lambda hop: hop.wait_send()))

    def _plan(self) -> None:
        """Fills the table of what is sent on, window by window."""
        due, order, pieces = self.scratch.due, self.scratch.order, self.pieces
        pl.loop(0, self.events)(lambda event: due.__setitem__(event, NONE))

        def one(q: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
            t = order[q]
            hops = pieces.hops(t)
            rank = lax.select(hops == before[0], before[1] + 1, 0)

            @pl.when((hops > 0) & pieces.goes_on(t))
            def _() -> None:
                due[(hops - 1) * window(pieces) + rank] = t

            return hops, rank

        lax.fori_loop(0, self.walk.depth, one, (jnp.int32(0), jnp.int32(0)))

    def _receive(self, chunk: Any, t: Any) -> None:
        """Waits for a piece, and sends it on if anybody still needs it."""

        def receive(hop: Any) -> None:
            hop.wait_recv()
            if self.pieces.size > 2:
                pl.when(self.pieces.goes_on(t))(hop.start)

        self._hop(chunk, t, receive)

    def _own_copy(self, place: Place, t: Any, action: str) -> None:
        self._copy(self.w, self.pieces.held_rows(t), place, action)

    def _copy(self, source: Any, rows: Any, place: Place, action: str) -> None:
        """Starts, or waits for, the copy of a step's tile."""

        def copy(_: int, columns: Any) -> None:
            slot = place.w_slot
            tile = self.scratch.w.at[slot, :, inside(columns)]
            copy = pltpu.make_async_copy(source.at[rows, columns], tile, self.scratch.w_sem.at[slot])
            copy.start() if action == "start" else copy.wait()

        self.columns.at(place.chunk, copy)

    def _hop(self, chunk: Any, t: Any, do: Callable[[Any], None], *, own: bool = False) -> None:
        """Calls do(the transfer of a piece to the next device)."""

        def hop(_: int, columns: Any) -> None:
            there = self.w_in.at[self.pieces.needed_rows(t), columns]
            source = self.w.at[self.pieces.held_rows(t), columns] if own else there
            sems = self.scratch.w_send, self.scratch.w_recv.at[chunk, t]
            do(pltpu.make_async_remote_copy(source, there, *sems, device_id=self.pieces.to(t)))

        self.columns.at(chunk, hop)
