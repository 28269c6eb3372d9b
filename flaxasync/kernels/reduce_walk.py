"""The order of work in `matmul_reduce_scatter`, what the kernel holds, and what it cannot take.

For each step of the ring, all tiles of a block, row by row of tiles; in a row first those that travel one way, then
those that travel the other way; for each tile all of the contraction.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.cut import Cut
from flaxasync.kernels.row_tiles import RowTiles
from flaxasync.kernels.tiles import (
    LANES,
    RESERVED,
    Tiles,
    check_operand,
    check_vmem,
    chip_in_use,
    split,
    sublanes,
)

TILES = Tiles(1024, 4096, 1024)  # at most; smaller ones of the contraction where vector memory is short
FEW = 8  # a tile waits for what the next one needs: with one tile each way, the two ways would take turns on the links
SMALLEST = 256 * 256  # elements of a tile of the result that is cut to have more of them
LEAVING = (8, 3)  # finished tiles that may be leaving at once: at most, where there is room, and at least
SEMAPHORES = 400  # that may be used for what arrives: a kernel has 512, of which libtpu 0.0.52 leaves 436 to 440


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the walk is; scalars, traced or not."""

    step: Any  # of the ring
    i: Any  # row of tiles
    j: Any  # column of tiles
    t: Any  # tile of the contraction
    way: Any  # 0 or 1: which way this tile of the result travels
    tile: Any  # in its block
    number: Any  # of tiles of all blocks, before this one
    x_new: Any  # its tile of x is not that of the product before
    x_slot: Any
    w_slot: Any


@dataclasses.dataclass(frozen=True)
class ReduceWalk:
    """All products of a kernel.

    Attributes:
      size: of the ring.
      rows: tiles of rows of a block.
      columns: tiles of columns.
      contraction: tiles of the contraction of all pairs.
      ways: 1, or 2 where tiles travel both ways.
      leaving: finished tiles that may be leaving at once.
    """

    size: int
    rows: RowTiles
    columns: Cut
    contraction: Cut
    ways: int
    leaving: int

    @property
    def depth(self) -> int:
        """Products of a tile."""
        return self.contraction.count

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return self.rows.count * self.columns.count

    @property
    def products(self) -> int:
        return self.size * self.tiles * self.depth

    @property
    def _first(self) -> int:
        """Columns of tiles that travel the first way; all of them where it is rows that part ways."""
        return -(-self.columns.count // self.ways)

    def tile_at(self, number: Any) -> tuple[Any, Any]:
        """Row and column of a tile, of all blocks."""
        return split(split(number, self.tiles)[1], self.columns.count)

    def way_of(self, i: Any, j: Any) -> Any:
        if self.ways == 1:
            return jnp.int32(0)
        if self.columns.count > 1:
            return jnp.where(j >= self._first, 1, 0)
        return jnp.where(i >= -(-self.rows.count // 2), 1, 0)

    def at(self, product: Any) -> Place:
        number, t = split(product, self.depth)
        step, tile = split(number, self.tiles)
        i, j = split(tile, self.columns.count)
        way = self.way_of(i, j)
        x_new, x_slot = jnp.bool_(True), split(product, 2)[1]
        if self.depth == 1:  # all of the contraction at once: a tile of x serves all columns that go one way
            runs = 2 if self.ways == 2 and self.columns.count > 1 else 1
            x_new = (j == 0) | (j == self._first) if runs == 2 else j == 0
            x_slot = split((step * self.rows.count + i) * runs + (way if runs == 2 else 0), 2)[1]
        return Place(step, i, j, t, way, tile, number, x_new, x_slot, split(product, 2)[1])


def scratch_bytes(size: int, k: int, n: int, depth: int, leaving: int, dtype: Any) -> int:
    """Bytes of vector memory: two tiles each of x, of w and of what came; what leaves; a float32 sum or two."""
    tiles = 2 * (size * k + k * n + size * n) + leaving * size * n
    return tiles * jnp.dtype(dtype).itemsize + (1 if depth == 1 else 2) * 4 * size * n


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Refs, inside the kernel; shapes, where it is called. A tile of m rows is [batches, rows]."""

    x: Any  # [2, m, k] VMEM: tiles of x, this product's and the next one's
    w: Any  # [2, k, n] or [2, n, k] VMEM: tiles of w, likewise
    came: Any  # [2, m, n] VMEM: sums that came, this tile's and the next one's
    leaving: Any  # [leaving, m, n] VMEM: rounded sums that leave
    total: Any  # [m, n] VMEM: the float32 sum, where a tile takes several products
    x_sem: Any  # [2]
    w_sem: Any  # [2]
    came_sem: Any  # [2]
    leave_sem: Any  # [leaving]
    recv_sem: Any  # [2, tiles]: sets of places, tiles of a block
    read_sem: Any  # [ways], counts: tiles that the neighbour has read

    @classmethod
    def shapes(cls, walk: ReduceWalk, transposed: bool, dtype: Any) -> Any:
        """What to allocate: the same names, with shapes and memory spaces."""
        dma, rows = pltpu.SemaphoreType.DMA, (walk.rows.batches, walk.rows.rows)
        k, n = walk.contraction.size, walk.columns.size
        return cls(
            pltpu.VMEM((2, *rows, k), dtype),
            pltpu.VMEM((2, n, k) if transposed else (2, k, n), dtype),
            pltpu.VMEM((2, *rows, n), dtype),
            pltpu.VMEM((walk.leaving, *rows, n), dtype),
            pltpu.VMEM((*rows, n) if walk.depth > 1 else (1, 8, 128), jnp.float32),
            dma((2,)),
            dma((2,)),
            dma((2,)),
            dma((walk.leaving,)),
            dma((2, walk.tiles)),
            pltpu.SemaphoreType.REGULAR((walk.ways,)),
        )


def plan_reduce(
    caller: str, batch: int, m: int, ks: list[int], n: int, tiles: Tiles | None, size: int, directions: int, dtype: Any
) -> tuple[ReduceWalk, int]:
    """The walk, and the bytes of vector memory. Two tiles of a block or more, where sides allow."""
    asked, unit = tiles or _several(batch * m, n), sublanes(dtype)
    rows = RowTiles.of(batch, m, asked.m, unit)
    contraction, columns = Cut.of(ks, asked.k), Cut.of((n,), asked.n)
    if rows.count == columns.count == 1 and n > LANES:
        columns = Cut.of((n,), -(-n // 2 // LANES) * LANES)
    if rows.count == columns.count == 1:
        rows = RowTiles.of(batch, m, max(unit, batch * m // 2), unit)
    if tiles is None and 2 * rows.count * columns.count > SEMAPHORES:  # the fewest, though others were faster
        columns = Cut((n,), min(TILES.n, n), LANES)
    limit = chip_in_use().vmem_bytes - RESERVED

    def need(leaving: int, t: Tiles) -> int:
        return scratch_bytes(t.m, t.k, t.n, sum(-(-k // t.k) for k in ks), leaving, dtype)

    used, (leaving, fewest) = Tiles(rows.size, contraction.size, columns.size), LEAVING
    while leaving > fewest and need(leaving, used) > limit:
        leaving -= 1
    while tiles is None and need(leaving, used) > limit and used.k > LANES:
        contraction = Cut.of(ks, used.k // 2)
        used = dataclasses.replace(used, k=contraction.size)
    ways = directions if rows.count * columns.count > 1 else 1
    walk = ReduceWalk(size, rows, columns, contraction, ways, leaving)
    if 2 * walk.tiles > SEMAPHORES:
        raise NotImplementedError(
            f"{caller} has two semaphores for each tile of a block of rows, and a TPU has {SEMAPHORES} for them: "
            f"{batch * m} rows and n={n} in tiles of m={used.m}, n={used.n} are {walk.tiles} tiles; use larger "
            "tiles, a loop over columns of w, or backend='xla'"
        )
    return walk, check_vmem(caller, used, functools.partial(need, leaving))


def _several(m: int, n: int) -> Tiles:
    """Tiles for a block [m, n] of sums: `TILES`, or smaller ones where a block would have fewer than `FEW`."""
    used = TILES.within(m, TILES.k, n)
    while m * n < FEW * used.m * used.n and used.m * used.n > SMALLEST:
        longer = "n" if used.n >= used.m else "m"
        used = dataclasses.replace(used, **{longer: getattr(used, longer) // 2})
    return used


def check_reduce(caller: str, xs: tuple, ws: tuple, transposed: bool, size: int) -> None:
    """Raises ValueError where operands fit neither each other nor hardware tiles."""
    form = "[n, k]" if transposed else "[k, n]"
    if len(xs) != len(ws) or not xs or any(x.ndim != 3 for x in xs) or any(w.ndim != 2 for w in ws):
        raise ValueError(
            f"{caller} needs pairs of x [B, R*m, k] and w {form}: got {[list(x.shape) for x in xs]} and "
            f"{[list(w.shape) for w in ws]}"
        )
    n = ws[0].shape[0 if transposed else 1]
    for x, w in zip(xs, ws, strict=True):
        if x.shape[:2] != xs[0].shape[:2] or w.shape != ((n, x.shape[2]) if transposed else (x.shape[2], n)):
            raise ValueError(
                f"{caller} sums products x [B, R*m, k] @ w {form} of one shape: got {list(x.shape)} and {list(w.shape)}"
                f" beside {list(xs[0].shape)} and {list(ws[0].shape)}"
            )
        if {x.dtype, w.dtype} != {xs[0].dtype}:
            raise ValueError(f"{caller} needs operands of one dtype: got {x.dtype} and {w.dtype}; cast them")
        check_operand(caller, "a batch of x", x.shape[1:], x.dtype)
        check_operand(caller, "w", w.shape, w.dtype)
    if n % LANES:
        raise ValueError(f"{caller} needs n to be a multiple of {LANES}: got n={n}; pad w")
    unit = size * sublanes(xs[0].dtype)
    if xs[0].shape[1] % unit:
        raise ValueError(
            f"{caller} gives each of {size} devices whole hardware tiles of rows: got {xs[0].shape[1]} rows of "
            f"{xs[0].dtype}, needed a multiple of {unit}; pad x"
        )
