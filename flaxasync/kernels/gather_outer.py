"""all_gather(x).T @ dy as one Pallas TPU kernel: the weights' gradient of all_gather_matmul, while x travels again.

```
x     [B, m, k]       this device's rows                (R devices on the axis, B batches)
dy_i  [B, R*m, n_i]   all rows, this device's columns; several share one trip of x
dw_i  [k, n_i]        sums over all rows

chunk   0 of columns of x         1                            ...
core    own  s=1  s=2  ... R-1    own  s=1  ...                products with rows of dy; float32 sums of all columns
links    s=1  s=2  ...      | s=1  s=2                         each block one hop further, just before it is multiplied
```

A chunk of columns of x goes around the ring block by block, half of its rows each way, and is multiplied by all of dy's
columns where it is: its rows of dw are summed in vector memory and stored once. A hop moves a block while the block
before is multiplied, from the first chunk on, so that no chunk is waited for.

x is transposed first, by XLA and once: the matrix unit takes a left operand whose contraction lies along lanes.

Arrivals have two sets of places, for even and for odd chunks, and nothing is acknowledged. In each direction blocks
pass all devices in lockstep: when a device begins a chunk, its neighbour onward has begun the chunk before, and has
read, and sent on, what came in the chunk before that. `_Body.begin` relies on it: it waits for the send of the step
before, and every product waits for its tiles before it begins the next step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.neighbours import HBM, check_ring, enter
from flaxasync.kernels.outer_walk import SETS, OuterPlace, OuterWalk, Scratch, plan_outer
from flaxasync.kernels.row_tiles import PART, landed
from flaxasync.kernels.tiles import LANES, Tiles, check_operand, largest_side, split, vmem_limit
from flaxasync.transport.devices import at


def gather_outer(
    x: jax.Array,
    dys: tuple[jax.Array, ...],
    axis_name: str,
    *,
    tiles: Tiles | None = None,
    directions: int = 2,
    collective_id: int | None = None,
) -> tuple[jax.Array, ...]:
    """Returns dws, of x's dtype; see the file. Inside `jax.shard_map`.

    Args:
      x: [B, m, k], float32 or bfloat16, in whole hardware tiles; B*m a multiple of 128.
      dys: each [B, R*m, n_i], of x's dtype.
      axis_name: the mesh axis, of two devices or more.
      tiles: m columns of x in a chunk, k rows of x in a product, n columns of dy in one; at most.
      directions: 1, or 2 to send half of the rows each way.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes that do not fit each other or hardware tiles; tiles that exceed vector memory; an axis of size
        one.
      NotImplementedError: another dtype.
    """
    caller = "gather_outer"
    size = check_ring(caller, axis_name, directions)
    _check(caller, x, dys, size)
    (batch, m, k), dtype = x.shape, x.dtype
    widths = [dy.shape[2] for dy in dys]
    walk, need = plan_outer(caller, batch, m, k, widths, tiles, size, directions, dtype)
    kind = jax.typeof(x).mat
    kind = kind.update(varying=kind.varying.union(*(jax.typeof(dy).mat.varying for dy in dys)))
    shapes = [(k, n) for n in widths] + [(min(SETS, walk.chunks), size - 1, walk.chunk, batch * m)]
    itemsize = dtype.itemsize
    *dws, _ = pl.pallas_call(
        functools.partial(_kernel, axis_name, walk, collective_id),
        out_shape=[jax.ShapeDtypeStruct(s, dtype, manual_axis_type=kind) for s in shapes],
        in_specs=[HBM] * (1 + len(dys)),
        out_specs=[HBM] * len(shapes),
        scratch_shapes=[Scratch.shapes(walk, dtype)],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=vmem_limit(need)),
        cost_estimate=pl.CostEstimate(
            flops=2 * size * x.size * sum(widths),
            transcendentals=0,
            bytes_accessed=itemsize * ((walk.chunks * size * batch * m + k) * sum(widths) + (3 * size - 2) * x.size),
            remote_bytes_transferred=(size - 1) * x.size * itemsize,
        ),
        name=caller,
    )(x.reshape(batch * m, k).T, *(dy.reshape(batch, size, m, -1) for dy in dys))
    return tuple(dws)


def _check(caller: str, x: jax.Array, dys: tuple[jax.Array, ...], size: int) -> None:
    if x.ndim != 3 or not dys or any(dy.ndim != 3 or dy.shape[:2] != (x.shape[0], size * x.shape[1]) for dy in dys):
        raise ValueError(
            f"{caller} needs x [B, m, k] and dy [B, {size}*m, n]: got {list(x.shape)} and "
            f"{[list(dy.shape) for dy in dys]}"
        )
    for name, operand in (("x", x), *(("dy", dy) for dy in dys)):
        check_operand(caller, f"a batch of {name}", operand.shape[1:], operand.dtype)
        if operand.dtype != x.dtype:
            raise ValueError(f"{caller} needs operands of one dtype: got {x.dtype} and {operand.dtype}; cast them")
    check_operand(caller, "a batch of x", x.shape[1:], x.dtype)
    if x.shape[0] * x.shape[1] % LANES:
        raise ValueError(
            f"{caller} needs rows of x that are a multiple of {LANES} in all batches together: got "
            f"{x.shape[0]} * {x.shape[1]}; pad x"
        )


def _kernel(
    axis_name: str,
    walk: OuterWalk,
    collective_id: int | None,
    *refs: Any,  # x [k, B*m] HBM; dys [B, R, m, n_i] HBM; dws [k, n_i] HBM; places [sets, R-1, chunk, B*m] HBM; scratch
) -> None:
    count = len(walk.columns)
    body = _Body(axis_name, walk, refs[0], refs[1 : 1 + count], refs[1 + count : 1 + 2 * count], *refs[-2:])
    tag = f"gather_outer {axis_name} {walk.ways} {count}"
    enter(tag, [at(axis_name, -shift) for shift in body.shifts], collective_id)
    body.begin(walk.at(0))
    body.fetch(walk.at(0))
    pl.loop(0, walk.products)(body.product)
    body.finish()


class _Body:
    """What one device does, product by product: the names that all of its parts need."""

    def __init__(self, axis_name: str, walk: OuterWalk, *refs: Any) -> None:
        self.axis_name, self.walk, (self.x, self.dys, self.dws, self.places, self.scratch) = axis_name, walk, refs
        self.index = lax.axis_index(axis_name)
        self.shifts = (1, -1)[: walk.ways]

    def product(self, p: Any) -> None:
        """Fetches for the next product, multiplies, and stores what is finished."""
        walk, scratch = self.walk, self.scratch
        here, following = walk.at(p), walk.at(p + 1)
        with jax.named_scope("wait"):
            pl.when(here.j == 0)(lambda: landed(scratch.x.at[here.x_slot], scratch.x_sem.at[here.x_slot]))
            landed(scratch.y.at[here.y_slot], scratch.y_sem.at[here.y_slot])

        @pl.when(p + 1 < walk.products)
        def _() -> None:
            pl.when((following.i == 0) & (following.j == 0))(lambda: self.begin(following))
            self.fetch(following)

        self.multiply(here)

    def begin(self, place: OuterPlace) -> None:
        """Begins a step: waits for what arrives in it and for what was sent in the one before, and sends on."""

        def hops(way: int, shift: int) -> None:
            before = self._hop(place, jnp.maximum(place.step - 1, 0), way, shift, own=True)
            pl.when(place.step > 0)(lambda: before.wait())
            onward = (place.step > 0) & (place.step < self.walk.size - 1)
            pl.when(onward)(lambda: self._hop(place, place.step, way, shift).start())
            pl.when(place.step == 0)(lambda: self._hop(place, place.step, way, shift, own=True).start())

        with jax.named_scope("hop"):
            for way, shift in enumerate(self.shifts):
                hops(way, shift)

    def fetch(self, place: OuterPlace) -> None:
        """Starts the copies of a product's tiles."""
        scratch, walk = self.scratch, self.walk
        slot, tile = scratch.x_sem.at[place.x_slot], scratch.x.at[place.x_slot]
        lanes = pl.ds(pl.multiple_of(place.i * walk.rows.size, LANES), walk.rows.size)
        with jax.named_scope("fetch"):

            @pl.when(place.j == 0)
            def _() -> None:
                own = self.x.at[self._chunk(place), lanes]
                pl.when(place.step == 0)(lambda: pltpu.make_async_copy(own, tile, slot).start())

                @pl.when(place.step > 0)
                def _() -> None:
                    source = self.places.at[split(place.chunk, SETS)[1], place.step - 1, :, lanes]
                    pltpu.make_async_copy(source, tile, slot).start()

            batches, rows = walk.rows.at(place.i)
            owner = lax.rem(self.index + walk.size - place.step, walk.size)
            if walk.ways == 2:
                owner = jnp.where(place.way == 0, owner, lax.rem(self.index + place.step, walk.size))

            def copy(number: int, columns: Any) -> None:
                source = self.dys[number].at[batches, owner, rows, columns]
                tile, sem = scratch.y.at[place.y_slot], scratch.y_sem.at[place.y_slot]
                pltpu.make_async_copy(source, tile, sem).start()

            self._on_column(place, copy)

    def multiply(self, here: OuterPlace) -> None:
        """Adds a product to its sum; the last one rounds and stores it."""
        scratch, walk = self.scratch, self.walk
        side = largest_side(walk.chunk, PART, LANES)
        number = here.chunk * walk.across + here.j
        _, room = split(number, 2)
        first = (here.step == 0) & (here.i == 0)
        last = (here.step == walk.size - 1) & (here.i == walk.rows.count - 1)

        def each(use: Any) -> None:
            pl.loop(0, walk.chunk // side)(lambda g: use(pl.ds(pl.multiple_of(g * side, side), side)))

        def product(part: Any) -> jax.Array:
            y = scratch.y[here.y_slot].reshape(walk.rows.size, walk.n)
            return jnp.dot(scratch.x[here.x_slot, part, :], y, preferred_element_type=jnp.float32)

        def store(part: Any) -> None:
            scratch.total[here.j, part, :] = product(part)

        def add(part: Any) -> None:
            scratch.total[here.j, part, :] += product(part)

        def end(part: Any) -> None:
            total = scratch.total[here.j, part, :] + product(part)
            scratch.leaving[room, part, :] = total.astype(scratch.leaving.dtype)

        with jax.named_scope("multiply"):
            pl.when(first)(lambda: each(store))
            pl.when(jnp.logical_not(first | last))(lambda: each(add))

            @pl.when(last)
            def _() -> None:
                pl.when(number >= 2)(lambda: landed(scratch.leaving.at[room], scratch.leave_sem.at[room]))
                each(end)

                def put(number: int, columns: Any) -> None:
                    place = self.dws[number].at[self._chunk(here), columns]
                    pltpu.make_async_copy(scratch.leaving.at[room], place, scratch.leave_sem.at[room]).start()

                self._on_column(here, put)

    def finish(self) -> None:
        """Waits for what is still leaving."""
        with jax.named_scope("finish"):
            for room in range(min(2, self.walk.chunks * self.walk.across)):
                landed(self.scratch.leaving.at[room], self.scratch.leave_sem.at[room])

    def _chunk(self, place: OuterPlace) -> Any:
        return pl.ds(pl.multiple_of(place.chunk * self.walk.chunk, LANES), self.walk.chunk)

    def _on_column(self, place: OuterPlace, use: Any) -> None:
        """Calls `use(number of a dy, its columns)` for the dy that a tile of columns lies in."""
        first = 0
        for number, count in enumerate(self.walk.columns):
            columns = pl.ds(pl.multiple_of((place.j - first) * self.walk.n, LANES), self.walk.n)
            if len(self.walk.columns) == 1:
                use(number, columns)
            else:
                here = (place.j >= first) & (place.j < first + count)
                pl.when(here)(functools.partial(use, number, columns))
            first += count

    def _hop(self, place: OuterPlace, step: Any, way: int, shift: int, *, own: bool = False) -> Any:
        """The transfer of a block's half that begins in a step: from where it arrived, or from x."""
        first, count = (v * self.walk.rows.size for v in self.walk.runs[way])
        turn, lanes = split(place.chunk, SETS)[1], pl.ds(first, count)
        source = self.x.at[self._chunk(place), lanes] if own else self.places.at[turn, step - 1, :, lanes]
        return pltpu.make_async_remote_copy(
            source,
            self.places.at[turn, step, :, lanes],
            self.scratch.send_sem.at[way],
            self.scratch.recv_sem.at[turn, way, step],
            device_id=at(self.axis_name, shift),
        )
