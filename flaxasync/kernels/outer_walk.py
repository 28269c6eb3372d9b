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

from flaxasync.kernels.row_tiles import RowTiles
from flaxasync.kernels.tiles import LANES, Tiles, check_vmem, largest_side, split, sublanes

TILES = Tiles(1024, 1024, 2048)  # columns of x, rows, columns of dy
SUMS = 32 * 2**20  # bytes of float32 sums, at most, where no tiles are given
SETS = 2  # of places for what arrives


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
    chunks: int
    columns: tuple[int, ...]  # tiles of columns of each dy
    chunk: int  # columns of x in a chunk
    n: int  # columns of a tile of dy

    @property
    def across(self) -> int:
        return sum(self.columns)

    @property
    def products(self) -> int:
        return self.chunks * self.size * self.rows.count * self.across

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """For each way, the first tile of rows that travels it, and how many do."""
        first = -(-self.rows.count // self.ways)
        return ((0, first), (first, self.rows.count - first))[: self.ways]

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
    leaving: Any  # [2, chunk, n] VMEM: rounded sums that leave
    x_sem: Any  # [2]
    y_sem: Any  # [2]
    leave_sem: Any  # [2]
    send_sem: Any  # [ways]
    recv_sem: Any  # [SETS, ways, R - 1]

    @classmethod
    def shapes(cls, walk: OuterWalk, dtype: Any) -> Any:
        """What to allocate: the same names, with shapes and memory spaces."""
        dma = pltpu.SemaphoreType.DMA
        return cls(
            pltpu.VMEM((2, walk.chunk, walk.rows.size), dtype),
            pltpu.VMEM((2, walk.rows.batches, walk.rows.rows, walk.n), dtype),
            pltpu.VMEM((walk.across, walk.chunk, walk.n), jnp.float32),
            pltpu.VMEM((2, walk.chunk, walk.n), dtype),
            dma((2,)),
            dma((2,)),
            dma((2,)),
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
    n = largest_side(math.gcd(*widths), asked.n, LANES)
    most = asked.m if tiles else min(asked.m, max(LANES, SUMS // (4 * sum(widths))))
    chunk = largest_side(k, most, LANES)
    rows = _row_tiles(batch, m, asked.k, dtype)
    if directions == 2 and rows.count == 1:
        rows = _row_tiles(batch, m, batch * m // 2, dtype)
    ways = directions if rows.count > 1 else 1
    walk = OuterWalk(size, rows, ways, k // chunk, tuple(width // n for width in widths), chunk, n)
    itemsize, total = jnp.dtype(dtype).itemsize, sum(widths)
    need = check_vmem(
        caller,
        Tiles(chunk, rows.size, n),
        lambda t: itemsize * (2 * t.m * t.k + 2 * t.k * t.n + 2 * t.m * t.n) + 4 * t.m * (total + t.n),
    )
    return walk, need


def _row_tiles(batch: int, m: int, most: int, dtype: Any) -> RowTiles:
    """Tiles whose rows, side by side, are whole lanes."""
    if m % LANES == 0:
        return RowTiles.of(batch, m, most, LANES)
    fitting = [b for b in range(1, batch + 1) if batch % b == 0 and b * m % LANES == 0]
    batches = max((b for b in fitting if b * m <= most), default=fitting[0])
    return RowTiles(batches, m, 1, batch // batches, sublanes(dtype))
