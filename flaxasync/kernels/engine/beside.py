"""Weight gradients of one device, which another kernel computes while its links are busy.

```
x_p   [rows, m_p]     y_p  [rows, n_p]      for several p
dw_p  [m_p, n_p]      x_p.T @ y_p, sums over all rows

kernel   step 0        step 1        step 2         ...      its own work, which sends
beside          0 1           2             3 4     ...      steps of the sums
```

Where several cores run the kernel, each has equally many columns of x, and computes those rows of
dw. The steps are divided evenly between those of the kernel. A tile of a sum stays in vector memory
until all rows are in it. Then it is multiplied with the scales of its columns of x and y, if these
are 8-bit values, rounded, and stored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.cores import ONE_CORE, Cores
from flaxasync.kernels.engine.matmul import Scales, accumulate, laid_out_scales, sums_dtype
from flaxasync.kernels.engine.operands import (
    LANES,
    DType,
    Ref,
    Scalar,
    Tiles,
    aligned,
    largest_divisor,
    when,
)
from flaxasync.kernels.engine.slots import IncomingTiles, OutgoingTiles
from flaxasync.kernels.engine.tiling import SUB_BLOCK, IterationGrid, Tiling, remainder, split
from flaxasync.kernels.engine.vector_memory import matmul_bytes

TILES = Tiles(2048, 2048, 2048)  # columns of x, rows, and columns of y, at most
OUTGOING = 2  # slots for tiles of the sums that leave


@dataclasses.dataclass(frozen=True)
class WeightGradient:
    """x.T @ y. All of one kernel have the same dtypes, and all or none of them scales."""

    x: jax.Array  # [rows, m]
    y: jax.Array  # [rows, n]
    # [m] and [n] in float32, if x and y are 8-bit values
    scales: tuple[jax.Array, jax.Array] | None = None


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """The steps of one dw on one core: for each of its tiles, all tiles of rows."""

    tiles: Tiles  # columns of x, rows, and columns of y
    grid: IterationGrid  # tiles of columns of x, of columns of y, and of rows
    first: int  # the number of its first step, among those of all sums
    first_result: int  # the number of its first tile, among those of all sums

    @property
    def sides(self) -> tuple[int, int, int]:
        """The sides m, k and n of a tile."""
        return self.tiles.m, self.tiles.k, self.tiles.n

    @property
    def results(self) -> int:
        return self.grid.steps // self.grid.sizes[2]

    @property
    def padded(self) -> Tiles:
        """Columns of x, rows, and columns of y in whole tiles."""
        m, n, k = self.grid.sizes
        return Tiles(m * self.tiles.m, k * self.tiles.k, n * self.tiles.n)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BesideScratch:
    x: IncomingTiles  # [2, rows, m]
    y: IncomingTiles  # [2, rows, n]
    outgoing: OutgoingTiles  # [OUTGOING, m, n] rounded sums
    accumulator: Ref  # [m, n] VMEM, of 32 bits
    # if x and y are 8-bit values: [1, m, LANES] of columns of x, and of columns of y
    scales: Scales | None


@dataclasses.dataclass(frozen=True)
class BesidePlan:
    sums: tuple[GradientSum, ...]
    x_dtype: DType
    y_dtype: DType
    result: DType
    scaled: bool
    cores: Cores = ONE_CORE  # of which each has equally many columns of every x

    @classmethod
    def of(
        cls,
        gradients: Sequence[WeightGradient],
        result: DType,
        room: int,
        cores: Cores = ONE_CORE,
    ) -> "BesidePlan":
        """Returns the plan of each core with the largest tiles whose buffers fit in `room` bytes of
        its vector memory.
        """
        if not gradients:
            return cls((), result, result, result, scaled=False)
        first = gradients[0]
        most = TILES
        while True:
            sums = _sums(gradients, most, cores)
            plan = cls(sums, first.x.dtype, first.y.dtype, result, first.scales is not None, cores)
            if plan.vmem_bytes <= room or max(most.m, most.k, most.n) <= 2 * LANES:
                return plan
            most = most.halved()

    @property
    def steps(self) -> int:
        return sum(one.grid.steps for one in self.sums)

    @property
    def results(self) -> int:
        return sum(one.results for one in self.sums)

    @property
    def flops(self) -> int:
        of_core = sum(2 * one.grid.steps * math.prod(one.sides) for one in self.sums)
        return self.cores.count * of_core

    @property
    def hbm_bytes(self) -> int:
        """Bytes that are read and written."""
        read = sum(one.grid.steps * one.tiles.k * (one.tiles.m + one.tiles.n) for one in self.sums)
        written = sum(one.results * one.tiles.m * one.tiles.n for one in self.sums)
        read *= jnp.dtype(self.x_dtype).itemsize
        written *= jnp.dtype(self.result).itemsize
        return self.cores.count * (read + written)

    @property
    def largest(self) -> Tiles:
        sides = zip(*(one.sides for one in self.sums), strict=True)
        return Tiles(*map(max, sides))

    @property
    def vmem_bytes(self) -> int:
        if not self.sums:
            return 0
        tiles = self.largest
        total = matmul_bytes(tiles, self.x_dtype, OUTGOING, 1, self.result)
        if self.scaled:
            total += Scales.nbytes(2, tiles.m, tiles.n)
        return total

    def padded(self, sum_: int) -> Tiles:
        """Returns the columns of x of all cores, the rows, and the columns of y, in whole tiles."""
        of_core = self.sums[sum_].padded
        return dataclasses.replace(of_core, m=self.cores.count * of_core.m)

    def on_core(self, given: Sequence[Ref], dws: Sequence[Ref]) -> tuple[list[Ref], list[Ref]]:
        """Returns the part of one core: its columns of each x and their scales, and its rows of
        each dw.
        """
        parts = list[Ref]()
        for number, operand in enumerate(given):
            if number % 2 == 0:
                operand = self.cores.part(operand, 1)
            parts.append(operand)
        return parts, [self.cores.part(dw, 0) for dw in dws]

    def scratch(self) -> BesideScratch:
        tiles = self.largest
        return BesideScratch(
            IncomingTiles.allocate(2, (tiles.k, tiles.m), self.x_dtype),
            IncomingTiles.allocate(2, (tiles.k, tiles.n), self.y_dtype),
            OutgoingTiles.allocate(OUTGOING, (tiles.m, tiles.n), self.result),
            pltpu.VMEM((tiles.m, tiles.n), sums_dtype(self.x_dtype)),
            Scales.allocate(2, (1, tiles.m), tiles.n) if self.scaled else None,
        )


def _sums(
    gradients: Sequence[WeightGradient], most: Tiles, cores: Cores
) -> tuple[GradientSum, ...]:
    """Returns the sums of one core for these gradients, in tiles of at most these sides."""
    sums = list[GradientSum]()
    steps = 0
    results = 0
    for each in gradients:
        rows, columns_of_x = each.x.shape
        m = pl.cdiv(columns_of_x, cores.count)
        n = each.y.shape[1]
        tiles = Tiles(
            m=_side(m, most.m, 2 * LANES), k=_side(rows, most.k, LANES), n=_side(n, most.n, LANES)
        )
        grid = IterationGrid((pl.cdiv(m, tiles.m), pl.cdiv(n, tiles.n), pl.cdiv(rows, tiles.k)))
        sums.append(GradientSum(tiles, grid, steps, results))
        steps += grid.steps
        results += sums[-1].results
    return tuple(sums)


def _side(length: int, most: int, unit: int) -> int:
    """Returns the side of a tile of at most `most` elements: the smallest for the number of tiles
    that this takes.
    """
    count = pl.cdiv(length, most)
    return pl.cdiv(length, count * unit) * unit


def operands(plan: BesidePlan, gradients: Sequence[WeightGradient]) -> list[jax.Array]:
    """Returns what the kernel is given for `Beside`: for each sum x and y in whole tiles, and their
    scales if they have any.
    """
    given = list[jax.Array]()
    for sum_, each in enumerate(gradients):
        padded = plan.padded(sum_)
        m = padded.m
        rows = padded.k
        n = padded.n
        given += [_pad(each.x, rows, m), _pad(each.y, rows, n)]
        if each.scales is not None:
            of_x, of_y = each.scales
            given += laid_out_scales(_pad(of_x[None], 1, m), [_pad(of_y[None], 1, n)[0]])
    return given


def _pad(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Appends zeros to an array [m, n]."""
    if x.shape == (rows, columns):
        return x
    more = [(0, rows - x.shape[0], 0), (0, columns - x.shape[1], 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), more)


@dataclasses.dataclass(frozen=True)
class Beside:
    """The sums as one device computes them, inside a kernel."""

    plan: BesidePlan
    given: Sequence[Ref]  # `operands` in HBM
    dws: Sequence[Ref]  # [m, n] HBM
    scratch: BesideScratch

    def begin(self) -> None:
        """Starts to fetch the tiles of the first step."""
        self._prefetch(jnp.int32(0))

    def between(self, step: Scalar, steps: int) -> None:
        """Does what follows a step of the kernel, of `steps`."""
        each, more = divmod(self.plan.steps, steps)
        # steps of the kernel that share what is left over: one, unless the product below is too
        # large for an int32
        together = steps * more // 2**31 + 1

        def share(number: Scalar) -> Scalar:
            """Returns how many steps of the sums are done by so many steps of the kernel."""
            turns = number
            if together > 1:
                turns = split(number, together)[0]
            return number * each + lax.div(jnp.int32(turns * more), jnp.int32(steps // together))

        following = step + 1
        first = share(step)
        end = share(following)
        with jax.named_scope("beside"):
            pl.loop(first, end)(self._step)

    def finish(self) -> None:
        """Waits until the last tiles have left."""
        self.scratch.outgoing.finish(self.plan.results, self._wait_until_left)

    def _step(self, number: Scalar) -> None:
        @pl.when(number + 1 < self.plan.steps)
        def _() -> None:
            self._prefetch(number + 1)

        self._on_sum(number, functools.partial(self._multiply, number))

    def _prefetch(self, number: Scalar) -> None:
        """Starts to fetch the tiles of a step, and at the first one of a tile of the sum its
        scales.
        """
        slot = remainder(number, 2)

        def start(sum_: int, one: GradientSum) -> None:
            i, j, t = one.grid.coordinates(number - one.first)
            x, y, *scales = self._operands(sum_)
            rows = aligned(t * one.tiles.k, one.tiles.k, LANES)
            of_x = aligned(i * one.tiles.m, one.tiles.m, LANES)
            of_y = aligned(j * one.tiles.n, one.tiles.n, LANES)
            self.scratch.x.start(slot, x.at[rows, of_x])
            self.scratch.y.start(slot, y.at[rows, of_y])
            into = self.scratch.scales
            if into is not None:
                of_rows, of_columns = scales
                of_tile = into.rows.slot(self._result(one, i, j))
                when(t == 0, into.start, of_tile, of_rows.at[:, of_x], [of_columns.at[:, of_y]])

        self._on_sum(number, start)

    def _multiply(self, number: Scalar, sum_: int, one: GradientSum) -> None:
        """Adds the product of two tiles to its sum; a finished sum is scaled, rounded and
        stored.
        """
        scratch = self.scratch
        tiles = one.tiles  # [k, m] of x, [k, n] of y, [m, n] of dw
        slot = remainder(number, 2)
        i, j, t = one.grid.coordinates(number - one.first)
        dw_tile = self._result(one, i, j)
        last = t == one.grid.sizes[2] - 1
        out_slot = scratch.outgoing.slot(dw_tile)
        sub_block = largest_divisor(tiles.m, SUB_BLOCK, LANES)
        scratch.x.wait(slot, tiles.k, tiles.m)
        scratch.y.wait(slot, tiles.k, tiles.n)
        when(last, scratch.outgoing.free, dw_tile, self._wait_until_left)
        scales = scratch.scales
        if scales is not None:
            when(last, scales.wait, scales.rows.slot(dw_tile), 1, tiles.m, tiles.n)

        def product(depth: int, index: tuple[pl.Slice, slice]) -> jax.Array:
            x = scratch.x.tiles[slot, :depth, index[0]]
            y = scratch.y.tiles[slot, :depth, : tiles.n]
            return lax.dot_general(
                x, y, (((0,), (0,)), ((), ())), preferred_element_type=sums_dtype(x.dtype)
            )

        def finish(sums: jax.Array, index: tuple[pl.Slice, slice]) -> None:
            if scales is not None:
                of_tile = scales.rows.slot(dw_tile)
                # as the only batch, since `Scales` is for tiles in batches
                (sums,) = scales.apply(of_tile, sums[None], (slice(0, 1), *index))
            scratch.outgoing.put(out_slot, sums, index)

        def for_each_sub_block(use: Callable[..., None]) -> None:
            @pl.loop(0, tiles.m // sub_block)
            def _(place: Scalar) -> None:
                use((aligned(place * sub_block, sub_block, LANES), slice(0, tiles.n)))

        accumulate(
            Tiling((one.padded.k,), tiles.k),
            t,
            first=t == 0,
            last=last,
            accumulator=scratch.accumulator,
            for_each_sub_block=for_each_sub_block,
            product=product,
            finish=finish,
        )

        @pl.when(last)
        def _() -> None:
            of_x = aligned(i * tiles.m, tiles.m, LANES)
            of_y = aligned(j * tiles.n, tiles.n, LANES)
            scratch.outgoing.store(out_slot, self.dws[sum_].at[of_x, of_y])

    def _operands(self, sum_: int) -> Sequence[Ref]:
        each = len(self.given) // len(self.plan.sums)
        return self.given[sum_ * each : (sum_ + 1) * each]

    @staticmethod
    def _result(one: GradientSum, i: Scalar, j: Scalar) -> Scalar:
        """Returns the number of a tile among those of all sums."""
        return one.first_result + i * one.grid.sizes[1] + j

    def _on_sum(self, number: Scalar, use: Callable[[int, GradientSum], None]) -> None:
        """Calls `use(number of the sum, sum)` for the sum that a step belongs to."""
        for sum_, one in enumerate(self.plan.sums):
            mine = (number >= one.first) & (number < one.first + one.grid.steps)
            when(mine, use, sum_, one)

    def _wait_until_left(self, result: Scalar) -> None:
        outgoing = self.scratch.outgoing
        for one in self.plan.sums:
            mine = (result >= one.first_result) & (result < one.first_result + one.results)
            when(mine, outgoing.wait, outgoing.slot(result), one.tiles.m, one.tiles.n)
