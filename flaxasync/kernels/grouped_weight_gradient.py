"""The weight gradients of `grouped_matmul` as one Pallas TPU kernel.

```
x     [M, K]       rows sorted by expert, in tiles of t rows as `grouped_matmul` takes them
dy_i  [M, N]       several share one reading of x
dw_i  [E, K, N]    float32, the sum of x[tile].T @ dy_i[tile] over the tiles of an expert

grid   blocks of K   ->   blocks of N   ->   tiles
x            x                                 x       a block comes for each step
dy                             x               x
dw           x                 x                       stays for all tiles of an expert
```

There can be several x with their dy, such as those of two turns of a ring: the tiles of an expert
in all of them follow each other, and dw is read and written once. To read and write float32 dw
takes as long as to multiply hundreds of rows.

The kernel moves dw itself. A block is stored sub-block by sub-block, as they are finished in the
last tile of the expert, because all at once would keep the next tiles of x and dy waiting. What is
added to is fetched into the memory of the sums a whole block ahead: one tile would be too short for
it. Two cores of a chip share the blocks of K out.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
from flaxasync.kernels.engine.vector_memory import available, chip_in_use, vmem_limit
from flaxasync.kernels.grouped_blocks import (
    STEP_SECONDS,
    divisors,
    imbalance,
    outer_semantics,
    table_library,
)
from flaxasync.mesh import UnsupportedError

HEIGHT = 512  # rows of dw that are multiplied at once
WIDTH = 1024  # columns of dw that are multiplied at once
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
      factors: The operands, as `check_grouped` says. All x have the same K, and all dy the same N.
      expert_count: The number of experts, E.
      tile_rows: The rows of a tile, a multiple of 128.
      initial: What to add to, one float32 array [E, K, N] for each dy; the results take its memory.
        Zeros by default.

    Raises:
      NotImplementedError: No tile of so many rows fits into vector memory.
    """
    x = factors[0].x
    k = x.shape[1]
    n = factors[0].dys[0].shape[1]
    count = len(factors[0].dys)
    blocks, vmem_bytes = _choose(factors, expert_count, tile_rows, initial)
    kernel = _Kernel(blocks, (k // blocks.k, n // blocks.n), expert_count, chip_in_use().cores)
    tiles = [Tile(one.x, list(one.dys)) for one in factors]
    factor_arrays = jax.tree.leaves(tiles)
    arrays = [*factor_arrays, *initial]
    dw = output((expert_count, k, n), *arrays, dtype=jnp.float32)

    def specs(row: int) -> Tile:
        """Returns the blocks of the factors whose tiles a row of the order names."""

        def x_index(i: Scalar, j: Scalar, step: Scalar, order: Ref) -> tuple[Scalar, Scalar]:
            return order[row, step], i

        def dy_index(i: Scalar, j: Scalar, step: Scalar, order: Ref) -> tuple[Scalar, Scalar]:
            return order[row, step], j

        dy = pl.BlockSpec((tile_rows, blocks.n), dy_index)
        return Tile(pl.BlockSpec((tile_rows, blocks.k), x_index), [dy] * count)

    block: Ref = OutgoingTiles.allocate(_slots(initial), (blocks.k, blocks.n), jnp.float32)
    of_factors = [specs(FIRST_TILE + which) for which in range(len(factors))]
    aliases = {1 + len(factor_arrays) + i: i for i in range(len(initial))}
    rows, columns = kernel.grid
    read = x.dtype.itemsize * _rows(factors) * (k * columns + count * n * rows)
    (dws,) = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, columns, sum(one.tiles for one in factors)),
            in_specs=(of_factors, [HBM] * len(initial)),
            out_specs=([HBM] * count,),
            scratch_shapes=([block] * count,),
        ),
        out_shape=([dw] * count,),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(outer_semantics(kernel.cores), "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * _rows(factors) * k * n * count,
            transcendentals=0,
            bytes_accessed=read + 4 * expert_count * k * n * (count + len(initial)),
        ),
        name="grouped_weight_gradient",
    )(order_of_tiles(factors), tiles, list(initial))
    return tuple(dws)


class Tile(NamedTuple):
    """What a step reads of some factors."""

    x: Ref  # [t, k] VMEM
    dys: list[Ref]  # [t, n] VMEM


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The body of the kernel."""

    blocks: Tiles  # the sides k and n of a block of dw
    grid: tuple[int, int]  # blocks of K and of N
    expert_count: int
    cores: int

    def __call__(
        self,
        order: Ref,
        tiles: Sequence[Tile],
        initial: Sequence[Ref],  # [E, K, N] HBM
        dws: Sequence[Ref],  # [E, K, N] HBM
        outgoing: Sequence[OutgoingTiles],
    ) -> None:
        """Does one step of the grid."""
        i, j, step = (pl.program_id(axis) for axis in range(3))
        end = pl.num_programs(2) - 1
        expert = order[EXPERT, step]
        present = order[RANK, end] + 1  # experts that have tiles
        first = (step == 0) | (order[EXPERT, jnp.maximum(step - 1, 0)] != expert)
        last = (step == end) | (order[EXPERT, jnp.minimum(step + 1, end)] != expert)
        block, block_count = self.place(i, j)
        # of this block of dw of this expert, in the order of storing
        number = block * present + order[RANK, step]
        numbers = block_count * present
        slot = outgoing[0].slot(number)
        sums = [one.tiles.at[slot] for one in outgoing]

        def wait_for(which: Scalar) -> None:
            for one in outgoing:
                one.wait(one.slot(which), self.blocks.k, self.blocks.n)

        def fetch(which: Scalar, of_expert: Scalar) -> None:
            row, column = split(lax.div(which, present), self.grid[1])
            if self.cores > 1:
                of_core = i
            else:
                of_core = row
            to = outgoing[0].slot(which)
            rows = aligned(of_core * self.blocks.k, self.blocks.k, LANES)
            columns = aligned(column * self.blocks.n, self.blocks.n, LANES)
            for one, ref in zip(outgoing, initial, strict=True):
                start_copy(ref.at[of_expert, rows, columns], one.tiles.at[to], one.sems.at[to])

        def target(dw: Ref, expert: Scalar, rows: pl.Slice, columns: pl.Slice) -> Ref:
            of_k = aligned(i * self.blocks.k + rows.start, rows.size, LANES)
            of_n = aligned(j * self.blocks.n + columns.start, columns.size, LANES)
            return dw.at[expert, of_k, of_n]

        def store(rows: pl.Slice, columns: pl.Slice) -> None:
            for one, dw in zip(outgoing, dws, strict=True):
                sub_block = one.tiles.at[slot, rows, columns]
                start_copy(sub_block, target(dw, expert, rows, columns), one.sems.at[slot])

        def store_zeros(start: Scalar, stop: Scalar) -> None:
            """Stores the gradients of experts without tiles; the slot is free."""

            @pl.when(start < stop)
            def store_some() -> None:
                sums[0][...] = jnp.zeros(sums[0].shape, jnp.float32)
                whole = pl.ds(0, self.blocks.k), pl.ds(0, self.blocks.n)

                @pl.loop(start, stop)
                def on_expert(expert: Scalar) -> None:
                    for dw in dws:
                        sem = outgoing[0].sems.at[slot]
                        start_copy(sums[0], target(dw, expert, *whole), sem)
                        wait(sums[0], sem)

        @pl.when(first & (number >= 2))
        def free() -> None:
            # its slot is written next: with two slots by these sums, with three by fetch_next
            wait_for(number - 2)

        if initial:
            when((number == 0) & first, fetch, number, expert)

            @pl.when(first & (number + 1 < numbers))
            def fetch_next() -> None:
                fetch(number + 1, order[NEXT, step])

            when(first, wait_for, number)
        else:
            previous = jnp.where(step == 0, -1, order[EXPERT, jnp.maximum(step - 1, 0)])

            @pl.when(first)
            def store_skipped() -> None:
                store_zeros(previous + 1, expert)

            @pl.when(step == 0)
            def store_behind_the_last() -> None:
                store_zeros(order[EXPERT, end] + 1, self.expert_count)

        for which, tile in enumerate(tiles):
            mine = order[FACTOR, step] == which
            add = functools.partial(_add, tile, sums, last=last, store=store)
            if initial:
                when(mine, functools.partial(add, begun=True))
            else:
                when(jnp.logical_not(first) & mine, functools.partial(add, begun=True))
                when(first & mine, functools.partial(add, begun=False))

        @pl.when((number + 1 == numbers) & (step == end))
        def finish() -> None:
            wait_for(number)

            @pl.when(number > 0)
            def finish_the_one_before() -> None:
                wait_for(number - 1)

    def place(self, i: Scalar, j: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the number of a block of dw among those of this core, and how many it has."""
        rows, columns = self.grid
        before: Scalar = 0
        blocks = columns
        if self.cores == 1:
            before = i * columns
            blocks = rows * columns
        return before + j, blocks


def order_of_tiles(factors: Sequence[Factors]) -> Array:
    """Returns the order in which tiles are multiplied, [4 + len(factors), steps].

    Its rows are the expert of each step, how many experts came before, which of `factors` the
    step's tile is of, the next expert, which is the first one after the last, and for each of
    `factors` the last tile that has come.
    """
    xp = table_library([one.experts for one in factors])
    steps = sum(one.experts.size for one in factors)
    step = xp.arange(steps, dtype=np.int32)
    places = [_places(factors, number, steps) for number in range(len(factors))]
    latest = []  # of each of `factors`, the last tile that has come at each step
    for place in places:
        count = xp.sum(place[None] <= step[:, None], axis=1, dtype=np.int32)
        latest.append(xp.maximum(count - 1, 0))
    factor = xp.zeros(steps, np.int32)
    expert = factors[0].experts[latest[0]]
    for number, one in enumerate(factors[1:], 1):
        here = xp.any(places[number][None] == step[:, None], axis=1)
        factor = xp.where(here, number, factor)
        expert = xp.where(here, one.experts[latest[number]], expert)
    changes = xp.cumsum(expert[1:] != expert[:-1], dtype=np.int32)
    live = step < sum(one.tiles for one in factors)
    is_later = live[None] & (expert[None] > expert[:, None])
    # _NONE where no expert is later
    later = xp.min(xp.where(is_later, expert[None], _NONE), axis=1)
    following = xp.where(later == _NONE, expert[0], later)
    ranks = xp.concatenate([xp.zeros(1, np.int32), changes])
    return xp.stack([expert, ranks, factor, following, *latest]).astype(np.int32)


def _places(factors: Sequence[Factors], number: int, steps: int) -> Array:
    """Returns at which step each tile of one of the factors is multiplied; `steps` for those that
    are not live.
    """
    xp = table_library([one.experts for one in factors])
    one = factors[number]
    tile = xp.arange(one.experts.size, dtype=np.int32)
    place = tile
    for other_number, other in enumerate(factors):
        if other_number != number:
            # of one expert, the tiles of the earlier factors come first
            if other_number < number:
                earlier = xp.less_equal
            else:
                earlier = xp.less
            live = xp.arange(other.experts.size, dtype=np.int32) < other.tiles
            before = live[None] & earlier(other.experts[None], one.experts[:, None])
            place = place + xp.sum(before, axis=1, dtype=np.int32)
    return xp.where(tile < one.tiles, place, steps)


def _slots(initial: Sequence[Array]) -> int:
    """Returns how many blocks of a dw are in vector memory: one grows, one leaves, and one
    comes.
    """
    if initial:
        return 3
    return 2


def _rows(factors: Sequence[Factors]) -> int:
    return sum(one.x.shape[0] for one in factors)


def _add(
    tile: Tile,
    sums: Sequence[Ref],
    *,
    begun: bool,
    last: Condition,
    store: Callable[[pl.Slice, pl.Slice], None],
) -> None:
    """Adds x.T @ dy to each sum [k, n] in vector memory, or writes it there if `begun` is False.

    In the last tile of an expert `store` is called for each sub-block of the sums as soon as it is
    finished.
    """
    k = tile.x.shape[1]
    n = tile.dys[0].shape[1]
    height = largest_divisor(k, HEIGHT, LANES)
    width = largest_divisor(n, WIDTH, LANES)

    @pl.loop(0, k // height)
    def on_rows(i: Scalar) -> None:
        rows = aligned(i * height, height, LANES)
        x_transposed = tile.x[:, rows].T  # once for all columns

        @pl.loop(0, n // width)
        def on_columns(j: Scalar) -> None:
            columns = aligned(j * width, width, LANES)
            for dy, dw in zip(tile.dys, sums, strict=True):
                value = dot(x_transposed, dy[:, columns])
                if begun:
                    value = dw[rows, columns] + value
                dw[rows, columns] = value
            when(last, store, rows, columns)


def _choose(
    factors: Sequence[Factors], expert_count: int, tile_rows: int, initial: Sequence[Array]
) -> tuple[Tiles, int]:
    """Returns the blocks that are the fastest of those that fit into vector memory, and what they
    take of it.

    Raises:
      NotImplementedError: None fit: tiles have too many rows, or there are too many factors.
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
        step_bytes = itemsize * tile_rows * (tiles.k + len(dys) * tiles.n) * len(factors)
        sums = 4 * tiles.k * tiles.n * len(dys) * _slots(initial)
        values = 2 * 4 * HEIGHT * WIDTH  # a product, and its sum
        return 2 * step_bytes + sums + values

    def seconds(tiles: Tiles) -> float:
        rows_of_blocks = k // tiles.k
        columns_of_blocks = n // tiles.n
        factor_bytes = itemsize * m * (k * columns_of_blocks + len(dys) * n * rows_of_blocks)
        dw_bytes = 4 * expert_count * k * n * (len(dys) + len(initial))  # written, and read
        last = 4 * len(dys) * tiles.k * tiles.n  # nothing is multiplied meanwhile
        steps = rows_of_blocks * columns_of_blocks * (m // tile_rows)
        products = 2 * m * k * n * len(dys) / chip.flops * imbalance(rows_of_blocks, chip.cores)
        longer = max((factor_bytes + dw_bytes) / bandwidth, products)
        return longer + last / bandwidth + steps * STEP_SECONDS

    choices = [Tiles(tile_rows, *sides) for sides in itertools.product(divisors(k), divisors(n))]
    fitting = [tiles for tiles in choices if vmem_bytes(tiles) <= available()]
    if not fitting:
        raise UnsupportedError(
            f"grouped_weight_gradient lacks tiles of {tile_rows} rows in {len(factors)} factors: "
            "none fits into vector memory; use fewer rows a tile, or fewer factors at once"
        )
    best = min(fitting, key=seconds)
    return best, vmem_bytes(best)
