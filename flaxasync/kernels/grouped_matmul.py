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
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.matmul import Epilogue, accumulate, dot
from flaxasync.kernels.engine.operands import (
    DTYPES,
    HBM,
    LANES,
    Ref,
    Scalar,
    aligned,
    largest_divisor,
    output,
    when,
)
from flaxasync.kernels.engine.slots import IncomingTiles, start_copy
from flaxasync.kernels.engine.tiling import Tiling, split
from flaxasync.kernels.engine.vector_memory import available, chip_in_use, vmem_limit
from flaxasync.mesh import UnsupportedError

SUB_BLOCK = 512  # rows of y that are multiplied at once
PANEL = 2**21  # elements of w that are multiplied at once, at most
PANELS = 4  # panels of a block of w at least, if they are wider than `NARROWEST`
NARROWEST = 512  # columns of a panel that is not made narrower to have more panels
DEEPEST = 4096  # elements of a block of K at most
STEP_SECONDS = 0.3e-6  # what a step takes beside its products
SUMS_RATE = 1e12  # elements in a second that are read, added and written


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
      xs, ws, experts, tiles: The operands; all x have the same shape, and all w.
      tile_rows: The rows of a tile, a multiple of 128.
      transposed: Whether each w is [E, N, K].
      epilogue: What to return instead of the products: its results [M, N].
      operands: The operands [M, N] of the epilogue.

    Raises:
      NotImplementedError: The kernel cannot serve such operands.
    """
    name = "grouped_sum" if len(xs) > 1 else "grouped_matmul"
    n = ws[0].shape[1 if transposed else 2]
    joined = len(ws) // len(xs)
    check_grouped(name, xs[0].dtype, tile_rows, xs[0].shape[1], n)
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


def check_grouped(caller: str, dtype: jnp.dtype, tile_rows: int, *features: int) -> None:
    """Raises NotImplementedError if the grouped kernels cannot serve operands of this dtype and of
    these features.
    """
    if dtype.name not in DTYPES:
        raise UnsupportedError(
            f"{caller} has kernels for {' and '.join(DTYPES)}: got {dtype.name}; cast the operands"
        )
    for what, size in (("tile_rows", tile_rows), *(("features", size) for size in features)):
        if size % LANES:
            raise UnsupportedError(
                f"{caller} needs {what} to be a multiple of {LANES}: got {size}; pad the operands"
            )


class GroupStep(NamedTuple):
    first: Scalar  # the first tile of the group
    size: Scalar  # tiles of the group
    k: Scalar  # block of K
    tile: Scalar  # tile of the group, counted from its first one


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a call: [rows, k] of each x, [k, n] of each w, [rows, n] of each y."""

    rows: int
    k: int
    n: int
    depth: int  # blocks of K
    columns: int  # blocks of N
    width: int  # columns of y that are multiplied at once
    most: int  # tiles of a group at most

    @property
    def panels(self) -> int:
        return self.n // self.width

    @classmethod
    def choose(cls, problem: "Problem") -> tuple[Self, int]:
        """Returns the blocks that fit into vector memory and are the fastest, and what they take of
        that memory.

        Experts are assumed to have equally many tiles.
        """
        k = problem.k
        n = problem.n
        rows = problem.rows
        candidates = []
        for deep, wide in itertools.product(divisors(k), divisors(n)):
            sizes = range(1, problem.tiles_of_an_expert + 1)
            if deep == k:
                sizes = range(problem.m // rows, problem.m // rows + 1)
            if deep <= DEEPEST:
                width = _width(deep, wide, problem.joined)
                candidates += [
                    cls(rows, deep, wide, k // deep, n // wide, width, most) for most in sizes
                ]
        fitting = [blocks for blocks in candidates if problem.vmem_bytes(blocks) <= available()]
        if not fitting:
            raise UnsupportedError(
                f"grouped_matmul lacks tiles of {rows} rows: none fits into vector memory; use "
                "fewer rows a tile"
            )
        best = min(fitting, key=problem.seconds)
        return best, problem.vmem_bytes(best)

    def table(self, experts: Array, tiles: Array) -> Array:
        """Returns the table [3, M / t]: each tile's expert, the first tile of its group, and the
        tiles of its group.
        """
        xp = table_library([experts])
        index = xp.arange(experts.shape[0], dtype=np.int32)
        live = index < tiles
        first = xp.sum(live[None] & (experts[None] < experts[:, None]), axis=1, dtype=np.int32)
        end = xp.sum(live[None] & (experts[None] <= experts[:, None]), axis=1, dtype=np.int32)
        first += (index - first) // self.most * self.most
        return xp.stack([experts, first, xp.minimum(end - first, self.most)])

    def at(self, step: Scalar, table: Ref) -> GroupStep:
        some = split(step, self.depth)[0]  # a tile of the same group
        first = table[1, some]
        count = table[2, some]
        if self.depth == 1:
            return GroupStep(first, count, 0, step - first)
        return GroupStep(first, count, *split(step - first * self.depth, count))

    def x_index(self, j: Scalar, step: Scalar, table: Ref) -> tuple[Scalar, Scalar]:
        at = self.at(step, table)
        return at.first + at.tile, at.k

    def y_index(self, j: Scalar, step: Scalar, table: Ref) -> tuple[Scalar, Scalar]:
        """Returns the index of a block of y; that of the group's first tile until the last block of
        K comes.
        """
        at = self.at(step, table)
        return at.first + jnp.where(at.k == self.depth - 1, at.tile, 0), j


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a call multiplies, and what it costs with given blocks."""

    m: int  # rows
    k: int
    n: int
    rows: int  # of a tile
    pairs: int  # arrays x
    joined: int  # arrays w for each x
    results: int  # arrays [M, N] that are read or written
    experts: int
    itemsize: int

    @classmethod
    def of(cls, xs: Sequence[Array], ws: Sequence[Array], n: int, rows: int, results: int) -> Self:
        m, k = xs[0].shape
        joined = len(ws) // len(xs)
        experts = ws[0].shape[0]
        return cls(m, k, n, rows, len(xs), joined, results, experts, xs[0].dtype.itemsize)

    @property
    def ws(self) -> int:
        """Arrays w."""
        return self.pairs * self.joined

    @property
    def tiles_of_an_expert(self) -> int:
        return pl.cdiv(self.m // self.rows, self.experts)

    def vmem_bytes(self, blocks: Blocks) -> int:
        of_x = self.pairs * blocks.k * self.rows
        of_w = self.ws * blocks.k * blocks.n
        of_results = self.results * self.rows * blocks.n
        sums = 2 * SUB_BLOCK * blocks.width
        if blocks.depth > 1:
            sums += blocks.most * self.rows * blocks.n
        return 2 * self.itemsize * (of_x + of_w + of_results) + 4 * sums * self.joined

    def elements(self, blocks: Blocks, readings: int) -> int:
        """Returns the elements that HBM moves, if each w is read so many times."""
        of_x = self.pairs * self.m * self.k * blocks.columns
        of_w = self.ws * self.experts * self.k * self.n
        return of_x + readings * of_w + self.results * self.m * self.n

    def seconds(self, blocks: Blocks) -> float:
        chip = chip_in_use()
        # in which HBM moves one element
        second = self.itemsize / (chip.hbm_bandwidth * chip.hbm_efficiency)
        readings = 1
        if blocks.depth > 1:
            readings = pl.cdiv(self.tiles_of_an_expert, blocks.most)
        # nothing is multiplied while these are fetched or stored
        first_and_last = self.ws * blocks.k * blocks.width
        first_and_last += self.rows * blocks.k + self.results * self.rows * blocks.n
        products = 2 * self.m * self.k * self.n * self.ws / chip.flops
        products *= imbalance(blocks.columns, chip.cores)
        products += self.m * self.n * self.joined * (blocks.depth - 1) / SUMS_RATE
        steps = blocks.columns * blocks.depth * (self.m // self.rows)
        moving = max(products, self.elements(blocks, readings) * second)
        return moving + first_and_last * second + steps * STEP_SECONDS


def table_library(experts: Sequence[Array]) -> ModuleType:
    """Returns what computes a table of these: numpy for constants, which have to stay constants to
    be simulated, and jax.numpy for what is traced.
    """
    constant = all(isinstance(one, np.ndarray) for one in experts)
    if constant:
        return np
    return jnp


def _width(k: int, n: int, joined: int) -> int:
    """Returns the columns of a block of y that are multiplied at once."""
    if joined == 1:
        unit = math.gcd(n, 2 * LANES)
    else:
        unit = LANES
    most = min(max(NARROWEST, n // PANELS), PANEL // (k * joined))
    return largest_divisor(n, max(unit, most), unit)


def outer_semantics(cores: int) -> Literal["parallel", "arbitrary"]:
    """Returns the semantics of an outer dimension of a grid, whose steps the cores of a chip share
    out.
    """
    if cores > 1:
        return "parallel"
    return "arbitrary"


def imbalance(steps: int, cores: int) -> float:
    """Returns how much longer so many equal steps take than if the cores could divide them
    evenly.
    """
    return pl.cdiv(steps, cores) * cores / steps


def divisors(size: int) -> Iterator[int]:
    """Returns the sides that a block of a dimension of this size may have."""
    unit = math.gcd(size, 2 * LANES)  # the side of the matrix units of some chips
    return (side for side in range(unit, size + 1, unit) if size % side == 0)


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

    @property
    def count(self) -> int:
        """Arrays w."""
        return self.pairs * self.joined

    def scratch(self, dtype: jnp.dtype) -> list[Ref]:
        """Returns blocks of w for this group and the next one, the sums of a group, and the slot of
        this group's w.
        """
        blocks = self.blocks
        width = self.joined * blocks.width
        shape = self._w_shape(blocks.k, width)
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
            source = self._w_shape(aligned(k * blocks.k, blocks.k, LANES), columns)
            for number, w in enumerate(ws):
                pair, part = divmod(number, self.joined)
                place = self._w_shape(slice(None), pl.ds(part * blocks.width, blocks.width))
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

    def _w_shape[T](self, k: T, n: T) -> tuple[T, T]:
        if self.transposed:
            return (n, k)
        return (k, n)
