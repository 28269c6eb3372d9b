"""The weight gradients of `grouped_matmul` as one Pallas TPU kernel.

```
x     [M, K]       rows sorted by expert, in tiles of t rows as `grouped_matmul` takes them
dy_i  [M, N]       several share one reading of x
dw_i  [E, K, N]    float32, the sum of x[tile].T @ dy_i[tile] over the tiles of each expert; it can be added to others

grid   blocks of K   ->   blocks of N   ->   tiles
x            x                                 x       a block comes for each step
dy                             x               x
dw           x                 x                       stays in vector memory for all tiles of an expert
```

The kernel stores dw itself, each sub-block as soon as it is finished in the last tile of the expert, because a whole
block at once would keep the next tiles of x and dy waiting.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.call import available, chip_in_use, vmem_limit
from flaxasync.kernels.engine.matmul import dot
from flaxasync.kernels.engine.operands import (
    HBM,
    LANES,
    Condition,
    Ref,
    Scalar,
    Tiles,
    aligned,
    largest_divisor,
    output,
)
from flaxasync.kernels.engine.slots import OutgoingTiles, start_copy
from flaxasync.kernels.grouped_matmul import STEP_SECONDS, check_grouped, divisors

HEIGHT, WIDTH = 512, 1024  # the sides of what is multiplied at once


def grouped_weight_gradient(
    x: Array,
    dys: Sequence[Array],
    experts: Array,
    tiles: Array,
    expert_count: int,
    *,
    tile_rows: int,
    initial: Sequence[Array] = (),
) -> tuple[Array, ...]:
    """Returns the gradients of weights [E, K, N] for each dy; see the head of this file.

    Args:
      x, dys: The operands; all dy have the same shape. Rows of padding must be zero in x or in dy.
      experts, tiles: The expert of each tile and the number of live tiles. Every expert has a live tile, or else its
        gradients are not written.
      expert_count: The number of experts, E.
      tile_rows: The rows of a tile, a multiple of 128.
      initial: What to add to, one float32 array [E, K, N] for each dy; the results take its memory. None by default.

    Raises:
      NotImplementedError: The kernel cannot serve such operands.
    """
    (m, k), n = x.shape, dys[0].shape[1]
    check_grouped("grouped_weight_gradient", x.dtype, tile_rows, k, n)
    blocks, vmem_bytes = _choose(x, dys, expert_count, tile_rows, len(initial))
    grid, count, block = (k // blocks.k, n // blocks.n), len(dys), (blocks.k, blocks.n)
    scratch: list[Ref] = [OutgoingTiles.allocate(2, block, jnp.float32)] * count
    like = output((expert_count, k, n), x, *dys, *initial).update(dtype=jnp.float32)

    def body(experts: Ref, x_tile: Ref, *refs: Ref) -> None:
        """Does one step of the grid. x [t, k], each dy [t, n] and each initial [k, n] are in VMEM, each dw in HBM."""
        dy_tiles, old, dws, outgoing = refs[:count], refs[count : -2 * count], refs[-2 * count : -count], refs[-count:]
        (i, j, tile), end = (pl.program_id(axis) for axis in range(3)), pl.num_programs(2) - 1
        expert = experts[tile]
        first = (tile == 0) | (experts[jnp.maximum(tile - 1, 0)] != expert)
        last = (tile == end) | (experts[jnp.minimum(tile + 1, end)] != expert)
        number = (i * grid[1] + j) * expert_count + expert  # of the block, because every expert has a tile
        slot = outgoing[0].slot(number)
        sums = [one.tiles.at[slot] for one in outgoing]

        def wait_for(number: Scalar) -> None:
            for one in outgoing:
                one.wait(one.slot(number), *block)

        def store(rows: pl.Slice, columns: pl.Slice) -> None:
            for one, dw in zip(outgoing, dws, strict=True):
                target = (
                    aligned(i * blocks.k + rows.start, rows.size, LANES),
                    aligned(j * blocks.n + columns.start, columns.size, LANES),
                )
                start_copy(one.tiles.at[slot, rows, columns], dw.at[expert, *target], one.sems.at[slot])

        pl.when(first)(lambda: outgoing[0].free(number, wait_for))
        for terms, condition in ((old or None, first), (sums, jnp.logical_not(first))):
            pl.when(condition)(functools.partial(_add, x_tile, dy_tiles, sums, terms, last, store))
        is_end = (i == grid[0] - 1) & (j == grid[1] - 1) & (tile == end)
        pl.when(is_end)(lambda: outgoing[0].finish(math.prod(grid) * expert_count, wait_for))

    dws = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*grid, tiles),
            in_specs=[
                pl.BlockSpec((tile_rows, blocks.k), lambda i, j, tile, experts: (tile, i)),
                *[pl.BlockSpec((tile_rows, blocks.n), lambda i, j, tile, experts: (tile, j))] * count,
                *[pl.BlockSpec((None, *block), lambda i, j, tile, experts: (experts[tile], i, j))] * len(initial),
            ],
            out_specs=[HBM] * count,
            scratch_shapes=scratch,
        ),
        out_shape=[like] * count,
        input_output_aliases={2 + count + i: i for i in range(len(initial))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=vmem_limit(vmem_bytes)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n * count,
            transcendentals=0,
            bytes_accessed=x.dtype.itemsize * m * (k * grid[1] + count * n * grid[0])
            + 4 * expert_count * k * n * (count + len(initial)),
        ),
        name="grouped_weight_gradient",
    )(experts, x, *dys, *initial)
    return tuple(dws)


def _add(
    x_tile: Ref,
    dy_tiles: Sequence[Ref],
    sums: Sequence[Ref],
    terms: Sequence[Ref] | None,
    last: Condition,
    store: Callable[[pl.Slice, pl.Slice], None],
) -> None:
    """Makes x.T @ dy plus a term, if there is one, each sum [k, n] in vector memory.

    In the last tile of an expert `store` is called for each sub-block of the sums as soon as it is finished.
    """
    (_, k), n = x_tile.shape, dy_tiles[0].shape[1]
    height, width = largest_divisor(k, HEIGHT, LANES), largest_divisor(n, WIDTH, LANES)

    @pl.loop(0, k // height)
    def on_rows(i: Scalar) -> None:
        rows = aligned(i * height, height, LANES)
        x_transposed = x_tile[:, rows].T  # once for all columns

        @pl.loop(0, n // width)
        def on_columns(j: Scalar) -> None:
            columns = aligned(j * width, width, LANES)
            for number, dy in enumerate(dy_tiles):
                value = dot(x_transposed, dy[:, columns])
                sums[number][rows, columns] = value if terms is None else terms[number][rows, columns] + value
            pl.when(last)(lambda: store(rows, columns))


def _choose(x: Array, dys: Sequence[Array], experts: int, rows: int, initial: int) -> tuple[Tiles, int]:
    """Returns the blocks that are the fastest of those that fit into vector memory, and what they take of it."""
    (m, k), n, itemsize, chip = x.shape, dys[0].shape[1], x.dtype.itemsize, chip_in_use()
    bandwidth = chip.hbm_bandwidth * chip.hbm_efficiency

    def vmem_bytes(tiles: Tiles) -> int:
        streamed = itemsize * rows * (tiles.k + len(dys) * tiles.n)
        return 2 * streamed + 4 * tiles.k * tiles.n * (2 * len(dys) + 2 * initial) + 8 * HEIGHT * WIDTH

    def seconds(tiles: Tiles) -> float:
        streamed = itemsize * m * (k * (n // tiles.n) + len(dys) * n * (k // tiles.k))
        stored = 4 * experts * k * n * (len(dys) + initial)
        last = 4 * len(dys) * tiles.k * tiles.n  # nothing is multiplied meanwhile
        steps = (k // tiles.k) * (n // tiles.n) * (m // rows)
        moving = max((streamed + stored) / bandwidth, 2 * m * k * n * len(dys) / chip.flops)
        return moving + last / bandwidth + steps * STEP_SECONDS

    choices = [Tiles(rows, *sides) for sides in itertools.product(divisors(k), divisors(n))]
    best = min((tiles for tiles in choices if vmem_bytes(tiles) <= available()), key=seconds)
    return best, vmem_bytes(best)
