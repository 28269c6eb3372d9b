"""The steps of matmul_reduce_scatter, the tiles of one, and the choice of both."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.grid import IterationGrid, remainder
from flaxasync.kernels.engine.matmul import MatmulTiles
from flaxasync.kernels.engine.operands import LANES, Tiles, sublanes
from flaxasync.kernels.engine.refs import Condition, Scalar
from flaxasync.kernels.engine.row_tiling import RowTiling
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.engine.vmem import available, check_vmem
from flaxasync.mesh import UnsupportedError

CALLER = "matmul_reduce_scatter"
TILES = Tiles(1024, 4096, 1024)  # the largest tiles, where none are asked for
FEWEST_TILES = 8  # of a block: with one tile for each direction, the two directions would take turns on the links
SMALLEST = 256 * 256  # elements of a tile of the result below which a block has fewer tiles instead
OUTGOING = (8, 3)  # slots for tiles that leave: at most, and at least where vector memory is short
SEMAPHORES = 400  # for what arrives: a kernel has 512, of which libtpu 0.0.52 leaves 436 to 440


class Coordinates(NamedTuple):
    """What one step of the kernel works on."""

    hop: Scalar  # of the ring
    i: Scalar  # tile of the rows of a block
    j: Scalar  # tile of the columns
    t: Scalar  # tile of the contraction
    tile: Scalar  # number of the tile of the result in its block
    number: Scalar  # the same, counted over all blocks
    direction: Scalar  # in which that tile travels
    new_x: Condition  # whether the tile of x is another one than in the step before
    x_slot: Scalar
    w_slot: Scalar


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps of the kernel: for each hop all tiles of a block, row by row, and for each all of the contraction."""

    size: int  # devices of the ring
    tiles: MatmulTiles  # tiles of the rows of a block, of the columns, and of the contraction of all pairs of x and w
    directions: int  # 1, or 2 where tiles travel both ways: in a row of tiles those of direction 0 come first
    outgoing: int  # finished tiles that may be leaving at once

    @property
    def depth(self) -> int:
        """Steps of a tile of the result."""
        return self.tiles.contraction.count

    @property
    def block(self) -> int:
        """Tiles of the result in a block."""
        return self.tiles.rows.count * self.tiles.columns.count

    @property
    def grid(self) -> IterationGrid:
        return IterationGrid((self.size, self.tiles.rows.count, self.tiles.columns.count, self.depth))

    def at(self, step: Scalar) -> Coordinates:
        """Returns the coordinates of a step."""
        hop, i, j, t = self.grid.coordinates(step)
        rows, columns = self.tiles.rows.count, self.tiles.columns.count
        # The columns are divided between the directions, or the rows if there is one tile of columns only.
        first = pl.cdiv(columns, self.directions) if columns > 1 else pl.cdiv(rows, self.directions)
        direction = jnp.where((j if columns > 1 else i) >= first, 1, 0) if self.directions == 2 else jnp.int32(0)
        x_slot = w_slot = remainder(step, 2)
        new_x: Condition = True
        if self.depth == 1:  # a tile of x has all of the contraction: it serves all columns that go in one direction
            runs = 2 if self.directions == 2 and columns > 1 else 1
            new_x = (j == 0) | (j == first) if runs == 2 else j == 0
            x_slot = remainder((hop * rows + i) * runs + (direction if runs == 2 else 0), 2)
        tile = i * columns + j
        return Coordinates(hop, i, j, t, tile, hop * self.block + tile, direction, new_x, x_slot, w_slot)


def plan(
    xs: Sequence[jax.Array], ws: Sequence[jax.Array], transposed: bool, tiles: Tiles | None, size: int, directions: int
) -> tuple[Schedule, int]:
    """Returns the schedule, with two tiles of a block or more if possible, and the bytes of vector memory."""
    (batch, all_rows, _), dtype, unit = xs[0].shape, xs[0].dtype, sublanes(xs[0].dtype)
    m, n, ks = all_rows // size, ws[0].shape[0 if transposed else 1], [x.shape[2] for x in xs]
    asked = tiles or _default_tiles(batch * m, n)
    rows = RowTiling.of(batch, m, asked.m, unit)
    contraction, columns = Tiling.of(ks, asked.k), Tiling.of((n,), asked.n)
    if rows.count == columns.count == 1 and n > LANES:
        columns = Tiling.of((n,), pl.cdiv(n, 2 * LANES) * LANES)
    if rows.count == columns.count == 1:
        rows = RowTiling.of(batch, m, max(unit, batch * m // 2), unit)
    if tiles is None and 2 * rows.count * columns.count > SEMAPHORES:  # take the fewest, though others were faster
        columns = Tiling((n,), min(TILES.n, n))

    def need(outgoing: int, t: Tiles) -> int:
        in_slots = 2 * (t.m * t.k + t.k * t.n + t.m * t.n) + outgoing * t.m * t.n
        sums = 1 if sum(pl.cdiv(k, t.k) for k in ks) == 1 else 2  # of float32: the product, and the accumulator
        return in_slots * dtype.itemsize + sums * 4 * t.m * t.n

    used, (outgoing, fewest) = Tiles(rows.size, contraction.size, columns.size), OUTGOING
    while outgoing > fewest and need(outgoing, used) > available():
        outgoing -= 1
    while tiles is None and need(outgoing, used) > available() and used.k > LANES:
        contraction = Tiling.of(ks, used.k // 2)
        used = dataclasses.replace(used, k=contraction.size)
    directions = directions if rows.count * columns.count > 1 else 1
    schedule = Schedule(size, MatmulTiles(rows, columns, contraction, transposed), directions, outgoing)
    if 2 * schedule.block > SEMAPHORES:
        raise UnsupportedError(
            f"{CALLER} has two semaphores for each tile of a block of rows, and a TPU has {SEMAPHORES} for them: "
            f"{batch * m} rows and n={n} in tiles of m={used.m}, n={used.n} are {schedule.block} tiles; use larger "
            "tiles, a loop over columns of w, or backend='xla'"
        )
    return schedule, check_vmem(CALLER, used, functools.partial(need, outgoing))


def _default_tiles(m: int, n: int) -> Tiles:
    """Returns `TILES`, or smaller tiles if a block [m, n] of sums would have fewer than `FEWEST_TILES` of them."""
    used = TILES.within(m, TILES.k, n)
    while m * n < FEWEST_TILES * used.m * used.n and used.m * used.n > SMALLEST:
        longer = "n" if used.n >= used.m else "m"
        used = dataclasses.replace(used, **{longer: getattr(used, longer) // 2})
    return used
