"""The order of work in `gather_outer`, and what the kernel holds.

For each chunk of columns of x, the ring's steps; in each, tiles of rows, first those that travel one way, then those
that travel the other way; for each, all tiles of dy's columns.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.cut import Cut
from flaxasync.kernels.row_tiles import PART, RowTiles, in_parts
from flaxasync.kernels.tiles import LANES, Tiles, check_vmem, split, sublanes

TILES = Tiles(1024, 1024, 2048)  # columns of x, rows, columns of dy
SUMS = 32 * 2**20  # bytes of float32 sums, at most, where no tiles are given
SETS = 2  # of places for what arrives
ROOMS = 2  # for tiles of the result that leave


@dataclasses.dataclass(frozen=True)
class OuterPlace:
    """Where the walk is; scalars, traced or not."""

    chunk: Any
    step: Any
    i: Any  # tile of rows
    j: Any  # tile of columns, of all dy
    way: Any
    x_slot: Any
    y_slot: Any


@dataclasses.dataclass(frozen=True)
class OuterWalk:
    """All products of a kernel."""

    size: int  # of the ring
    rows: RowTiles  # of a block
    ways: int
    chunk: Cut  # columns of x, in chunks
    held: int  # of a chunk, those of one product in the code
    columns: Cut  # of all dy

    @property
    def chunks(self) -> int:
        return self.chunk.count

    @property
    def across(self) -> int:
        return self.columns.count

    @property
    def products(self) -> int:
        return self.chunks * self.size * self.rows.count * self.across

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """For each way, the first tile of rows that travels it, and how many do."""
        first = -(-self.rows.count // self.ways)
        return ((0, first), (first, self.rows.count - first))[: self.ways]

    @property
    def halves(self) -> tuple[tuple[int, int], ...]:
        """The same in rows."""
        sizes = self.rows.sizes
        return tuple((sum(sizes[:first]), sum(sizes[first : first + count])) for first, count in self.runs)

    def at(self, product: Any) -> OuterPlace:
        number, j = split(product, self.across)
        rest, i = split(number, self.rows.count)
        chunk, step = split(rest, self.size)
        way = jnp.where(i >= self.runs[0][1], 1, 0) if self.ways == 2 else jnp.int32(0)
        return OuterPlace(chunk, step, i, j, way, split(number, 2)[1], split(product, 2)[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Refs, inside the kernel; shapes, where it is called."""

    x: Any  # [2, chunk, rows] VMEM: tiles of the transposed x, this product's and the next one's
    y: Any  # [2, batches, rows, n] VMEM: tiles of dy, likewise
    total: Any  # [tiles of columns, chunk, n] VMEM: float32 sums
    leaving: Any  # [ROOMS, chunk, n] VMEM: rounded sums that leave
    x_sem: Any  # [2]
    y_sem: Any  # [2]
    leave_sem: Any  # [ROOMS]
    send_sem: Any  # [ways]
    recv_sem: Any  # [SETS, ways, R - 1]

    @classmethod
    def shapes(cls, walk: OuterWalk, dtype: Any) -> Any:
        """What to allocate: the same names, with shapes and memory spaces."""
        dma = pltpu.SemaphoreType.DMA
        chunk, n = walk.chunk.size, walk.columns.size
        return cls(
            pltpu.VMEM((2, chunk, walk.rows.size), dtype),
            pltpu.VMEM((2, walk.rows.batches, walk.rows.rows, n), dtype),
            pltpu.VMEM((walk.across, chunk, n), jnp.float32),
            pltpu.VMEM((ROOMS, chunk, n), dtype),
            dma((2,)),
            dma((2,)),
            dma((ROOMS,)),
            dma((walk.ways,)),
            dma((SETS, walk.ways, walk.size - 1)),
        )


def plan_outer(
    caller: str,
    batch: int,
    m: int,
    k: int,
    widths: list[int],
    tiles: Tiles | None,
    size: int,
    directions: int,
    dtype: Any,
) -> tuple[OuterWalk, int]:
    """The walk, and the bytes of vector memory it needs."""
    asked = tiles or TILES
    columns = Cut.of(widths, asked.n)
    most = asked.m if tiles else min(asked.m, max(LANES, SUMS // (4 * sum(widths))))
    chunk, held = in_parts(k, most, PART, LANES)
    rows = _row_tiles(batch, m, asked.k, dtype)
    if directions == 2 and rows.count == 1:
        rows = _row_tiles(batch, m, _half(batch, m), dtype)
    ways = directions if rows.count > 1 else 1
    walk = OuterWalk(size, rows, ways, Cut((k,), chunk, LANES), held, columns)
    itemsize = jnp.dtype(dtype).itemsize

    def need(t: Tiles) -> int:
        across = sum(-(-width // t.n) for width in widths)
        return itemsize * (2 * t.m * t.k + 2 * t.k * t.n + 2 * t.m * t.n) + 4 * t.m * t.n * (across + 1)

    return walk, check_vmem(caller, Tiles(chunk, rows.size, columns.size), need)


def _row_tiles(batch: int, m: int, most: int, dtype: Any) -> RowTiles:
    """Tiles whose rows, side by side, are whole lanes."""
    if m % LANES == 0:
        return RowTiles.of(batch, m, most, LANES, part=most)
    return RowTiles.of(batch, m, most, sublanes(dtype), LANES // math.gcd(m, LANES), part=most)


def _half(batch: int, m: int) -> int:
    """Rows of the larger half, in whole lanes, and in whole batches where there are several."""
    several = LANES // math.gcd(m, LANES)
    return -(-m // (2 * LANES)) * LANES if batch == 1 else -(-batch // (2 * several)) * several * m
