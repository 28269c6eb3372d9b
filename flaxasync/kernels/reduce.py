"""Reduce-scatter and all-reduce along one mesh axis as Pallas TPU kernels: a grid over tiles, hops in vector memory.

Every tile of the result runs its own ring, while the next tile's operand comes from HBM and the last one's result goes
there: what travels never lies in HBM. Partial sums travel in x's dtype and are added in float32.

```
hop s       device i sends what it has of block i - s - 1, and receives what its neighbour has of block i - s - 2
the end     device i has block i, summed over all devices
all-reduce  a block is a part of a tile's rows; the summed parts go around once more
```

Places for arrivals are not acknowledged. In the reduction every device adds to every sum, so when a device has its sum
of one tile, its neighbour has *begun* that tile, and has done with the tile before: two sets of places, used in turn,
suffice. In the second trip of an all-reduce one set does: it begins when the own sum is there, to which the neighbour
added its share after it had stored the tile before.

Tiles may hang over the edges of the result. What lies there is whatever memory held; it travels, too, and is added up,
but only to what lies there on other devices, and it is never stored.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.neighbours import check_ring, enter, halves, type_over, ways
from flaxasync.kernels.tiles import (
    LANES,
    Tiles,
    check_operand,
    check_vmem,
    fitting,
    largest_side,
    sublanes,
    vmem_limit,
)
from flaxasync.mesh import device_at

TILES = Tiles(1024, 1, 1024)  # of the result; there is no k
EXTRA = 32  # rows, or columns, in whose time the hops of a tile are begun and ended
NEAR = 1.03  # tiles that divide are taken, where they cost no more than that


def reduce_scatter(
    x: jax.Array,
    axis_name: str,
    *,
    tiles: Tiles | None = None,
    directions: int | None = 1,
    collective_id: int | None = None,
) -> jax.Array:
    """Sums over the R devices on an axis; each gets its block of rows: [R*m, n] -> [m, n]. Inside `jax.shard_map`.

    Args:
      x: [R*m, n], float32 or bfloat16; m and n in whole hardware tiles.
      axis_name: the mesh axis.
      tiles: m and n of a tile of the result, at most; those used may hang over its edges. R tiles of x lie in vector
        memory. None is `TILES`, or what the chip's vector memory has room for.
      directions: 1, or 2 to send half of the columns each way; None is 2 where that is faster and n can be halved.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes that are no whole hardware tiles, or do not divide; tiles that exceed vector memory; an axis
        of size one.
      NotImplementedError: another dtype.
    """
    size = check_ring("reduce_scatter", axis_name, directions or 1)
    check_operand("reduce_scatter", "x", x.shape, x.dtype)
    rows, n = x.shape
    if rows % (size * sublanes(x.dtype)):
        raise ValueError(
            f"reduce_scatter gives each of the {size} devices on {axis_name!r} whole hardware tiles of rows: got "
            f"{rows} rows of {x.dtype}, needed a multiple of {size * sublanes(x.dtype)}; pad x"
        )
    m, directions = rows // size, ways(size, n, LANES, directions)
    lanes = LANES * directions if n >= LANES * directions else LANES  # a tile, too, is halved

    def cut(most: Tiles) -> Tiles:
        return Tiles(_side(m, most.m, sublanes(x.dtype)), 1, _side(n, most.n, lanes))

    def form(tile: Tiles) -> _Ring:
        return _Ring("reduce_scatter", axis_name, size, tile.m, tile.n, directions, collective_id, x.dtype)

    tile = fitting(tiles, TILES, cut, lambda t: form(t).need(t, 2 * size + 2))
    ring, grid = form(tile), (pl.cdiv(m, tile.m), pl.cdiv(n, tile.n))

    def body(x_tile: Any, o_tile: Any, *scratch: Any) -> None:
        ring.enter()
        ring.reduce(lambda block, columns: x_tile[block, :, columns], scratch, o_tile)

    moved = x.size * x.dtype.itemsize
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype, manual_axis_type=jax.typeof(x).mat),
        grid=grid,
        in_specs=[pl.BlockSpec((size, tile.m, tile.n), lambda i, j: (0, i, j))],
        out_specs=pl.BlockSpec((tile.m, tile.n), lambda i, j: (i, j)),
        scratch_shapes=ring.scratch(),
        compiler_params=ring.compiler_params(tile, 2 * size + 2),
        cost_estimate=pl.CostEstimate(
            flops=x.size,
            transcendentals=0,
            bytes_accessed=moved + moved // size,
            remote_bytes_transferred=(size - 1) * math.prod(grid) * tile.m * tile.n * x.dtype.itemsize,
        ),
        name="reduce_scatter",
    )(x.reshape(size, m, n))


def all_reduce(
    x: jax.Array,
    axis_name: str,
    *,
    tiles: Tiles | None = None,
    directions: int | None = 1,
    collective_id: int | None = None,
) -> jax.Array:
    """Sums over the R devices on an axis, for each of them: [m, n] -> [m, n]. Inside `jax.shard_map`.

    The result's type says that it does not vary over the axis. Arguments and errors as `reduce_scatter`; m is R times a
    number of whole hardware tiles.
    """
    size = check_ring("all_reduce", axis_name, directions or 1)
    check_operand("all_reduce", "x", x.shape, x.dtype)
    m, n = x.shape
    unit = size * sublanes(x.dtype)
    if m % unit:
        raise ValueError(
            f"all_reduce cuts rows into parts for the {size} devices on {axis_name!r}: got {m} rows of {x.dtype}, "
            f"needed a multiple of {unit}; pad x"
        )
    directions = ways(size, n, LANES, directions)
    lanes = LANES * directions if n >= LANES * directions else LANES  # a tile, too, is halved

    def cut(most: Tiles) -> Tiles:
        return Tiles(_side(m, most.m, unit), 1, _side(n, most.n, lanes))

    def form(tile: Tiles) -> _Ring:
        return _Ring("all_reduce", axis_name, size, tile.m // size, tile.n, directions, collective_id, x.dtype)

    tile = fitting(tiles, TILES, cut, lambda t: form(t).need(t, 5))
    part, ring, grid = tile.m // size, form(tile), (pl.cdiv(m, tile.m), pl.cdiv(n, tile.n))

    def body(x_tile: Any, o_tile: Any, *scratch: Any) -> None:
        *reduction, whole, again_send, again_recv = scratch
        index = lax.axis_index(axis_name)

        def rows(block: Any) -> Any:
            return pl.ds(pl.multiple_of(block * part, sublanes(x.dtype)), part)

        ring.enter()
        ring.reduce(lambda block, columns: x_tile[rows(block), columns], reduction, whole.at[index])

        def hop(way: int, s: int) -> Any:
            shift, first, length = ring.parts[way]
            block = lax.rem(index + (size - s) * shift % size, size)
            place = whole.at[block, :, pl.ds(first, length)]
            sems = again_send.at[way], again_recv.at[way, s]
            return pltpu.make_async_remote_copy(place, place, *sems, device_id=device_at(axis_name, shift))

        for s in range(size - 1):
            with jax.named_scope("gather"):
                for wait in (False, True):
                    for way in range(len(ring.parts)):
                        hop(way, s).wait() if wait else hop(way, s).start()
        for block in range(size):
            o_tile[block * part : (block + 1) * part, :] = whole[block]

    dma, moved = pltpu.SemaphoreType.DMA, x.size * x.dtype.itemsize
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype, manual_axis_type=type_over(x, axis_name)),
        grid=grid,
        in_specs=[pl.BlockSpec((tile.m, tile.n), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((tile.m, tile.n), lambda i, j: (i, j)),
        scratch_shapes=[
            *ring.scratch(),
            pltpu.VMEM((size, part, tile.n), x.dtype),
            dma((directions,)),
            dma((directions, size - 1)),
        ],
        compiler_params=ring.compiler_params(tile, 5),
        cost_estimate=pl.CostEstimate(
            flops=x.size,
            transcendentals=0,
            bytes_accessed=2 * moved,
            remote_bytes_transferred=2 * (size - 1) * math.prod(grid) * part * tile.n * x.dtype.itemsize,
        ),
        name="all_reduce",
    )(x)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """One reduction of [R, m, n] in vector memory, used for every tile of a grid."""

    caller: str
    axis_name: str
    size: int
    m: int
    n: int
    directions: int
    collective_id: int | None
    dtype: Any

    @functools.cached_property
    def parts(self) -> list[tuple[int, int, int]]:
        return halves(self.caller, "columns of a tile", self.n, LANES, self.directions)

    def scratch(self) -> list[Any]:
        """What is sent, two sets of places for arrivals, their semaphores."""
        dma, hops, ways = pltpu.SemaphoreType.DMA, self.size - 1, self.directions
        return [
            pltpu.VMEM((self.m, self.n), self.dtype),
            pltpu.VMEM((2, hops, self.m, self.n), self.dtype),
            dma((ways,)),
            dma((2, ways, hops)),
        ]

    def need(self, tile: Tiles, tiles_held: int, of: Tiles | None = None) -> int:
        """Bytes of vector memory of a kernel that holds a number of tiles beside the scratch; or of other tiles."""
        size, of = jnp.dtype(self.dtype).itemsize, of or tile
        scale = self.m * self.n / (tile.m * tile.n)
        held = tiles_held + (2 * self.size - 1) * scale
        return int(held * of.m * of.n * size + 8 * of.m * of.n)

    def compiler_params(self, tile: Tiles, tiles_held: int) -> Any:
        """With the vector memory of such a kernel."""
        need = check_vmem(self.caller, tile, lambda t: self.need(tile, tiles_held, t))
        return pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            collective_id=self.collective_id,
            vmem_limit_bytes=vmem_limit(need),
        )

    def enter(self) -> None:
        """The barrier, before the first tile."""
        first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
        senders = [device_at(self.axis_name, -shift) for shift, *_ in self.parts]
        name = f"{self.caller} {self.axis_name} {self.directions}"
        pl.when(first)(lambda: enter(name, senders, self.collective_id))

    def reduce(self, operand: Any, scratch: Any, o_ref: Any) -> None:
        """o = the sum over all devices of operand(this device's index, columns)."""
        sent, arrived, send_sem, recv_sem = scratch
        index = lax.axis_index(self.axis_name)
        turn = _turn()

        def total(way: int, s: int) -> jax.Array:
            """Of the block that is sent in hop s: what this device has, and what has arrived."""
            shift, first, length = self.parts[way]
            columns = pl.ds(first, length)
            block = lax.rem(index + (2 * self.size - s - 1) * shift % self.size, self.size)
            own = operand(block, columns).astype(jnp.float32)
            return own if s == 0 else own + arrived[turn, s - 1, :, columns].astype(jnp.float32)

        def hop(way: int, s: int) -> Any:
            shift, first, length = self.parts[way]
            columns = pl.ds(first, length)
            return pltpu.make_async_remote_copy(
                sent.at[:, columns],
                arrived.at[turn, s, :, columns],
                send_sem.at[way],
                recv_sem.at[turn, way, s],
                device_id=device_at(self.axis_name, shift),
            )

        ways = range(len(self.parts))
        for s in range(self.size - 1):
            with jax.named_scope("reduce"):
                for way in ways:
                    sent[:, pl.ds(*self.parts[way][1:])] = total(way, s).astype(self.dtype)
                    hop(way, s).start()
                for way in ways:
                    hop(way, s).wait()
        for way in ways:
            o_ref[:, pl.ds(*self.parts[way][1:])] = total(way, self.size - 1).astype(self.dtype)


def _side(side: int, most: int, unit: int) -> int:
    """Of tiles that divide a side, or of those that cover it in the least time, where that is less by far."""

    def cost(tile: int) -> int:
        return pl.cdiv(side, tile) * (tile + EXTRA)

    covering = min(range(unit, max(unit, min(most, side)) + 1, unit), key=cost)
    dividing = largest_side(side, most, unit) if side % unit == 0 else covering
    return dividing if cost(dividing) <= NEAR * cost(covering) else covering


def _turn() -> Any:
    """Which of the two sets of places a tile uses."""
    return lax.rem(pl.program_id(0) * pl.num_programs(1) + pl.program_id(1), 2)
