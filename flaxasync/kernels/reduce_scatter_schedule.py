"""The steps and the tiles of the kernel `matmul_reduce_scatter`, and the vector memory that they
need.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.matmul import MatmulTiles, Scales
from flaxasync.kernels.engine.operands import LANES, Condition, DType, Scalar, Tiles
from flaxasync.kernels.engine.tiling import IterationGrid, RowTiling, Tiling, remainder
from flaxasync.kernels.engine.vector_memory import SEMAPHORES, available, check_vmem, matmul_bytes
from flaxasync.mesh import UnsupportedError

CALLER = "matmul_reduce_scatter"
TILES = Tiles(1024, 4096, 1024)  # the largest tiles, where none are asked for
# of a block: with one tile for each direction, the two directions would take turns on the links
FEWEST_TILES = 8
# columns of a tile, at most, where the largest tiles would divide them into an odd number
WIDEST = 1280
SMALLEST = 256 * 256  # elements of a tile of the result below which a block has fewer tiles instead
OUTGOING = 8  # slots for tiles that leave, at most
FEWEST_OUTGOING = 3  # the same at least, where vector memory is short


class ReduceScatterStep(NamedTuple):
    hop: Scalar  # of the ring
    i: Scalar  # tile of the rows of a block
    j: Scalar  # tile of the columns
    t: Scalar  # tile of the contraction
    tile: Scalar  # number of the tile of the result in its block
    number: Scalar  # the same, counted over all blocks
    direction: Scalar  # in which that tile travels
    new_x: Condition  # whether the tile of x is another one than in the step before
    new_w: Condition  # whether the tile of w has to come from HBM
    x_slot: Scalar
    w_slot: Scalar


@dataclasses.dataclass(frozen=True)
class ReduceScatterSchedule:
    """The steps of the kernel: for each hop all tiles of a block, row by row, and for each all of
    the contraction.
    """

    size: int  # devices of the ring
    # tiles of the rows of a block, of the columns, and of the contraction of all pairs of x and w
    tiles: MatmulTiles
    # 1, or 2 where tiles travel both ways: in a row of tiles those of direction 0 come first
    directions: int
    outgoing: int  # finished tiles that may be leaving at once

    @property
    def depth(self) -> int:
        """Steps of a tile of the result."""
        return self.tiles.contraction.count

    @property
    def tiles_of_block(self) -> int:
        """Tiles of the result in a block."""
        return self.tiles.rows.count * self.tiles.columns.count

    @property
    def grid(self) -> IterationGrid:
        return IterationGrid(
            (self.size, self.tiles.rows.count, self.tiles.columns.count, self.depth)
        )

    @property
    def first_tiles(self) -> int:
        """Tiles that travel in direction 0: of columns, or of rows where there is one tile of
        columns only.
        """
        columns = self.tiles.columns.count
        return pl.cdiv(columns if columns > 1 else self.tiles.rows.count, self.directions)

    def direction(self, i: Scalar, j: Scalar) -> Scalar:
        """Returns the direction in which tile (i, j) of a block travels."""
        if self.directions == 1:
            return jnp.int32(0)
        if self.tiles.columns.count > 1:
            number = j
        else:
            number = i
        return jnp.where(number >= self.first_tiles, 1, 0)

    def at(self, step: Scalar) -> ReduceScatterStep:
        hop, i, j, t = self.grid.coordinates(step)
        rows = self.tiles.rows.count
        columns = self.tiles.columns.count
        direction = self.direction(i, j)
        x_slot: Scalar = remainder(step, 2)
        w_slot = self.tiles.w_slot(t, j, step)
        new_x: Condition = True
        new_w: Condition = True
        if self.tiles.w_stays:
            new_w = (hop == 0) & (i == 0)
        # a tile of x has all of the contraction: it serves all columns that go in one direction
        if self.depth == 1:
            runs = 1  # through the columns with one tile of x
            run: Scalar = 0
            new_x = j == 0
            if self.directions == 2 and columns > 1:
                runs = 2
                run = direction
                new_x = (j == 0) | (j == self.first_tiles)
            x_slot = remainder((hop * rows + i) * runs + run, 2)
        tile = i * columns + j
        number = hop * self.tiles_of_block + tile
        return ReduceScatterStep(
            hop, i, j, t, tile, number, direction, new_x, new_w, x_slot, w_slot
        )


def plan_schedule(
    block: "BlockOfRows",
    ks: Sequence[int],
    dtype: jnp.dtype,
    transposed: bool,
    tiles: Tiles | None,
    size: int,
    directions: int,
    result: DType,
    scaled: bool,
) -> tuple[ReduceScatterSchedule, int]:
    """Returns the schedule, with two tiles of a block or more if possible, and the bytes of vector
    memory.
    """
    if tiles is None:
        asked = _default_tiles(block.batch * block.m, block.n)
        rows, columns = block.best_tiles(asked, directions)
    else:
        asked = tiles
        rows, columns = block.tiles(asked)

    def need(outgoing: int, t: Tiles) -> int:
        steps = sum(pl.cdiv(k, t.k) for k in ks)
        # where a tile takes several steps, there are the product and the accumulator
        if steps == 1:
            sums = 1
        else:
            sums = 2
        total = matmul_bytes(t, dtype, 2 + outgoing, sums, result)
        if scaled:
            total += Scales.nbytes(2, t.m, t.n)
        return total

    def fits(choice: tuple[int, Tiling]) -> bool:
        outgoing, contraction = choice
        return need(outgoing, Tiles(rows.size, contraction.size, columns.size)) <= available()

    # Where vector memory is short, fewer tiles may be leaving, and then products are less deep.
    depths = Tiling.of(ks, asked.k)
    choices = [(slots, depths) for slots in range(OUTGOING, FEWEST_OUTGOING - 1, -1)]
    while tiles is None and depths.size > LANES:
        depths = Tiling.of(ks, depths.size // 2)
        choices.append((FEWEST_OUTGOING, depths))
    # where none fits, `check_vmem` raises for the smallest
    outgoing, contraction = next(filter(fits, choices), choices[-1])
    used = Tiles(rows.size, contraction.size, columns.size)
    need_bytes = check_vmem(CALLER, used, functools.partial(need, outgoing))
    matmul_tiles = MatmulTiles(rows, columns, contraction, transposed)
    matmul_tiles, vmem_bytes = matmul_tiles.keeping_w(need_bytes, dtype)
    if rows.count * columns.count == 1:
        directions = 1
    schedule = ReduceScatterSchedule(size, matmul_tiles, directions, outgoing)
    if 2 * schedule.tiles_of_block > SEMAPHORES:
        raise UnsupportedError(
            f"{CALLER} has two semaphores for each tile of a block of rows, and a TPU has "
            f"{SEMAPHORES} for them: {block.batch * block.m} rows and n={block.n} in tiles of "
            f"m={used.m}, n={used.n} are {schedule.tiles_of_block} tiles; use a loop over columns "
            "of w, or backend='xla'"
        )
    return schedule, vmem_bytes


type BlockTiles = tuple[RowTiling, Tiling]  # of the rows and of the columns of a block


@dataclasses.dataclass(frozen=True)
class BlockOfRows:
    """The rows of one device, or of one of its cores, in all columns: what its tiles can be."""

    batch: int
    m: int
    n: int
    unit: int  # rows of a hardware tile

    def tiles(self, most: Tiles) -> BlockTiles:
        """Returns tiles of at most these sides, two of them or more if possible."""
        rows = RowTiling.of(self.batch, self.m, most.m, self.unit)
        columns = Tiling.of((self.n,), most.n)
        if rows.count == columns.count == 1 and self.n > LANES:
            columns = Tiling.of((self.n,), pl.cdiv(self.n, 2 * LANES) * LANES)
        if rows.count == columns.count == 1:
            half = max(self.unit, self.batch * self.m // 2)
            rows = RowTiling.of(self.batch, self.m, half, self.unit)
        return rows, columns

    def best_tiles(self, most: Tiles, directions: int) -> BlockTiles:
        """Returns tiles of which both directions have as many, if possible, and no more than a TPU
        has semaphores for.
        """
        rows, columns = self.tiles(most)
        widths = self.even_widths()
        odd = directions == 2 and columns.count > 1 and columns.count % 2 == 1
        if odd and rows.size * columns.size > SMALLEST and widths:
            half = max(most.m // 2, self.unit)
            rows = RowTiling.of(self.batch, self.m, half, self.unit)
            columns = Tiling((self.n,), widths[0])
        if 2 * rows.count * columns.count <= SEMAPHORES:
            return rows, columns
        # take the fewest, though others were faster
        fewest = RowTiling.fewest(self.batch, self.m, most.m, self.unit)
        return fewest, Tiling((self.n,), min(TILES.n, self.n))

    def even_widths(self) -> list[int]:
        """Returns the widths of tiles of columns of which there is an even number, the widest
        first.
        """
        counts = range(2, self.n // LANES, 2)
        widths = [pl.cdiv(self.n, count * LANES) * LANES for count in counts]
        return [width for width in widths if width <= WIDEST and pl.cdiv(self.n, width) % 2 == 0]


def _default_tiles(m: int, n: int) -> Tiles:
    """Returns `TILES`, or smaller tiles if a block [m, n] of sums would have fewer than
    `FEWEST_TILES` of them.
    """
    used = TILES.within(m, TILES.k, n)
    while m * n < FEWEST_TILES * used.m * used.n and used.m * used.n > SMALLEST:
        if used.n >= used.m:
            longer = "n"
        else:
            longer = "m"
        used = dataclasses.replace(used, **{longer: getattr(used, longer) // 2})
    return used
