"""all_gather_matmul where the gathered x stays in vector memory: `resident_plan` has its sizes, `staircase` the order.

Groups arrive in vector memory and are sent onward from there. A product contracts over all of k at once where its code
is short enough; only tiles of w come from HBM, and only the result goes there.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.gather.hops import Hops
from flaxasync.kernels.gather.items import LEAVING, Row
from flaxasync.kernels.gather.resident_plan import PIECE, Plan
from flaxasync.kernels.tiles import LANES

_FIELDS = len(dataclasses.fields(Row))  # in the table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Refs, inside the kernel; shapes, where it is called."""

    x: Any  # [groups, B, m, k] VMEM, all groups in the order of their arrival
    w: Any  # [slots, k, n], or [slots, n, k], VMEM
    total: Any  # [m, n] VMEM, float32 sum of a product in several tiles of k
    out: Any  # [room, B, m, n] VMEM, results of groups that leave
    table: Any  # [items * fields] SMEM
    x_sem: Any  # [chunks]
    w_sem: Any  # [slots, pieces]
    out_sem: Any  # [LEAVING]
    kept_sem: Any  # of what is copied to the gathered x in HBM

    @classmethod
    def shapes(cls, plan: Plan, transposed: bool, dtype: Any) -> Any:
        dma, n, k = pltpu.SemaphoreType.DMA, plan.columns.n, plan.k * plan.depth
        total = (plan.most * plan.m, n) if plan.depth > 1 else (8, LANES)
        return cls(
            pltpu.VMEM((plan.groups, *plan.parts.group, k), dtype),
            pltpu.VMEM((plan.slots, *((n, k) if transposed else (k, n))), dtype),
            pltpu.VMEM(total, jnp.float32),
            pltpu.VMEM((plan.room, *plan.parts.group, n), dtype),
            pltpu.SMEM((len(plan.order.items) * _FIELDS,), jnp.int32),
            dma((plan.parts.chunks,)),
            dma((plan.slots, plan.pieces)),
            dma((LEAVING,)),
            dma,
        )


class Resident:
    """What one device does, item by item."""

    def __init__(self, plan: Plan, hops: Hops, ws: Any, ys: Any, transposed: bool, keep: bool, scratch: Scratch):
        self.plan, self.hops, self.ws, self.ys = plan, hops, ws, ys
        self.transposed, self.keep, self.scratch = transposed, keep, scratch
        hops.kept = scratch.x

    def begin(self) -> None:
        """What needs no neighbour: the own rows, the first tiles of w."""
        pl.loop(0, self.plan.parts.chunks)(lambda chunk: self._copies_own(chunk, "start"))  # a loop keeps their order
        for slot, column in enumerate(self.plan.order.loads):
            self._fetch(column, slot)

    def run(self) -> None:
        for number, item in enumerate(self.plan.order.items):  # while the own rows come
            for field, value in enumerate(dataclasses.astuple(Row.of(item, self.plan.pieces))):
                self.scratch.table[number * _FIELDS + field] = value
        for chunk in range(self.plan.parts.chunks):
            self._copies_own(chunk, "wait")
            self.hops.send(chunk)  # from vector memory: HBM has enough to do
            if self.keep:
                self._copies_kept(chunk, "start")
        pl.loop(0, len(self.plan.order.items))(self.item)
        with jax.named_scope("finish"):
            items = self.plan.order.items
            for number in range(items[-1].gone, len(items)):
                self._stored(number)
            self.hops.finish()
            if self.keep:
                for group in range(self.plan.groups):
                    self._copies_kept(group, "wait")

    def item(self, number: Any) -> None:
        """Receives a group, fetches a tile of w, where the table says so; multiplies."""
        here, plan = self._at(number), self.plan

        @_sometimes(here.receives > 0)
        def _() -> None:
            self.hops.receive(here.receives)
            self.hops.send(here.receives)
            if self.keep:
                self._copies_kept(here.receives, "start")

        @_sometimes(here.fetches >= 0)
        def _() -> None:
            pl.when(here.at_once == 1)(lambda: self._copy_w(here.fetches, here.into, None, "start"))
            pl.when(here.at_once == 0)(lambda: self._fetch(here.fetches, here.into))

        pl.loop(here.gone - here.goes, here.gone)(self._stored)

        @_sometimes(here.awaits > 0)
        def _() -> None:
            pl.when(here.awaited < 0)(lambda: self._copy_w(here.column, here.slot, None, "wait"))

            @pl.when(here.awaited >= 0)
            def _() -> None:
                pl.loop(here.awaited, plan.pieces)(lambda piece: self._wait_piece(here, piece))

        @pl.loop(0, plan.products)
        def _(product: Any) -> None:
            leaves = number & (LEAVING - 1)
            for span in plan.spans[: plan.spans.index(plan.most)]:
                one = functools.partial(self._multiply, here, product, leaves, span)
                pl.when(here.span == span)(one)
            times = jnp.maximum(here.span, 0) >> (plan.most.bit_length() - 1)
            pl.loop(0, times)(lambda i: self._multiply(here, product, leaves, plan.most, first=i * plan.most))
            for span in plan.together:

                @pl.when(here.span == -span)
                def _(span: int = span) -> None:
                    @pl.loop(here.begin, here.end)
                    def _(piece: Any) -> None:
                        pl.when(piece >= here.awaited)(lambda: self._wait_piece(here, piece))
                        self._multiply(here, product, leaves, span, piece)

    def _multiply(self, here: Row, product: Any, leaves: Any, groups: int, piece: Any = None, first: Any = 0) -> None:
        """Some groups of an item, or some rows of one group, by a tile of w or a piece of it."""
        plan, (batches, rows) = self.plan, self._within(product)
        columns = slice(0, plan.columns.n) if piece is None else pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
        width = plan.columns.n if piece is None else PIECE
        out = self.scratch.out.at[pl.ds(here.place + first, groups), batches, rows]
        total = self.scratch.total.at[pl.ds(0, groups * plan.m), columns] if plan.depth > 1 else None
        dims = (((1,), (1 if self.transposed else 0,)), ((), ()))

        def dot(t: Any) -> jax.Array:
            k = pl.ds(pl.multiple_of(t * plan.k, plan.k), plan.k) if plan.depth > 1 else slice(None)
            x = self.scratch.x[pl.ds(here.group + first, groups), batches, rows, k].reshape(groups * plan.m, plan.k)
            w = self.scratch.w[here.slot, columns, k] if self.transposed else self.scratch.w[here.slot, k, columns]
            return lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)

        def finished(value: jax.Array) -> None:
            out[..., columns] = value.astype(out.dtype).reshape(groups, plan.batches, plan.rows, width)

        with jax.named_scope("multiply"):
            if total is None:
                finished(dot(0))
            else:
                total[...] = dot(0)

                @pl.loop(1, plan.depth - 1)
                def _(t: Any) -> None:
                    total[...] += dot(t)

                finished(total[...] + dot(plan.depth - 1))
        self._store(here, product, leaves, groups, piece, first)

    def _store(self, here: Row, product: Any, leaves: Any, groups: int, piece: Any, first: Any) -> None:
        """Starts the copies of what a product gave to their places, in its own code: there they cost no time."""
        plan, sem = self.plan, self.scratch.out_sem.at[leaves]

        def copy(q: int, columns: Any, width: int) -> None:
            within = pl.ds(0, width) if piece is None else pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
            there = pl.ds(columns.start + within.start, within.size)
            for i in range(groups):
                # Parts are of different blocks.
                for p in range(plan.parts.count) if plan.products == 1 else [self._part(product)]:
                    inside = plan.parts.in_group(p) if plan.products == 1 else self._within(product)
                    source = self.scratch.out.at[here.place + first + i, *inside, within]
                    batches, block, rows = self.hops.place(p, here.group + first + i)
                    if plan.products > 1:
                        batches, rows = self._within(product, self.hops.chunk(here.group))
                    place = self.ys[q].at[batches, block, rows, there]
                    pltpu.make_async_copy(source, place, sem).start()

        with jax.named_scope("store"):
            self._columns(here.column, copy)

    def _stored(self, number: Any) -> None:
        """Waits until the result of an item, by number, has left: by its size, in one wait for all copies."""
        plan, sem = self.plan, self.scratch.out_sem.at[number & (LEAVING - 1)]
        static = isinstance(number, int)
        here = Row.of(plan.order.items[number], plan.pieces) if static else self._at(number)

        def wait(groups: int, width: int) -> None:
            tiles = self.scratch.out.at[pl.ds(0, groups), :, :, pl.ds(0, width)]
            pltpu.make_async_copy(tiles, tiles, sem).wait()

        def whole(q: int, columns: Any, width: int) -> None:
            if static:
                wait(here.span, width)
            else:
                for span in plan.spans:
                    pl.when(here.span == span)(functools.partial(wait, span, width))

        def in_pieces(span: int) -> None:
            pl.loop(here.begin, here.end)(lambda _: wait(span, PIECE))

        if not static or here.span > 0:
            self._columns(jnp.int32(here.column), whole)
        if static and here.span < 0:
            in_pieces(-here.span)
        elif not static and plan.together:

            @_sometimes(here.span < 0)
            def _() -> None:
                for span in plan.together:
                    pl.when(here.span == -span)(functools.partial(in_pieces, span))

    def _copies_own(self, chunk: Any, do: str) -> None:
        """Copies a group of the own rows to vector memory, or waits for it."""
        parts, sem = self.plan.parts, self.scratch.x_sem.at[chunk]
        for p in range(parts.count):
            place = self.scratch.x.at[chunk, *parts.in_group(p)]
            getattr(pltpu.make_async_copy(self.hops.x.at[parts.in_block(p, chunk)], place, sem), do)()

    def _fetch(self, column: Any, slot: Any) -> None:
        """Starts the copies of all pieces of a tile of w."""
        with jax.named_scope("fetch"):
            pl.loop(0, self.plan.pieces)(lambda piece: self._copy_w(column, slot, piece, "start"))

    def _copy_w(self, column: Any, slot: Any, piece: Any, do: str) -> None:
        """Starts the copy of a piece of a tile, or of all of it where piece is None, or waits for it."""
        plan, tile = self.plan, self.scratch.w.at[slot]

        def copy(q: int, columns: Any, width: int) -> None:
            first: Any = 0
            if piece is not None and plan.pieces > 1:
                width, first = PIECE, pl.multiple_of(piece * PIECE, PIECE)
            there, here = pl.ds(columns.start + first, width), pl.ds(first, width)
            source = self.ws[q].at[there, :] if self.transposed else self.ws[q].at[:, there]
            part = tile.at[here, :] if self.transposed else tile.at[:, here]
            sem = self.scratch.w_sem.at[slot, 0 if piece is None else piece]
            getattr(pltpu.make_async_copy(source, part, sem), do)()

        self._columns(column, copy)

    def _wait_piece(self, here: Row, piece: Any) -> None:
        with jax.named_scope("wait"):
            self._copy_w(here.column, here.slot, piece, "wait")

    def _columns(self, column: Any, do: Callable[[int, Any, int], None]) -> None:
        """Calls do(which w, slice of its columns, width) for one tile: where all are alike, without a condition."""
        columns = self.plan.columns
        if len(columns.widths) == 1 and columns.widths[0] % columns.n == 0:
            do(0, pl.ds(pl.multiple_of(column * columns.n, columns.n), columns.n), columns.n)
        else:
            columns.at(column, do)

    def _copies_kept(self, group: Any, do: str) -> None:
        """Copies a group to the gathered x in HBM, or waits for it."""
        for p in range(self.plan.parts.count):
            source = self.scratch.x.at[group, *self.plan.parts.in_group(p)]
            place = self.hops.gathered.at[self.hops.place(p, group)]
            getattr(pltpu.make_async_copy(source, place, self.scratch.kept_sem), do)()

    def _part(self, product: Any) -> Any:
        """Of which part a product is, where a group has several."""
        return lax.div(product, self.plan.products // self.plan.parts.count)

    def _within(self, product: Any, chunk: Any = None) -> tuple[Any, Any]:
        """Batches and rows of a product in its group, or in its block: all, or some within one part."""
        plan = self.plan
        if plan.products == 1:
            return slice(None), slice(None)
        per_part = plan.products // plan.parts.count
        p, within = lax.div(product, per_part), lax.rem(product, per_part)
        alone = dataclasses.replace(plan.parts, chunks=1)
        batch, row = alone.origin(p) if chunk is None else plan.parts.origin(p, chunk)
        b, r = lax.div(within, plan.down), lax.rem(within, plan.down)
        rows = pl.ds(pl.multiple_of(row + r * plan.rows, plan.rows), plan.rows)
        return pl.ds(batch + b * plan.batches, plan.batches), rows

    def _at(self, number: Any) -> Row:
        """An item of the table, as traced scalars."""
        return Row(*(self.scratch.table[number * _FIELDS + field] for field in range(_FIELDS)))


def _sometimes(condition: Any) -> Callable[[Callable[[], None]], None]:
    """As `pl.when`, but as a loop, which is jumped over: what a condition holds would be predicated."""

    def run(do: Callable[[], None]) -> None:
        pl.loop(0, condition.astype(jnp.int32))(lambda _: do())

    return run
