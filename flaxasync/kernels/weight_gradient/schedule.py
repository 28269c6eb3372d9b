"""The steps of gather_weight_gradient, the tiles of one, and the choice of both."""

import dataclasses
import math

import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.grid import IterationGrid, remainder
from flaxasync.kernels.engine.operands import LANES, Tiles, sublanes
from flaxasync.kernels.engine.refs import DType, Scalar
from flaxasync.kernels.engine.row_tiling import SUB_BLOCK, RowTiling
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.engine.vmem import check_vmem

CALLER = "gather_weight_gradient"
TILES = Tiles(1024, 1024, 2048)  # columns of x, rows, columns of dy
ACCUMULATORS = 32 * 2**20  # bytes of float32 sums, at most, where no tiles are asked for
OUTGOING = 2  # slots for tiles of the result that leave


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """What one step of the kernel works on."""

    chunk: Scalar  # of the columns of x
    hop: Scalar
    i: Scalar  # tile of the rows of a block
    j: Scalar  # tile of the columns of all dy
    direction: Scalar  # in which the rows of that tile travel
    x_slot: Scalar
    y_slot: Scalar


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps: for each chunk all hops, for each hop all tiles of rows, for each of these all columns of dy."""

    size: int  # devices of the ring
    chunks: Tiling  # tiles of the columns of x, in sub-blocks
    rows: RowTiling  # tiles of the rows of a block; those of direction 0 come first
    columns: Tiling  # tiles of the columns of all dy
    directions: int  # 1, or 2 where half of the rows travel each way

    @property
    def grid(self) -> IterationGrid:
        return IterationGrid((self.chunks.count, self.size, self.rows.count, self.columns.count))

    @property
    def half_blocks(self) -> tuple[pl.Slice, ...]:
        """What travels in each direction, in rows of a block."""
        sizes, first = self.rows.sizes, self._first_tiles
        halves = (sum(sizes[:first]), sum(sizes[first:]))[: self.directions]
        return tuple(pl.ds(sum(halves[:number]), half) for number, half in enumerate(halves))

    def at(self, step: Scalar) -> Coordinates:
        """Returns the coordinates of a step."""
        chunk, hop, i, j = self.grid.coordinates(step)
        direction = jnp.where(i >= self._first_tiles, 1, 0) if self.directions == 2 else jnp.int32(0)
        x_slot = remainder((chunk * self.size + hop) * self.rows.count + i, 2)
        return Coordinates(chunk, hop, i, j, direction, x_slot, remainder(step, 2))

    @property
    def _first_tiles(self) -> int:
        """Tiles of rows that travel in direction 0."""
        return pl.cdiv(self.rows.count, self.directions)


def plan(
    batch: int, m: int, k: int, widths: list[int], tiles: Tiles | None, size: int, directions: int, dtype: DType
) -> tuple[Schedule, int]:
    """Returns the schedule, and the bytes of vector memory that it needs."""
    asked, itemsize = tiles or TILES, jnp.dtype(dtype).itemsize
    columns = Tiling.of(widths, asked.n)
    chunk = asked.m if tiles else min(asked.m, max(LANES, ACCUMULATORS // (4 * sum(widths))))
    chunks = Tiling.in_sub_blocks(k, chunk, SUB_BLOCK, LANES)
    # The rows of a tile lie side by side in the transposed x, so they have to be whole lanes: those of one batch, or of
    # several batches together. All of them are contracted at once.
    unit, several = (LANES, 1) if m % LANES == 0 else (sublanes(dtype), LANES // math.gcd(m, LANES))
    rows = RowTiling.of(batch, m, asked.k, unit, several, sub_block=asked.k)
    if directions == 2 and rows.count == 1:
        half = pl.cdiv(m, 2 * unit) * unit if batch == 1 else pl.cdiv(batch, 2 * several) * several * m
        rows = RowTiling.of(batch, m, half, unit, several, sub_block=half)
    schedule = Schedule(size, chunks, rows, columns, directions if rows.count > 1 else 1)

    def need(t: Tiles) -> int:
        across = sum(pl.cdiv(width, t.n) for width in widths)
        in_slots = 2 * t.m * t.k + 2 * t.k * t.n + OUTGOING * t.m * t.n
        return itemsize * in_slots + 4 * t.m * t.n * (across + 1)  # float32: the sums, and the product

    return schedule, check_vmem(CALLER, Tiles(chunks.size, rows.size, columns.size), need)
