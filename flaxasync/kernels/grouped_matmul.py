"""Products of rows that are sorted by expert with the weights of their experts, as one Pallas TPU
kernel.

```
x        [M, K]       rows sorted by expert, in tiles of t rows that have one expert each
w        [E, K, N]    one matrix for each expert, or [E, N, K] if transposed
experts  [M / t]      int32, the expert of each tile, ascending over the live tiles
tiles    []           int32, the number of live tiles; rows beyond them are neither read nor written
y        [M, N]       y[tile] = x[tile] @ w[experts[tile]], of x's dtype; sums are float32

grid           columns of y   ->   groups of tiles   ->   blocks of K   ->   tiles of the group
x                                                         x               x        one comes each step
w              x                   if K is divided        x                        one comes each group
```

A group is a run of tiles of one expert. If K is whole, it is all tiles of the expert, so each
weight is read once in a call. Otherwise the float32 sums of a group stay in vector memory until all
blocks of K are added, and memory limits it.

Pallas fetches x and stores y, a step ahead. The kernel fetches w itself, a group ahead, because one
step is too short for a block of w if tiles have few rows. `Blocks.choose` takes the sizes that are
the fastest. Two cores of a chip share the columns out, and nothing is fetched ahead from one block
of columns to the next.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.matmul import Epilogue, accumulate, dot
from flaxasync.kernels.engine.operands import (
    HBM,
    LANES,
    Ref,
    Scalar,
    aligned,
    largest_divisor,
    output,
    sides_of_w,
    when,
)
from flaxasync.kernels.engine.slots import IncomingTiles, start_copy
from flaxasync.kernels.engine.tiling import Tiling
from flaxasync.kernels.engine.vector_memory import chip_in_use, vmem_limit
from flaxasync.kernels.grouped_blocks import (
    SUB_BLOCK,
    Blocks,
    GroupStep,
    Problem,
    outer_semantics,
)


def grouped_matmul(
    xs: Sequence[Array],
    ws: Sequence[Array],
    experts: Array,
    tiles: Array,
    *,
    tile_rows: int,
    transposed: bool = False,
    epilogue: Epilogue | None = None,
    operands: Sequence[Array] = (),
) -> tuple[Array, ...]:
    """Returns the product [M, N] of the only x with each w, which share one reading of x; or the
    sum of the products of each x with its w. See the head of this file.

    Args:
      xs, ws, experts, tiles: The operands, as `check_grouped` says; all x have the same shape, and
        all w.
      tile_rows: The rows of a tile, a multiple of 128.
      transposed: Whether each w is [E, N, K].
      epilogue: What to return instead of the products: its results [M, N].
      operands: The operands [M, N] of the epilogue.

    Raises:
      NotImplementedError: No tile of so many rows fits into vector memory.
    """
    name = "grouped_sum" if len(xs) > 1 else "grouped_matmul"
    n = ws[0].shape[1 if transposed else 2]
    joined = len(ws) // len(xs)
    results = epilogue.results if epilogue else joined
    arrays = len(operands) + results
    problem = Problem.of(xs, ws, n, tile_rows, arrays)
    blocks, vmem_bytes = Blocks.choose(problem)
    kernel = _Kernel(blocks, transposed, len(xs), joined, epilogue, chip_in_use().cores)
    x_spec = pl.BlockSpec((tile_rows, blocks.k), blocks.x_index)
    y_spec = pl.BlockSpec((tile_rows, blocks.n), blocks.y_index)
    specs = GroupedOperands([x_spec] * len(xs), [HBM] * len(ws), [y_spec] * len(operands))
    y = output((problem.m, n), xs[0], *xs[1:], *ws, *operands)
    (ys,) = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks.columns, tiles * blocks.depth),
            in_specs=(specs,),
            out_specs=([y_spec] * results,),
            scratch_shapes=kernel.scratch(xs[0].dtype),
        ),
        out_shape=([y] * results,),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(outer_semantics(kernel.cores), "arbitrary"),
            vmem_limit_bytes=vmem_limit(vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * problem.m * problem.k * n * len(ws),
            transcendentals=0,
            bytes_accessed=problem.itemsize * problem.elements(blocks, readings=1),
        ),
        name=name,
    )(blocks.table(experts, tiles), GroupedOperands(list(xs), list(ws), list(operands)))
    return tuple(ys)


class GroupedOperands(NamedTuple):
    """The operands but for the table."""

    xs: Sequence[Ref]  # blocks [rows, k] in VMEM
    ws: Sequence[Ref]  # in HBM
    of_epilogue: Sequence[Ref]  # blocks [rows, n] in VMEM


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The body of the kernel. Several pairs of x and w have their products added, or several w lie
    side by side.
    """

    blocks: Blocks
    transposed: bool
    pairs: int  # arrays x
    joined: int  # arrays w for each x
    epilogue: Epilogue | None
    cores: int

    def __call__(
        self,
        table: Ref,
        given: GroupedOperands,
        ys: Sequence[Ref],
        w_tiles: Ref,
        sums: Ref,
        slot: Ref,
    ) -> None:
        """Does one step of the grid: one block of each x times one block of each w.

        The last three are the scratch memory: see `scratch`.
        """
        j = pl.program_id(0)
        step = pl.program_id(1)
        at = self.blocks.at(step, table)

        same = at.k + 1 < self.blocks.depth
        end = at.first + at.size
        ends = end * self.blocks.depth == pl.num_programs(1)
        next_j = jnp.where(ends & jnp.logical_not(same), j + 1, j)
        tile = jnp.where(same, at.first, jnp.where(ends, 0, end))
        # a core has some blocks of columns of its own, and fetches nothing for those of others
        if self.cores > 1:
            begins = step == 0
        else:
            begins = (j == 0) & (step == 0)

        @pl.when(begins)
        def begin() -> None:
            slot[0] = 1
            self.start_w(w_tiles, 0, given.ws, table[0, 0], 0, j, 0, 1)

        @pl.when(at.tile == 0)
        def begin_group() -> None:
            slot[0] = 1 - slot[0]

        if self.cores > 1:
            continues = next_j == j
        else:
            continues = next_j < self.blocks.columns

        @pl.when(continues)
        def begin_next_group() -> None:
            next_k = jnp.where(same, at.k + 1, 0)
            other = 1 - slot[0]
            self.start_w(w_tiles, other, given.ws, table[0, tile], next_k, next_j, at.tile, at.size)

        with jax.named_scope("multiply"):
            if self.blocks.depth > 1:
                of_group = at.tile
            else:
                of_group = 0
            self.multiply(at, given, ys, w_tiles, slot[0], sums.at[of_group])

    def scratch(self, dtype: jnp.dtype) -> list[Ref]:
        """Returns blocks of w for this group and the next one, the sums of a group, and the slot of
        this group's w.
        """
        blocks = self.blocks
        width = self.joined * blocks.width
        shape = sides_of_w(self.transposed, blocks.k, width)
        sums = (1, 1, 8, LANES)  # as small as can be
        if blocks.depth > 1:
            sums = (blocks.most, blocks.panels, blocks.rows, width)
        return [
            IncomingTiles.allocate(2 * blocks.panels, (self.pairs, *shape), dtype),
            pltpu.VMEM(sums, jnp.float32),
            pltpu.SMEM((1,), jnp.int32),
        ]

    def start_w(
        self,
        w_tiles: IncomingTiles,
        half: Scalar,
        ws: Sequence[Ref],
        expert: Scalar,
        k: Scalar,
        j: Scalar,
        share: Scalar,
        shares: Scalar,
    ) -> None:
        """Starts to fetch a share of the panels of block (k, j) of an expert's weights."""
        blocks = self.blocks
        following = share + 1
        first = lax.div(share * blocks.panels + shares - 1, shares)
        end = lax.div(following * blocks.panels + shares - 1, shares)

        @pl.loop(first, end)
        def start(panel: Scalar) -> None:
            slot = half * blocks.panels + panel
            columns = aligned(j * blocks.n + panel * blocks.width, blocks.width, LANES)
            rows = aligned(k * blocks.k, blocks.k, LANES)
            source = sides_of_w(self.transposed, rows, columns)
            for number, w in enumerate(ws):
                pair, part = divmod(number, self.joined)
                of_part = pl.ds(part * blocks.width, blocks.width)
                place = sides_of_w(self.transposed, slice(None), of_part)
                target = w_tiles.tiles.at[slot, pair, *place]
                start_copy(w.at[expert, *source], target, w_tiles.sems.at[slot])

    def multiply(
        self,
        at: GroupStep,
        given: GroupedOperands,
        ys: Sequence[Ref],
        w_tiles: IncomingTiles,
        half: Scalar,
        sums: Ref,
    ) -> None:
        """Adds the products of this step to the sums, panel by panel, and finishes them in the last
        block of K.
        """
        blocks = self.blocks
        height = largest_divisor(blocks.rows, SUB_BLOCK, LANES)

        def for_each_sub_block(use: Callable[..., None]) -> None:
            @pl.loop(0, blocks.panels)
            def on_panel(panel: Scalar) -> None:
                slot = half * blocks.panels + panel
                when(at.tile == 0, w_tiles.wait, slot, *w_tiles.tiles.shape[1:])

                @pl.loop(0, blocks.rows // height)
                def on_rows(i: Scalar) -> None:
                    use((panel, aligned(i * height, height, LANES)), slot)

        def product(depth: int, index: tuple[Scalar, pl.Slice], slot: Scalar) -> Array:
            tiles = (w_tiles.tiles[slot, pair] for pair in range(self.pairs))
            products = (
                dot(x[index[1]], w, transposed=self.transposed)
                for x, w in zip(given.xs, tiles, strict=True)
            )
            return functools.reduce(jnp.add, products)

        def finish(value: Array, index: tuple[Scalar, pl.Slice], slot: Scalar) -> None:
            panel, rows = index
            here = rows, aligned(panel * blocks.width, blocks.width, LANES)
            values = tuple(jnp.split(value, self.joined, axis=1))
            if self.epilogue is not None:
                others = tuple(other[here].astype(jnp.float32) for other in given.of_epilogue)
                values = self.epilogue(values, others)
            for y, result in zip(ys, values, strict=True):
                y[here] = result.astype(y.dtype)

        accumulate(
            Tiling((blocks.depth * blocks.k,), blocks.k),
            at.k,
            first=at.k == 0,
            last=at.k == blocks.depth - 1,
            accumulator=sums,
            for_each_sub_block=for_each_sub_block,
            product=product,
            finish=finish,
        )
