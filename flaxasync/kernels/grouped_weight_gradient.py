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

There can be several x with their dy, such as those of two turns of a ring: the tiles of an expert
in all of them follow each other, and dw is read and written once. To read and write float32 dw
takes as long as to multiply hundreds of rows.

The kernel moves dw itself. A block is stored sub-block by sub-block, as they are finished in the
last tile of the expert, because all at once would keep the next tiles of x and dy waiting. What is
added to is fetched into the memory
of the sums a whole block ahead: one tile would be too short for it. Two cores of a chip share the
  blocks of K out.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
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
    when,
)
from flaxasync.kernels.engine.slots import OutgoingTiles, start_copy, wait
from flaxasync.kernels.engine.tiling import split
from flaxasync.kernels.grouped_matmul import (
    STEP_SECONDS,
    check_grouped,
    divisors,
    imbalance,
    outer_semantics,
)

# the sides of what is multiplied at once
HEIGHT = 512
WIDTH = 1024
EXPERT, RANK, FACTOR, NEXT, FIRST_TILE = range(5)  # the rows of `order_of_tiles`
_NONE = np.iinfo(np.int32).max


class Factors(NamedTuple):
    """Sorted rows, and what they are multiplied by. Rows of padding in live tiles must be zero in
    one of the two.
    """

    x: Array  # [M, K]
    dys: tuple[Array, ...]  # [M, N]
    experts: Array  # [M / t]: the expert of each tile, ascending over the live ones
    tiles: Array  # []: the number of live tiles, 1 or more


def grouped_weight_gradient(
    factors: Sequence[Factors], expert_count: int, *, tile_rows: int, initial: Sequence[Array] = ()
) -> tuple[Array, ...]:
    """Returns the gradients of weights [E, K, N] for each dy, summed over `factors`; see the head
    of this file.

    Args:
      factors: The operands. All x have the same K, and all dy the same N.
      expert_count: The number of experts, E.
      tile_rows: The rows of a tile, a multiple of 128.
      initial: What to add to, one float32 array [E, K, N] for each dy; the results take its memory.
        Zeros by default.

    Raises:
      NotImplementedError: The kernel cannot serve such operands.
    """
    x = factors[0].x
    dys = factors[0].dys
    k = x.shape[1]
    n = dys[0].shape[1]
    check_grouped("grouped_weight_gradient", x.dtype, tile_rows, k, n)
    blocks, vmem_bytes = _choose(factors, expert_count, tile_rows, initial)
    grid = (k // blocks.k, n // blocks.n)
    count = len(dys)
    block = (blocks.k, blocks.n)
    streamed = 1 + len(dys)
    cores = chip_in_use().cores
    scratch: list[Ref] = [OutgoingTiles.allocate(_slots(initial), block, jnp.float32)] * count
    operands = [array for one in factors for array in (one.x, *one.dys)]
    like = output((expert_count, k, n), *operands, *initial).update(dtype=jnp.float32)

    def body(order: Ref, *refs: Ref) -> None:
        """Does one step of the grid. x [t, k] and each dy [t, n] are in VMEM, each initial and dw
        in HBM.
        """
        tiles = refs[: len(operands)]
        old = refs[len(operands) : -2 * count]
        dws = refs[-2 * count : -count]
        outgoing = refs[-count:]
        i, j, step = (pl.program_id(axis) for axis in range(3))
        end = pl.num_programs(2) - 1
        # those that have tiles
        expert = order[EXPERT, step]
        experts = order[RANK, end] + 1
        first = (step == 0) | (order[EXPERT, jnp.maximum(step - 1, 0)] != expert)
        last = (step == end) | (order[EXPERT, jnp.minimum(step + 1, end)] != expert)
        before, blocks_in_all = (0, grid[1]) if cores > 1 else (i * grid[1], grid[0] * grid[1])
        # in the order of storing
        number = (before + j) * experts + order[RANK, step]
        numbers = blocks_in_all * experts
        slot = outgoing[0].slot(number)
        sums = [one.tiles.at[slot] for one in outgoing]

        def wait_for(number: Scalar) -> None:
            for one in outgoing:
                one.wait(one.slot(number), *block)

        def fetch(number: Scalar, expert: Scalar) -> None:
            row, column = split(lax.div(number, experts), grid[1])
            at = (i if cores > 1 else row, column)
            to = outgoing[0].slot(number)
            here = tuple(
                aligned(index * size, size, LANES) for index, size in zip(at, block, strict=True)
            )
            for one, ref in zip(outgoing, old, strict=True):
                start_copy(ref.at[expert, *here], one.tiles.at[to], one.sems.at[to])

        def target(dw: Ref, expert: Scalar, rows: pl.Slice, columns: pl.Slice) -> Ref:
            here = (
                aligned(i * blocks.k + rows.start, rows.size, LANES),
                aligned(j * blocks.n + columns.start, columns.size, LANES),
            )
            return dw.at[expert, *here]

        def store(rows: pl.Slice, columns: pl.Slice) -> None:
            for one, dw in zip(outgoing, dws, strict=True):
                start_copy(
                    one.tiles.at[slot, rows, columns],
                    target(dw, expert, rows, columns),
                    one.sems.at[slot],
                )

        def store_zeros(start: Scalar, stop: Scalar) -> None:
            """Stores the gradients of experts without tiles; the slot is free."""

            @pl.when(start < stop)
            def store_some() -> None:
                sums[0][...] = jnp.zeros(block, jnp.float32)

                @pl.loop(start, stop)
                def on_expert(expert: Scalar) -> None:
                    for dw in dws:
                        start_copy(
                            sums[0],
                            target(dw, expert, pl.ds(0, blocks.k), pl.ds(0, blocks.n)),
                            outgoing[0].sems.at[slot],
                        )
                        wait(sums[0], outgoing[0].sems.at[slot])

        # its slot is the next one to be written
        pl.when(first & (number >= 2))(lambda: wait_for(number - 2))
        if initial:
            when((number == 0) & first, fetch, number, expert)
            pl.when(first & (number + 1 < numbers))(lambda: fetch(number + 1, order[NEXT, step]))
            when(first, wait_for, number)
        else:
            previous = jnp.where(step == 0, -1, order[EXPERT, jnp.maximum(step - 1, 0)])
            pl.when(first)(lambda: store_zeros(previous + 1, expert))
            pl.when(step == 0)(lambda: store_zeros(order[EXPERT, end] + 1, expert_count))
        for which in range(len(factors)):
            x_tile, *dy_tiles = tiles[which * streamed :][:streamed]
            cases = ((True, True),) if initial else ((True, jnp.logical_not(first)), (False, first))
            for begun, condition in cases:
                add = functools.partial(_add, x_tile, dy_tiles, sums, begun, last, store)
                when(condition & (order[FACTOR, step] == which), add)

        @pl.when((number + 1 == numbers) & (step == end))
        def finish() -> None:
            wait_for(number)
            pl.when(number > 0)(lambda: wait_for(number - 1))

    in_specs = []
    for which in range(len(factors)):
        row = FIRST_TILE + which
        in_specs += [
            pl.BlockSpec(
                (tile_rows, blocks.k), lambda i, j, step, order, row=row: (order[row, step], i)
            ),
            *[
                pl.BlockSpec(
                    (tile_rows, blocks.n), lambda i, j, step, order, row=row: (order[row, step], j)
                )
            ]
            * count,
        ]
    dws = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*grid, sum(one.tiles for one in factors)),
            in_specs=[*in_specs, *[HBM] * len(initial)],
            out_specs=[HBM] * count,
            scratch_shapes=scratch,
        ),
        out_shape=[like] * count,
        input_output_aliases={1 + len(operands) + i: i for i in range(len(initial))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(outer_semantics(cores), "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * _rows(factors) * k * n * count,
            transcendentals=0,
            bytes_accessed=x.dtype.itemsize * _rows(factors) * (k * grid[1] + count * n * grid[0])
            + 4 * expert_count * k * n * (count + len(initial)),
        ),
        name="grouped_weight_gradient",
    )(order_of_tiles(factors), *operands, *initial)
    return tuple(dws)


def order_of_tiles(factors: Sequence[Factors]) -> Array:
    """Returns the order in which tiles are multiplied, [4 + len(factors), steps].

    Its rows are the expert of each step, how many experts came before, which of `factors` the
    step's tile is of, the next expert, which is the first one after the last, and for each of
    `factors` the last tile that has come.
    """
    constant = all(isinstance(one.experts, np.ndarray) for one in factors)
    xp: Any = np if constant else jnp  # tables of constants have to be constants to be simulated
    steps = sum(one.experts.size for one in factors)
    step = xp.arange(steps, dtype=np.int32)
    places = []
    for number, one in enumerate(factors):
        tile = xp.arange(one.experts.size, dtype=np.int32)
        place = tile
        for other_number, other in enumerate(factors):
            if other_number != number:
                earlier = xp.less_equal if other_number < number else xp.less
                live = xp.arange(other.experts.size, dtype=np.int32) < other.tiles
                place = place + xp.sum(
                    live[None] & earlier(other.experts[None], one.experts[:, None]),
                    axis=1,
                    dtype=np.int32,
                )
        places.append(xp.where(tile < one.tiles, place, steps))
    came = [
        xp.maximum(xp.sum(place[None] <= step[:, None], axis=1, dtype=np.int32) - 1, 0)
        for place in places
    ]
    which = xp.zeros(steps, np.int32)
    expert = factors[0].experts[came[0]]
    for number, one in enumerate(factors[1:], 1):
        here = xp.any(places[number][None] == step[:, None], axis=1)
        which = xp.where(here, number, which)
        expert = xp.where(here, one.experts[came[number]], expert)
    changes = xp.cumsum(expert[1:] != expert[:-1], dtype=np.int32)
    live = step < sum(one.tiles for one in factors)
    later = xp.min(
        xp.where(live[None] & (expert[None] > expert[:, None]), expert[None], _NONE), axis=1
    )
    following = xp.where(later == _NONE, expert[0], later)
    rows = [expert, xp.concatenate([xp.zeros(1, np.int32), changes]), which, following, *came]
    return xp.stack(rows).astype(np.int32)


def _slots(initial: Sequence[Array]) -> int:
    """Returns how many blocks of a dw are in vector memory: one grows, one leaves, and one
    comes.
    """
    return 3 if initial else 2


def _rows(factors: Sequence[Factors]) -> int:
    return sum(one.x.shape[0] for one in factors)


def _add(
    x_tile: Ref,
    dy_tiles: Sequence[Ref],
    sums: Sequence[Ref],
    begun: bool,
    last: Condition,
    store: Callable[[pl.Slice, pl.Slice], None],
) -> None:
    """Adds x.T @ dy to each sum [k, n] in vector memory, or writes it there if `begun` is False.

    In the last tile of an expert `store` is called for each sub-block of the sums as soon as it is
    finished.
    """
    _, k = x_tile.shape
    n = dy_tiles[0].shape[1]
    height = largest_divisor(k, HEIGHT, LANES)
    width = largest_divisor(n, WIDTH, LANES)

    @pl.loop(0, k // height)
    def on_rows(i: Scalar) -> None:
        rows = aligned(i * height, height, LANES)
        x_transposed = x_tile[:, rows].T  # once for all columns

        @pl.loop(0, n // width)
        def on_columns(j: Scalar) -> None:
            columns = aligned(j * width, width, LANES)
            for number, dy in enumerate(dy_tiles):
                value = dot(x_transposed, dy[:, columns])
                sums[number][rows, columns] = (
                    sums[number][rows, columns] + value if begun else value
                )
            when(last, store, rows, columns)


def _choose(
    factors: Sequence[Factors], experts: int, rows: int, initial: Sequence[Array]
) -> tuple[Tiles, int]:
    """Returns the blocks that are the fastest of those that fit into vector memory, and what they
    take of it.
    """
    x = factors[0].x
    dys = factors[0].dys
    m = _rows(factors)
    chip = chip_in_use()
    k = x.shape[1]
    n = dys[0].shape[1]
    itemsize = x.dtype.itemsize
    bandwidth = chip.hbm_bandwidth * chip.hbm_efficiency

    def vmem_bytes(tiles: Tiles) -> int:
        streamed = itemsize * rows * (tiles.k + len(dys) * tiles.n) * len(factors)
        return (
            2 * streamed + 4 * tiles.k * tiles.n * len(dys) * _slots(initial) + 8 * HEIGHT * WIDTH
        )

    def seconds(tiles: Tiles) -> float:
        streamed = itemsize * m * (k * (n // tiles.n) + len(dys) * n * (k // tiles.k))
        stored = 4 * experts * k * n * (len(dys) + len(initial))
        last = 4 * len(dys) * tiles.k * tiles.n  # nothing is multiplied meanwhile
        steps = (k // tiles.k) * (n // tiles.n) * (m // rows)
        products = 2 * m * k * n * len(dys) / chip.flops * imbalance(k // tiles.k, chip.cores)
        moving = max((streamed + stored) / bandwidth, products)
        return moving + last / bandwidth + steps * STEP_SECONDS

    choices = [Tiles(rows, *sides) for sides in itertools.product(divisors(k), divisors(n))]
    best = min((tiles for tiles in choices if vmem_bytes(tiles) <= available()), key=seconds)
    return best, vmem_bytes(best)
