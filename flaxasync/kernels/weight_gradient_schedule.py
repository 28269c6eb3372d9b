"""The steps and the tiles of the kernel `weight_gradient`, and the vector memory that they need."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.cores import Cores, cores_for
from flaxasync.kernels.engine.matmul import Scales
from flaxasync.kernels.engine.operands import LANES, Condition, DType, Scalar, Tiles, sublanes
from flaxasync.kernels.engine.tiling import SUB_BLOCK, IterationGrid, RowTiling, Tiling, remainder
from flaxasync.kernels.engine.vector_memory import SEMAPHORES, available, check_vmem, matmul_bytes

CALLER = "gather_weight_gradient"
# columns of x, rows and columns of dy, at most, where no tiles are asked for
TILES = Tiles(1024, 1024, 2048)
LARGE = Tiles(1536, 1024, 2560)  # the same where vector memory has room for them
ACCUMULATORS = 32 * 2**20  # bytes of float32 sums, at most, where no tiles are asked for
OUTGOING = 2  # slots for tiles of the result that leave
BUFFER_SETS = 2  # sets of receive buffers
# devices of a ring: of each other one a half-block arrives in each direction, in either set
LARGEST_RING = 1 + SEMAPHORES // (2 * BUFFER_SETS)


class WeightGradientStep(NamedTuple):
    chunk: Scalar  # of the columns of x
    hop: Scalar
    i: Scalar  # tile of the rows of a block
    j: Scalar  # tile of the columns of all dy
    direction: Scalar  # in which the rows of that tile travel
    x_slot: Scalar
    y_slot: Scalar
    buffers: Scalar  # the set of receive buffers of the chunk


@dataclasses.dataclass(frozen=True)
class WeightGradientSchedule:
    """The steps: for each chunk all hops, for each hop all tiles of rows, for each of these all
    columns of dy.
    """

    size: int  # devices of the ring
    chunks: Tiling  # tiles of the columns of x, in sub-blocks
    rows: RowTiling  # tiles of the rows of a block; those of direction 0 come first
    columns: Tiling  # tiles of the columns of all dy
    directions: int  # 1, or 2 where half of the rows travel each way

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.chunks.size, self.rows.size, self.columns.size)

    @property
    def grid(self) -> IterationGrid:
        return IterationGrid((self.chunks.count, self.size, self.rows.count, self.columns.count))

    def is_last(self, here: WeightGradientStep) -> Condition:
        """Returns whether a step is the last one of its sum."""
        return (here.hop == self.size - 1) & (here.i == self.rows.count - 1)

    def result(self, here: WeightGradientStep) -> Scalar:
        """Returns the number of the tile of the result to which a step adds."""
        return here.chunk * self.columns.count + here.j

    @property
    def half_blocks(self) -> tuple[pl.Slice, ...]:
        """What travels in each direction, in rows of a block."""
        rows = sum(self.rows.sizes)
        first = sum(self.rows.sizes[: self._first_tiles])
        return (pl.ds(0, first), pl.ds(first, rows - first))[: self.directions]

    def at(self, step: Scalar) -> WeightGradientStep:
        chunk, hop, i, j = self.grid.coordinates(step)
        direction: Scalar = jnp.int32(0)
        if self.directions == 2:
            direction = jnp.where(i >= self._first_tiles, 1, 0)
        x_slot = remainder((chunk * self.size + hop) * self.rows.count + i, 2)
        y_slot = remainder(step, 2)
        buffers = remainder(chunk, BUFFER_SETS)
        return WeightGradientStep(chunk, hop, i, j, direction, x_slot, y_slot, buffers)

    @property
    def _first_tiles(self) -> int:
        """Tiles of rows that travel in direction 0."""
        return pl.cdiv(self.rows.count, self.directions)


def cores_of(columns: int, asked: int | None) -> Cores:
    """Returns the cores that share out the columns of x, in whole tiles: those asked for, or the
    best.
    """
    count = cores_for(CALLER, columns, asked, LANES)
    if count > 1 and columns % (count * LANES) != 0:
        raise ValueError(
            f"{CALLER} divides whole tiles of {LANES} columns of x among {asked} cores: got "
            f"{columns} columns; use cores=1"
        )
    return Cores(count)


def plan_schedule(
    x: jax.Array,
    columns_of_core: int,
    widths: list[int],
    tiles: Tiles | None,
    size: int,
    directions: int,
    result: DType,
    scaled: bool,
) -> tuple[WeightGradientSchedule, int]:
    """Returns the schedule, and the bytes of vector memory that it needs."""
    batch, m, _ = x.shape
    dtype = x.dtype
    candidates = [LARGE, TILES]
    columns_of_x = max(LANES, ACCUMULATORS // (4 * sum(widths)))
    if tiles is not None:
        candidates = [tiles]
        columns_of_x = tiles.m

    def schedule_of(asked: Tiles) -> WeightGradientSchedule:
        chunks = Tiling.in_sub_blocks(columns_of_core, min(asked.m, columns_of_x), SUB_BLOCK, LANES)
        rows = _rows(batch, m, sublanes(dtype), asked.k, directions)
        columns = Tiling.of(widths, asked.n)
        return WeightGradientSchedule(
            size, chunks, rows, columns, directions if rows.count > 1 else 1
        )

    def need(t: Tiles) -> int:
        across = sum(pl.cdiv(width, t.n) for width in widths)
        total = matmul_bytes(t, dtype, OUTGOING, across + 1, result)  # and the product
        if scaled:
            total += Scales.nbytes(2, t.m, t.n)
        return total

    schedules = [schedule_of(asked) for asked in candidates]
    fitting = (schedule for schedule in schedules if need(schedule.tiles) <= available())
    schedule = next(fitting, schedules[-1])
    return schedule, check_vmem(CALLER, schedule.tiles, need)


def _rows(batch: int, m: int, unit: int, most: int, directions: int) -> RowTiling:
    """Returns the tiles of the rows of a block: two of them, if there are two directions.

    The rows of a tile lie side by side in the transposed x, so they have to be whole lanes: those
    of one batch, or of several batches together. All of them are contracted at once.
    """
    several = 1
    if m % LANES == 0:
        unit = LANES
    else:
        several = LANES // math.gcd(m, LANES)
    rows = RowTiling.of(batch, m, most, unit, several, sub_block=most)
    if directions == 1 or rows.count > 1:
        return rows
    half = pl.cdiv(batch, 2 * several) * several * m
    if batch == 1:
        half = pl.cdiv(m, 2 * unit) * unit
    return RowTiling.of(batch, m, half, unit, several, sub_block=half)
