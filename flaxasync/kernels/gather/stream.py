"""The order of work of all_gather_matmul where x streams from HBM: group by group, as they arrive.

```
links   group 1 ->    group 2 ->    group 3 -> ...
core    group 0       group 1       group 2        ...
          columns 0   columns 1 ...                     of all ws
            t=0 t=1 ...                                 tiles of the contraction: a tile of w for all rows of the group
              i=0 i=1 ...                               tiles of rows, a sum in vector memory for each
```

One flat walk over all products of tiles: the next step's tiles are fetched during this one, over all borders. A group
is waited for when its first tile is fetched, and sent onward at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.row_tiling import SUB_BLOCK as ROWS
from flaxasync.kernels.gather.hops import Hops
from flaxasync.kernels.gather.stream_walk import Place, Walk
from flaxasync.kernels.tiles import largest_side, split, sublanes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Refs, inside the kernel; shapes, where it is called. Sides in brackets are those of tiles."""

    x: Any  # [2, batches, rows, k] VMEM, this step's and the next one's
    w: Any  # [2, k, n], or [2, n, k], VMEM, likewise
    total: Any  # [tiles, m, n] VMEM, float32 sums
    out: Any  # [2, batches, rows, n] VMEM, tiles of the result that leave
    x_sem: Any  # [2]
    w_sem: Any  # [2]
    out_sem: Any  # [2]

    @classmethod
    def shapes(cls, walk: Walk, transposed: bool, dtype: Any) -> Any:
        dma = pltpu.SemaphoreType.DMA((2,))
        w = (walk.n, walk.k) if transposed else (walk.k, walk.n)
        return cls(
            pltpu.VMEM((2, walk.batches, walk.rows, walk.k), dtype),
            pltpu.VMEM((2, *w), dtype),
            pltpu.VMEM((walk.tiles, walk.m, walk.n), jnp.float32),
            pltpu.VMEM((2, walk.batches, walk.rows, walk.n), dtype),
            dma,
            dma,
            dma,
        )


class Stream:
    """What one device does, step by step."""

    def __init__(self, walk: Walk, hops: Hops, ws: Any, ys: Any, transposed: bool, keep: bool, scratch: Scratch):
        self.walk, self.hops, self.ws, self.ys = walk, hops, ws, ys
        self.transposed, self.keep, self.scratch = transposed, keep, scratch

    def begin(self) -> None:
        """What needs no neighbour: the first tiles."""
        self.fetch(self.walk.at(0), 0)

    def run(self) -> None:
        walk = self.walk
        self.hops.send_own()
        pl.loop(0, walk.steps)(self.step)
        with jax.named_scope("finish"):
            stores = walk.rounds * walk.tiles
            for number in range(max(0, stores - 2), stores):
                self._store(jnp.int32(number), "wait")
            self.hops.finish()
            if self.keep:
                self.hops.copy_own().wait()

    def step(self, s: Any) -> None:
        """Fetches for the next step, multiplies, and lets go what is finished."""
        walk, scratch = self.walk, self.scratch
        here, slot = walk.at(s), lax.rem(s, 2)
        pl.when(s + 1 < walk.steps)(lambda: self.fetch(walk.at(s + 1), 1 - slot))
        if self.keep:
            self._keep_own(s)
        with jax.named_scope("wait"):
            pltpu.make_async_copy(scratch.x.at[slot], scratch.x.at[slot], scratch.x_sem.at[slot]).wait()
            pl.when(here.i == 0)(lambda: self._copy_w(here, "wait"))
        number = here.round * walk.tiles + here.i
        last = here.t == walk.depth - 1
        pl.when(last & (number >= 2))(lambda: self._store(number - 2, "wait"))
        with jax.named_scope("multiply"):
            self._multiply(here, slot, lax.rem(number, 2))
        pl.when(last)(lambda: self._store(number, "start"))

    def fetch(self, place: Place, slot: Any) -> None:
        """Starts the copies of a step's tiles; of w where it is another one. Waits for a group at its first use."""
        first = (
            (place.round == place.group * (self.walk.cuts * self.walk.columns.count)) & (place.t == 0) & (place.i == 0)
        )

        @pl.when(first & (place.group > 0))
        def _() -> None:
            self.hops.receive(place.group)
            self.hops.send(place.group)

        with jax.named_scope("fetch"):
            pl.when(place.i == 0)(lambda: self._copy_w(place, "start"))
            k = self._side(place.t, self.walk.k)
            block, batches, rows = self._rows(place.group, place.first + place.i)
            to = self.scratch.x.at[slot], self.scratch.x_sem.at[slot]

            @pl.when(place.group == 0)
            def _() -> None:
                pltpu.make_async_copy(self.hops.x.at[batches, rows, k], *to).start()

            @pl.when(place.group > 0)
            def _() -> None:
                pltpu.make_async_copy(self.hops.gathered.at[batches, block, rows, k], *to).start()

    def _keep_own(self, s: Any) -> None:
        """Copies a batch of the own block to its place, every second step: the whole would hold up tiles behind it."""
        batches = self.hops.x.shape[0]
        if batches > self.walk.steps:
            pl.when(s == 0)(self.hops.copy_own().start)
            return
        batch, rest = split(s, 2 if 2 * batches <= self.walk.steps else 1)

        @pl.when((rest == 0) & (batch < batches))
        def _() -> None:
            place = self.hops.gathered.at[batch, self.hops.index]
            pltpu.make_async_copy(self.hops.x.at[batch], place, self.hops.semaphores.own).start()

    def _multiply(self, here: Place, slot: Any, out_slot: Any) -> None:
        """One tile of x by one of w, into its sum; the last one of a sum is rounded."""
        walk = self.walk
        rows = largest_side(walk.rows, ROWS, sublanes(self.scratch.x.dtype))
        batches = largest_side(walk.batches, max(1, ROWS // rows), 1) if rows == walk.rows else 1
        side, down = batches * rows, walk.rows // rows
        x, out = self.scratch.x.at[slot], self.scratch.out.at[out_slot]
        w, total = self.scratch.w.at[here.w_slot], self.scratch.total.at[here.i]
        dims = (((1,), (1 if self.transposed else 0,)), ((), ()))

        @pl.loop(0, walk.m // side)
        def _(q: Any) -> None:
            part = pl.ds(pl.multiple_of(q * side, side), side)
            b, r = split(q, down)
            here_in = pl.ds(b * batches, batches), pl.ds(pl.multiple_of(r * rows, rows), rows)

            def product() -> jax.Array:  # read within each branch: values that cross one would be copied first
                return lax.dot_general(
                    x[*here_in, :].reshape(side, walk.k), w[...], dims, preferred_element_type=jnp.float32
                )

            def finished(value: jax.Array) -> None:
                out[*here_in, :] = value.astype(out.dtype).reshape(batches, rows, walk.n)

            if walk.depth == 1:
                finished(product())
                return

            @pl.when(here.t == 0)
            def _() -> None:
                total[part, :] = product()

            @pl.when((here.t > 0) & (here.t < walk.depth - 1))
            def _() -> None:
                total[part, :] += product()

            @pl.when(here.t == walk.depth - 1)
            def _() -> None:
                finished(total[part, :] + product())

    def _store(self, number: Any, do: str) -> None:
        """Starts the copy of a finished tile of the result to its place, or waits for it."""
        round_, i = split(number, self.walk.tiles)
        place = self.walk.of_round(round_, 0, i, 0)
        block, batches, rows = self._rows(place.group, place.first + i)
        slot = lax.rem(number, 2)
        tile, sem = self.scratch.out.at[slot], self.scratch.out_sem.at[slot]

        def copy(q: int, columns: Any, width: int) -> None:
            there = self.ys[q].at[batches, block, rows, columns]
            getattr(pltpu.make_async_copy(tile.at[:, :, pl.ds(0, width)], there, sem), do)()

        with jax.named_scope("store"):
            self.walk.columns.at(place.column, copy)

    def _copy_w(self, place: Place, do: str) -> None:
        tile, sem = self.scratch.w.at[place.w_slot], self.scratch.w_sem.at[place.w_slot]
        k = self._side(place.t, self.walk.k)

        def copy(q: int, columns: Any, width: int) -> None:
            source = self.ws[q].at[(columns, k) if self.transposed else (k, columns)]
            part = tile.at[pl.ds(0, width), :] if self.transposed else tile.at[:, pl.ds(0, width)]
            getattr(pltpu.make_async_copy(source, part, sem), do)()

        self.walk.columns.at(place.column, copy)

    def _rows(self, group: Any, tile: Any) -> tuple[Any, Any, Any]:
        """Block, batches and rows of a tile of rows in its group."""
        walk, parts = self.walk, self.walk.parts
        down = parts.rows // walk.rows
        p, within = split(tile, parts.batches // walk.batches * down)
        b, r = split(within, down)
        first_batch, first_row = parts.origin(p)
        batches = pl.ds(first_batch + b * walk.batches, walk.batches)
        rows = pl.ds(pl.multiple_of(first_row + r * walk.rows, walk.rows), walk.rows)
        return self.hops.block(p, group), batches, rows

    def _side(self, index: Any, side: int) -> Any:
        return pl.ds(pl.multiple_of(index * side, side), side)
