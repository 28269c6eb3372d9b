"""all_gather_matmul where the gathered x stays in vector memory: `resident_plan` has its sizes, `staircase` the order.

Groups arrive in vector memory and are sent onward from there. A product contracts over all of k at once where its code
is short enough; only tiles of w come from HBM, and only the result goes there.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.gather.hops import Hops
from flaxasync.kernels.gather.resident_plan import OUT, PIECE, Plan
from flaxasync.kernels.gather.staircase import Item
from flaxasync.kernels.tiles import LANES

_FIELDS = len(dataclasses.fields(Item))  # in the table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Refs, inside the kernel; shapes, where it is called."""

    x: Any  # [groups, B, m, k] VMEM, all groups in the order of their arrival
    w: Any  # [slots, k, n], or [slots, n, k], VMEM
    total: Any  # [m, n] VMEM, float32 sum of a product in several tiles of k
    out: Any  # [OUT, span, batches, rows, n] VMEM, results of items that leave
    table: Any  # [items * fields] SMEM
    x_sem: Any  # [chunks]
    w_sem: Any  # [slots, pieces]
    out_sem: Any  # [OUT]
    kept_sem: Any  # of what is copied to the gathered x in HBM

    @classmethod
    def shapes(cls, plan: Plan, transposed: bool, dtype: Any) -> Any:
        dma, n, k = pltpu.SemaphoreType.DMA, plan.columns.n, plan.k * plan.depth
        total = (plan.most * plan.m, n) if plan.depth > 1 else (8, LANES)
        return cls(
            pltpu.VMEM((plan.groups, *plan.parts.group, k), dtype),
            pltpu.VMEM((plan.slots, *((n, k) if transposed else (k, n))), dtype),
            pltpu.VMEM(total, jnp.float32),
            pltpu.VMEM((OUT, plan.spans[-1], plan.batches, plan.rows, n), dtype),
            pltpu.SMEM((len(plan.order.items) * _FIELDS,), jnp.int32),
            dma((plan.parts.chunks,)),
            dma((plan.slots, plan.pieces)),
            dma((OUT,)),
            dma,
        )


class _Copies(tuple):
    """Copies that are started and waited for together."""

    def start(self) -> None:
        for copy in self:
            copy.start()

    def wait(self) -> None:
        for copy in self:
            copy.wait()


class Resident:
    """What one device does, item by item."""

    def __init__(self, plan: Plan, hops: Hops, ws: Any, ys: Any, transposed: bool, keep: bool, scratch: Scratch):
        self.plan, self.hops, self.ws, self.ys = plan, hops, ws, ys
        self.transposed, self.keep, self.scratch = transposed, keep, scratch
        hops.kept = scratch.x

    def begin(self) -> None:
        """What needs no neighbour: the own rows, the first tiles of w, the table."""
        self._copy_own(0).start()
        for slot, column in enumerate(self.plan.order.loads):
            self._fetch(column, slot)
            if slot == 0:
                for chunk in range(1, self.plan.parts.chunks):
                    self._copy_own(chunk).start()
        for number, item in enumerate(self.plan.order.items):
            for field, value in enumerate(dataclasses.astuple(item)):
                self.scratch.table[number * _FIELDS + field] = value

    def run(self) -> None:
        self._copy_own(0).wait()
        self.hops.send(0)  # from vector memory: HBM has enough to do
        if self.keep:
            self._copies_kept(0, "start")
        pl.loop(0, len(self.plan.order.items))(self.item)
        with jax.named_scope("finish"):
            stores = len(self.plan.order.items) * self.plan.products
            for number in range(max(0, stores - OUT), stores):
                self._stored(jnp.int32(number))
            self.hops.finish()
            if self.keep:
                for group in range(self.plan.groups):
                    self._copies_kept(group, "wait")

    def item(self, number: Any) -> None:
        """Receives a group, fetches a tile of w, where the table says so; multiplies."""
        here, plan = self._at(number), self.plan

        @pl.loop(0, jnp.minimum(here.receives, 1))  # a loop, which is jumped over: a condition would be predicated
        def _(_: Any) -> None:
            for chunk in range(1, plan.parts.chunks):
                pl.when(here.receives == chunk)(self._copy_own(chunk).wait)

            pl.when(here.receives >= plan.parts.chunks)(lambda: self.hops.receive(here.receives))
            self.hops.send(here.receives)
            if self.keep:
                self._copies_kept(here.receives, "start")

        pl.when(here.fetches >= 0)(lambda: self._fetch(here.fetches, here.into))

        @pl.loop(0, plan.products)
        def _(product: Any) -> None:
            stores = number * plan.products + product
            slot = stores & (OUT - 1)
            pl.when(stores >= OUT)(lambda: self._stored(stores - OUT))

            @pl.when(here.whole == 1)
            def _() -> None:
                if plan.pieces > 1:
                    pl.loop(here.awaited, plan.pieces)(lambda piece: self._wait_piece(here, piece))
                else:
                    pl.when((here.awaited == 0) & (product == 0))(lambda: self._wait_piece(here, 0))
                for span in plan.spans[: plan.spans.index(plan.most)]:
                    one = functools.partial(self._multiply, here, product, slot, span)
                    pl.when(here.span == span)(one)
                times = here.span >> (plan.most.bit_length() - 1)
                pl.loop(0, times)(lambda i: self._multiply(here, product, slot, plan.most, first=i * plan.most))

            @pl.when(here.whole == 0)
            def _() -> None:
                @pl.loop(here.begin, here.end)
                def _(piece: Any) -> None:
                    pl.when(piece >= here.awaited)(lambda: self._wait_piece(here, piece))
                    self._multiply(here, product, slot, 1, piece)

            self._store(here, product, slot)

    def _multiply(
        self, here: Item, product: Any, out_slot: Any, groups: int, piece: Any = None, first: Any = 0
    ) -> None:
        """Some groups of an item, or some rows of one group, by a tile of w or a piece of it."""
        plan, (batches, rows) = self.plan, self._within(product)
        columns = slice(0, plan.columns.n) if piece is None else pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
        width = plan.columns.n if piece is None else PIECE
        out = self.scratch.out.at[out_slot, pl.ds(first, groups)]
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
                return
            total[...] = dot(0)

            @pl.loop(1, plan.depth - 1)
            def _(t: Any) -> None:
                total[...] += dot(t)

            finished(total[...] + dot(plan.depth - 1))

    def _store(self, here: Item, product: Any, slot: Any) -> None:
        """Starts the copies of what an item's product gave to their places."""
        plan, sem = self.plan, self.scratch.out_sem.at[slot]

        def copy(q: int, columns: Any, width: int) -> None:
            def to(i: Any, p: Any, inside: tuple[Any, Any], first: Any, width: int) -> None:
                source = self.scratch.out.at[slot, i, *inside, pl.ds(first, width)]
                batches, block, rows = self.hops.place(p, here.group + i)
                if plan.products > 1:
                    batches, rows = self._within(product, self.hops.chunk(here.group))
                place = self.ys[q].at[batches, block, rows, pl.ds(columns.start + first, width)]
                pltpu.make_async_copy(source, place, sem).start()

            def all_parts(i: Any, first: Any, width: int) -> None:
                if plan.products > 1:
                    to(i, lax.div(product, plan.products // plan.parts.count), (slice(None), slice(None)), first, width)
                    return
                for p in range(plan.parts.count):  # which are of different blocks
                    to(i, p, plan.parts.in_group(p), first, width)

            @pl.when(here.whole == 1)
            def _() -> None:
                pl.loop(0, here.span)(lambda i: all_parts(i, 0, width))

            if plan.pieces > 1:

                @pl.when(here.whole == 0)
                def _() -> None:
                    @pl.loop(here.begin, here.end)
                    def _(piece: Any) -> None:
                        all_parts(0, pl.multiple_of(piece * PIECE, PIECE), PIECE)

        with jax.named_scope("store"):
            plan.columns.at(here.column, copy)

    def _stored(self, number: Any) -> None:
        """Waits until the result of a product has left: by its size, in one wait for all copies."""
        plan, slot = self.plan, number & (OUT - 1)
        here = self._at(number if plan.products == 1 else lax.div(number, plan.products))
        out, sem = self.scratch.out.at[slot], self.scratch.out_sem.at[slot]

        def wait(q: int, columns: Any, width: int) -> None:
            for span in plan.spans:
                tiles = out.at[pl.ds(0, span), :, :, pl.ds(0, width)]
                pl.when((here.whole == 1) & (here.span == span))(pltpu.make_async_copy(tiles, tiles, sem).wait)

        plan.columns.at(here.column, wait)
        if plan.pieces > 1:

            @pl.when(here.whole == 0)
            def _() -> None:
                tile = out.at[0, :, :, pl.ds(0, PIECE)]
                pl.loop(here.begin, here.end)(lambda _: pltpu.make_async_copy(tile, tile, sem).wait())

    def _copy_own(self, chunk: int) -> "_Copies":
        """The copies of a group of the own rows, one for each part."""
        parts = self.plan.parts
        return _Copies(
            pltpu.make_async_copy(
                self.hops.x.at[parts.in_block(p, chunk)],
                self.scratch.x.at[chunk, *parts.in_group(p)],
                self.scratch.x_sem.at[chunk],
            )
            for p in range(parts.count)
        )

    def _fetch(self, column: Any, slot: Any) -> None:
        """Starts the copies of all pieces of a tile of w."""
        with jax.named_scope("fetch"):
            pl.loop(0, self.plan.pieces)(lambda piece: self._copy_w(column, slot, piece, "start"))

    def _copy_w(self, column: Any, slot: Any, piece: Any, do: str) -> None:
        """Starts the copy of a piece of a tile, or waits for it."""
        plan, tile = self.plan, self.scratch.w.at[slot]

        def copy(q: int, columns: Any, width: int) -> None:
            width = width if plan.pieces == 1 else PIECE
            first = pl.multiple_of(piece * PIECE, PIECE)
            there, here = pl.ds(columns.start + first, width), pl.ds(first, width)
            source = self.ws[q].at[there, :] if self.transposed else self.ws[q].at[:, there]
            part = tile.at[here, :] if self.transposed else tile.at[:, here]
            getattr(pltpu.make_async_copy(source, part, self.scratch.w_sem.at[slot, piece]), do)()

        plan.columns.at(column, copy)

    def _wait_piece(self, here: Item, piece: Any) -> None:
        with jax.named_scope("wait"):
            self._copy_w(here.column, here.slot, piece, "wait")

    def _copies_kept(self, group: Any, do: str) -> None:
        """Copies a group to the gathered x in HBM, or waits for it."""
        for p in range(self.plan.parts.count):
            source = self.scratch.x.at[group, *self.plan.parts.in_group(p)]
            place = self.hops.gathered.at[self.hops.place(p, group)]
            getattr(pltpu.make_async_copy(source, place, self.scratch.kept_sem), do)()

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

    def _at(self, number: Any) -> Item:
        """An item of the table, as traced scalars."""
        return Item(*(self.scratch.table[number * _FIELDS + field] for field in range(_FIELDS)))
