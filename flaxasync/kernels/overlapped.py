"""LHS[M_X, K_Y] . RHS[K_X, N] on 2 x 2 devices as one kernel in which every transfer hides behind a product.

```
x  [m, k]   this mesh row's rows, this mesh column's half of the contraction        m = M/2, k = K/2
w  [k, n]   the half of the contraction that this mesh *row* holds
o  [m, n]   this mesh row's rows of the product, the same in both mesh columns

on the diagonal (row index = column index) w is what a device multiplies; it also sends it to its neighbour on rows
off the diagonal w belongs to the other mesh column; the neighbour's w arrives piece by piece
```

Of its m rows a device keeps one half: it gives the sums of the other half to its neighbour on the column axis, adds
what the neighbour gives to its own half, and sends the finished half over. `walk` has the order. Three streams run
beside the products: w over one axis; sums, then results, over the other. Sums and results leave from vector memory.

No buffer is written twice from outside, so nothing is acknowledged: pieces of w, sums and results have a place each.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.gemm import cost
from flaxasync.kernels.neighbours import HBM, enter, type_over
from flaxasync.kernels.scratch import KEPT, Scratch, scratch_bytes
from flaxasync.kernels.tiles import LANES, Tiles, check_vmem, largest_side, sublanes, vmem_limit
from flaxasync.kernels.walk import Place, Walk
from flaxasync.transport.devices import at

TILES = Tiles()
GROUP = 4096  # rows whose sums stay in vector memory, at most
AHEAD = 2  # chunks of w that are on their way before they are used
SEMAPHORES = 448  # that may be used for what arrives: libtpu 0.0.51 has 512 for a kernel


def overlapped(
    x: jax.Array,
    w: jax.Array,
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    tiles: Tiles = TILES,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns o; see the file. Both axes have two devices; shapes are whole hardware tiles, m two of them.

    Args:
      x: [m, k].
      w: [k, n].
      axis_names: of rows and of columns of the mesh.
      tiles: of a step, at most; those used divide m/2, k and n.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: tiles that exceed vector memory.
      NotImplementedError: more tiles than there are semaphores.
    """
    (m, k), n = x.shape, w.shape[1]
    half, rows = m // 2, sublanes(x.dtype)
    tiles = Tiles(largest_side(half, tiles.m, rows), largest_side(k, tiles.k, LANES), largest_side(n, tiles.n, LANES))
    group = largest_side(half, max(GROUP, tiles.m), tiles.m)
    walk = Walk(n // tiles.n, half // group, group // tiles.m, k // tiles.k)
    arrivals = walk.chunks * (walk.depth + walk.groups * walk.rows)
    if arrivals > SEMAPHORES:
        raise NotImplementedError(
            f"overlapped has a semaphore for each piece that arrives, and a TPU has {SEMAPHORES} for them: "
            f"x {list(x.shape)} and w {list(w.shape)} in tiles of m={tiles.m}, k={tiles.k}, n={tiles.n} are {arrivals} "
            "pieces; use larger tiles, a loop over columns of w, or backend='serial'"
        )
    scratch = Scratch.shapes(tiles, walk, x.dtype)
    need = check_vmem("overlapped", tiles, lambda t: scratch_bytes(t, group // t.m, x.dtype))
    kind = type_over(x, axis_names[1])
    size = x.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_kernel, axis_names, walk, tiles, collective_id),
        out_shape=[jax.ShapeDtypeStruct(s, x.dtype, manual_axis_type=kind) for s in ((m, n), (k, n), (half, n))],
        in_specs=[HBM, HBM],
        out_specs=[HBM, HBM, HBM],
        scratch_shapes=[scratch],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=vmem_limit(need)),
        cost_estimate=cost(tiles, m, k, n, size, sent=(w.size + m * n) * size, moved=(w.size + m * n) * size),
        name="overlapped_mesh_matmul",
    )(x, w)[0]


def _kernel(
    axis_names: tuple[str, str],
    walk: Walk,
    tiles: Tiles,
    collective_id: int | None,
    x_ref: Any,  # [m, k] HBM
    w_ref: Any,  # [k, n] HBM
    o_ref: Any,  # [m, n] HBM
    w_in: Any,  # [k, n] HBM: the w that a device off the diagonal multiplies
    sums_in: Any,  # [m/2, n] HBM: what the neighbour gave
    scratch: Scratch,
) -> None:
    body = _Body(axis_names, walk, tiles, x_ref, w_ref, o_ref, w_in, sums_in, scratch)
    enter("overlapped", [body.over_rows, body.over_columns], collective_id)
    for chunk in range(min(AHEAD, walk.chunks)):
        body.send_weights(chunk)
    body.fetch(walk.at(0), 0)
    pl.loop(0, walk.steps)(body.step)
    body.finish()


class _Body:
    """What one device does, step by step: the names that all of its parts need."""

    def __init__(
        self, axis_names: Any, walk: Walk, tiles: Tiles, x: Any, w: Any, o: Any, w_in: Any, sums_in: Any, scratch: Any
    ) -> None:
        self.walk, self.tiles, self.scratch = walk, tiles, scratch
        self.x, self.w, self.o, self.w_in, self.sums_in = x, w, o, w_in, sums_in
        row, column = (lax.axis_index(name) for name in axis_names)
        self.over_rows, self.over_columns = at(axis_names[0], 1), at(axis_names[1], 1)
        self.on_diagonal, self.off_diagonal = row == column, row != column
        self.half = x.shape[0] // 2
        self.column = column

    def step(self, s: Any) -> None:
        """Fetches for the next step, multiplies, and lets go what is finished."""
        here, walk = self.walk.at(s), self.walk
        slot = lax.rem(s, 2)

        @pl.when(s + 1 < walk.steps)
        def _() -> None:
            self.fetch(walk.at(s + 1), 1 - slot)

        @pl.when(here.give & (here.i == 0) & (here.t == 0) & (here.group == 0) & (here.chunk + AHEAD < walk.chunks))
        def _() -> None:
            self.send_weights(here.chunk + AHEAD)

        keep, last = jnp.logical_not(here.give), here.t == walk.depth - 1
        pl.when(keep & (here.t == max(0, walk.depth - 2)))(lambda: self.fetch_sums(here))
        with jax.named_scope("wait"):
            pltpu.make_async_copy(self.scratch.x.at[slot], self.scratch.x.at[slot], self.scratch.x_sem.at[slot]).wait()
            pl.when(here.w_new)(lambda: self._copy_w(self.w, here).wait())
        sums = jnp.where(here.give, here.i, 0)
        with jax.named_scope("multiply"):
            x_tile, w_tile = self.scratch.x.at[slot], self.scratch.w.at[here.w_slot]

            @pl.when(here.t == 0)
            def _() -> None:
                self.scratch.total[sums] = jnp.dot(x_tile[...], w_tile[...], preferred_element_type=jnp.float32)

            @pl.when(here.t > 0)
            def _() -> None:
                self.scratch.total[sums] += jnp.dot(x_tile[...], w_tile[...], preferred_element_type=jnp.float32)

        pl.when(here.give & last)(lambda: self.let_go_sums(here))
        pl.when(keep & last)(lambda: self.let_go_result(here))

    def fetch(self, place: Place, slot: Any) -> None:
        """Starts the copies of a step's tiles; of w where it is another one, and once it is there."""
        with jax.named_scope("fetch"):
            rows = pl.ds(self._row(place, jnp.where(place.give, 1 - self.column, self.column)), self.tiles.m)
            source = self.x.at[rows, self._piece(place.t)]
            pltpu.make_async_copy(source, self.scratch.x.at[slot], self.scratch.x_sem.at[slot]).start()
            pl.when(place.w_new & self.on_diagonal)(lambda: self._copy_w(self.w, place).start())

            @pl.when(place.w_new & self.off_diagonal)
            def _() -> None:
                first_use = place.give & (place.group == 0)
                pl.when(first_use)(lambda: self._weights(place.chunk, place.t).wait_recv())
                self._copy_w(self.w_in, place).start()

    def send_weights(self, chunk: Any) -> None:
        """On the diagonal: starts sending a chunk of w, piece by piece in the order of their use."""
        with jax.named_scope("send_weights"):
            pl.when(self.on_diagonal)(lambda: pl.loop(0, self.walk.depth)(lambda t: self._weights(chunk, t).start()))

    def fetch_sums(self, place: Place) -> None:
        with jax.named_scope("fetch_sums"):
            self._sums(place).wait_recv()
            self._copy_sums(place).start()

    def let_go_sums(self, place: Place) -> None:
        """Rounds finished sums of the neighbour's rows, and sends them."""
        with jax.named_scope("give"):
            pl.when((place.chunk > 0) | (place.group > 0))(lambda: self._sums(place).wait_send())
            self.scratch.given[place.i] = self.scratch.total[place.i].astype(self.scratch.given.dtype)
            self._sums(place).start()

    def let_go_result(self, place: Place) -> None:
        """Adds the neighbour's sums to the own ones, rounds, stores here and there."""
        with jax.named_scope("keep"):
            number = (place.chunk * self.walk.groups + place.group) * self.walk.rows + place.i
            slot = lax.rem(number, KEPT)
            store, send = self._store(place, slot), self._result(place, slot)

            @pl.when(number >= KEPT)
            def _() -> None:
                store.wait()
                send.wait_send()

            self._copy_sums(place).wait()
            added = self.scratch.added[...].astype(jnp.float32)
            self.scratch.kept[slot] = (self.scratch.total[0] + added).astype(self.scratch.kept.dtype)
            store.start()
            send.start()

    def finish(self) -> None:
        """Waits for all that is still leaving, and for the neighbour's half of the result."""
        walk = self.walk
        tiles = walk.chunks * walk.groups * walk.rows
        with jax.named_scope("finish"):
            place = walk.at(0)
            pl.loop(0, walk.rows)(lambda i: self._sums(dataclasses.replace(place, i=i)).wait_send())
            for slot in range(min(KEPT, tiles)):
                self._store(place, slot).wait()
                self._result(place, slot).wait_send()
            pl.loop(0, tiles)(lambda _: self._result(place, 0).wait_recv())
            pl.when(self.on_diagonal)(
                lambda: pl.loop(0, walk.chunks * walk.depth)(lambda _: self._weights(0, 0).wait_send())
            )

    def _row(self, place: Place, owner: Any) -> Any:
        """First row of a step's tile in the half of the rows that a mesh column owns."""
        tile = place.group * self.walk.rows + place.i
        return pl.multiple_of(owner * self.half + tile * self.tiles.m, self.tiles.m)

    def _columns(self, chunk: Any) -> Any:
        return pl.ds(pl.multiple_of(chunk * self.tiles.n, self.tiles.n), self.tiles.n)

    def _piece(self, t: Any) -> Any:
        return pl.ds(pl.multiple_of(t * self.tiles.k, self.tiles.k), self.tiles.k)

    def _copy_w(self, source: Any, place: Place) -> Any:
        tile = source.at[self._piece(place.t), self._columns(place.chunk)]
        slot = place.w_slot
        return pltpu.make_async_copy(tile, self.scratch.w.at[slot], self.scratch.w_sem.at[slot])

    def _weights(self, chunk: Any, t: Any) -> Any:
        where = self._piece(t), self._columns(chunk)
        sems = self.scratch.w_send, self.scratch.w_recv.at[chunk, t]
        return pltpu.make_async_remote_copy(self.w.at[where], self.w_in.at[where], *sems, device_id=self.over_rows)

    def _sums_place(self, place: Place) -> Any:
        return pl.ds(self._row(place, 0), self.tiles.m), self._columns(place.chunk)

    def _sums(self, place: Place) -> Any:
        recv = self.scratch.given_recv.at[place.chunk * self.walk.groups + place.group, place.i]
        return pltpu.make_async_remote_copy(
            self.scratch.given.at[place.i],
            self.sums_in.at[self._sums_place(place)],
            self.scratch.given_send.at[place.i],
            recv,
            device_id=self.over_columns,
        )

    def _copy_sums(self, place: Place) -> Any:
        source = self.sums_in.at[self._sums_place(place)]
        return pltpu.make_async_copy(source, self.scratch.added, self.scratch.added_sem)

    def _result_place(self, place: Place) -> Any:
        return self.o.at[pl.ds(self._row(place, self.column), self.tiles.m), self._columns(place.chunk)]

    def _store(self, place: Place, slot: Any) -> Any:
        here = self._result_place(place)
        return pltpu.make_async_copy(self.scratch.kept.at[slot], here, self.scratch.kept_store.at[slot])

    def _result(self, place: Place, slot: Any) -> Any:
        tile, there = self.scratch.kept.at[slot], self._result_place(place)
        sems = self.scratch.kept_send.at[slot], self.scratch.kept_recv
        return pltpu.make_async_remote_copy(tile, there, *sems, device_id=self.over_columns)
