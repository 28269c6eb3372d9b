"""The order of work of the overlapped kernel, and how it divides its operands.

All products of tiles are one flat loop, so that no step starts cold. The columns of the result are
divided into chunks, a device's rows into one block for each of the Y mesh columns, a block into
panels of `rows` tiles, and the contraction into `depth` tiles. A round is one chunk of one panel.
It has Y phases, one for each block of rows:

    phases 0 .. Y-2   another mesh column's rows, with the contraction as the outer loop: a block of w is used for all
                      rows as soon as it arrives, and all tiles of rows are finished in the last `rows` steps
    phase Y-1         the own rows, with the rows as the outer loop: a tile is finished every `depth` steps

                 x x x x|x x x x|...       x  one product of tiles
    phase < Y-1  t=0     t=1               of all rows
    phase Y-1    i=0     i=1               of all of the contraction

With one mesh column, or if there is no sum over mesh columns, there is one phase, whose rows are
the own ones, and the contraction is the outer loop there, too.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from flaxasync.kernels.engine.matmul import MatmulTiles
from flaxasync.kernels.engine.operands import (
    LANES,
    Condition,
    Scalar,
    Tiles,
    largest_divisor,
    sublanes,
)
from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.engine.tiling import IterationGrid, RowTiling, Tiling, remainder, split
from flaxasync.kernels.engine.vector_memory import (
    SEMAPHORES,
    available,
    check_vmem,
    fitting,
    matmul_bytes,
)
from flaxasync.mesh import UnsupportedError

TILES = Tiles()  # the largest tiles, where none are asked for
# chunks of columns, about, where there are few columns: nothing hides the arrival of the first one
CHUNKS = 8
NARROWEST = 512  # columns of a chunk, unless there are fewer columns in all
PANEL = 4096  # rows whose sums stay in vector memory, at most


@dataclasses.dataclass(frozen=True)
class MeshStep:
    round: Scalar  # chunk and panel
    chunk: Scalar  # of the columns
    panel: Scalar  # of the rows of a block
    phase: Scalar
    position: Scalar  # of the step in its phase
    i: Scalar  # tile of rows in its panel
    t: Scalar  # tile of the contraction, in the order of their use
    number: Scalar  # of the tile of rows, in the order in which tiles are finished
    accumulator: Scalar  # of the tile of rows
    w_slot: Scalar
    new_w: Condition  # whether the tile of w is another one than in the step before


@dataclasses.dataclass(frozen=True)
class MeshSchedule:
    chunks: int  # of columns
    panels: int  # of rows in a block
    rows: int  # tiles of rows in a panel
    depth: int  # tiles of the contraction
    phases: int  # blocks of a device's rows, one for each mesh column that is summed over

    @property
    def rounds(self) -> int:
        return self.chunks * self.panels

    @property
    def phase_steps(self) -> int:
        return self.rows * self.depth

    @property
    def grid(self) -> IterationGrid:
        return IterationGrid((self.chunks, self.panels, self.phases, self.phase_steps))

    @property
    def results(self) -> IterationGrid:
        """Tiles of rows, in the order in which they are finished."""
        return IterationGrid((self.chunks, self.panels, self.phases, self.rows))

    def at(self, step: Scalar) -> MeshStep:
        chunk, panel, phase, position = self.grid.coordinates(step)
        round_ = chunk * self.panels + panel
        rows_outer = jnp.logical_and(phase == self.phases - 1, self.phases > 1)
        t_outer, i_inner = split(position, self.rows)
        i_outer, t_inner = split(position, self.depth)
        i = jnp.where(rows_outer, i_outer, i_inner)
        t = jnp.where(rows_outer, t_inner, t_outer)
        number = (round_ * self.phases + phase) * self.rows + i
        accumulator = jnp.where(rows_outer, 0, i)
        new_w = jnp.logical_or(rows_outer, i == 0)
        # tiles of w
        in_round = self.depth
        if self.phases > 1:
            in_round = (self.phases - 1) * self.depth + self.phase_steps
        before = round_ * in_round + phase * self.depth + jnp.where(rows_outer, position, t_outer)
        w_slot = remainder(before, 2)
        return MeshStep(
            round_, chunk, panel, phase, position, i, t, number, accumulator, w_slot, new_w
        )


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """Each direction around the mesh row is a batch of rows: a tile has both half-blocks,
    multiplied at once.
    """

    caller: str  # the name of the kernel
    column: Ring  # the devices of a mesh column
    row: Ring  # the devices of a mesh row; this device alone if there is no sum over them
    schedule: MeshSchedule
    tiles: MatmulTiles
    outgoing: int  # slots for finished tiles that leave
    vmem_bytes: int  # of all buffers


def plan(
    x: jax.Array,
    w: jax.Array,
    axis_names: tuple[str, str],
    reduce: bool,
    tiles: Tiles | None,
    directions: int | None,
) -> MeshPlan:
    """Divides the operands, or raises as `overlapped` says."""
    m, k = x.shape
    held, n = w.shape
    dtype = x.dtype
    size, columns_of_mesh = (lax.axis_size(name) for name in axis_names)
    if reduce:
        caller = "overlapped"
        phases = columns_of_mesh
    else:
        caller = "fused"
        phases = 1
    most_k = math.gcd(k, held)
    unit = sublanes(dtype)
    block = m // phases
    if most_k % LANES:
        raise ValueError(
            f"{caller} divides the contraction into blocks for a mesh of {size} x "
            f"{columns_of_mesh}, in whole hardware tiles: got K={k * columns_of_mesh} in blocks of "
            f"{most_k}, needed a multiple of {LANES}; pad K, or use backend='none'"
        )
    if phases > 2 and directions != 1 and block % (2 * unit) == 0:
        row_directions = 2
    else:
        row_directions = 1
    if directions == 2 and phases > 2 and row_directions == 1:
        raise ValueError(
            f"{caller} sends half of the rows each way around {axis_names[1]!r}: got {m} rows of "
            f"{dtype}, needed a multiple of {phases * 2 * unit}; use directions=1"
        )

    def fit(most: Tiles) -> Tiles:
        rows = largest_divisor(block, most.m, unit * row_directions)
        columns = Tiling.of((n,), most.n)
        return Tiles(rows, largest_divisor(most_k, most.k, LANES), columns.size)

    def outgoing(rows: int) -> int:
        """Returns the slots for tiles that leave: the partial sums of a panel are finished one
        right after the other.
        """
        if phases > 1:
            return 2 + rows
        return 2

    def need(rows: int, t: Tiles) -> int:
        slots = outgoing(rows)
        if phases > 1:
            slots += 1  # for partial sums that are received
        return matmul_bytes(t, dtype, slots, rows)

    def divided(default: Tiles) -> tuple[Tiles, MeshSchedule, int]:
        """Returns the tiles that fit, up to those by default, the steps through them, and how many
        blocks of w and tiles of rows arrive.
        """
        fit_tiles = fitting(tiles, default, fit, functools.partial(need, 1))
        # the highest panel that fits, in tiles of rows
        heights = range(max(1, PANEL // fit_tiles.m), 0, -1)
        even = [height for height in heights if block % (fit_tiles.m * height) == 0]
        rows = next((height for height in even if need(height, fit_tiles) <= available()), 1)
        chunks = Tiling((n,), fit_tiles.n).count
        panels = block // (rows * fit_tiles.m)
        steps = MeshSchedule(chunks, panels, rows, k // fit_tiles.k, phases)
        blocks_of_w = 0
        if size > 1:
            blocks_of_w = steps.chunks * steps.depth
        return fit_tiles, steps, blocks_of_w + 2 * (phases - 1) * steps.rounds * rows

    narrow = dataclasses.replace(TILES, n=min(TILES.n, max(NARROWEST, n // CHUNKS)))
    used, schedule, arrivals = divided(narrow)
    if arrivals > SEMAPHORES:  # wide chunks of columns have fewer of them
        used, schedule, arrivals = divided(TILES)
    if arrivals > SEMAPHORES:
        raise UnsupportedError(
            f"{caller} has a semaphore for each block of w and each tile of rows that arrives, and "
            f"a TPU has {SEMAPHORES} for them: x {list(x.shape)} and w {list(w.shape)} in tiles of "
            f"m={used.m}, k={used.k}, n={used.n} are {arrivals} arrivals; use larger tiles, a loop "
            "over columns of w, or backend='serial'"
        )
    column = Ring(axis_names[0], size, 2 if size > 2 and directions != 1 else 1)
    side = used.m // row_directions
    row_tiling = RowTiling(
        Tiling((row_directions,), row_directions, 1), Tiling((side,), side, unit)
    )
    vmem_bytes = check_vmem(caller, used, functools.partial(need, schedule.rows))
    columns = Tiling((n,), used.n)
    matmul_tiles = MatmulTiles(row_tiling, columns, Tiling((k,), used.k), transposed=False)
    return MeshPlan(
        caller,
        column,
        Ring(axis_names[1], phases, row_directions),
        schedule,
        matmul_tiles,
        outgoing(schedule.rows),
        vmem_bytes,
    )
