"""The order in which tiles are visited, and ragged tiling: tiles of which the last may be partial;
their sizes.

A kernel visits its tiles in one flat loop (`IterationGrid`). So it can start the transfers of the
next step during this step whichever loop advances, and no border between rows, columns or ring
steps leaves the matrix unit without data.

Partial tiles have code of their own with static sizes, because a transfer has a static size. A
dimension that its tiles divide has no such code.

How a size is chosen: a tile costs the time of its products, in elements of the dimension at the
matrix unit's peak rate. A product takes at least as long as `SHORTEST` elements, and a tile at
least as long as the transfer of the next one, `PREFETCH` elements; both take `OVERHEAD` elements
more. Tiles that divide the dimension are taken where they cost at most `NEAR` times as much as the
best, since they need the least code.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flaxasync.kernels.engine.operands import (
    LANES,
    Condition,
    Scalar,
    aligned,
    largest_divisor,
    when,
)

OVERHEAD = 16  # elements in whose time a product, or the work on a tile, starts and ends
# elements that take as long as fewer ones: meanwhile the matrix unit loads its other operand
SHORTEST = 128
PREFETCH = 448  # elements in whose time the next tile comes from HBM
SUB_BLOCK = 512  # rows of one product in the code of a step; a tile of more rows loops over them
NEAR = 1.03  # how much more than the cheapest tiles those may cost that need less code


@dataclasses.dataclass(frozen=True)
class IterationGrid:
    """Nested loops as one loop over `steps`."""

    sizes: tuple[int, ...]  # iterations of each loop, the outermost first

    @property
    def steps(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self, step: Scalar) -> tuple[jax.Array, ...]:
        """Returns the iteration of each loop at a step. Beyond the last step the first coordinate
        is out of range.
        """
        inner = []
        for size in reversed(self.sizes[1:]):
            step, iteration = split(step, size)
            inner.append(iteration)
        return jnp.int32(step), *reversed(inner)


def split(number: Scalar, by: int) -> tuple[jax.Array, jax.Array]:
    """Returns the quotient and the remainder of a number that is not negative."""
    number = jnp.int32(number)
    divisor = jnp.int32(by)
    return lax.div(number, divisor), lax.rem(number, divisor)


def remainder(number: Scalar, by: int) -> jax.Array:
    return split(number, by)[1]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tiles over one or more dimensions that lie side by side, as the columns of several weights
    do.

    The last tile of each dimension is partial unless tiles divide it. A kernel may loop over the
    sub-blocks of a tile, so that its code has one product. The last sub-block of a partial tile may
    reach beyond the tile.
    """

    lengths: tuple[int, ...]  # the length of each dimension, a multiple of `unit`
    size: int  # elements of a tile
    unit: int = LANES  # elements of a hardware tile
    sub_block: int | None = None  # elements of a sub-block; None where a tile is multiplied at once

    @classmethod
    def of(cls, lengths: Sequence[int], most: int) -> "Tiling":
        """Returns tiles of at most `most` elements, of which a partial one is multiplied with its
        own size.

        Multiples of two hardware tiles are preferred: the matrix units of some chips are as wide.
        """
        longest = max(LANES, min(most, max(lengths)) // LANES * LANES)
        even = cls(tuple(lengths), largest_divisor(math.gcd(*lengths), most, LANES))
        sizes = [cls(even.lengths, size) for size in range(LANES, longest + 1, LANES)]
        pairs = [tiling for tiling in sizes if tiling.size % (2 * LANES) == 0]
        return _cheapest([even], pairs, sizes)

    @classmethod
    def in_sub_blocks(
        cls, length: int, most: int, sub_block: int, unit: int, scale: int = 1
    ) -> "Tiling":
        """Returns tiles of at most `most` elements in sub-blocks of at most `sub_block`; an element
        is `scale` rows.
        """
        size = largest_divisor(length, most, unit)
        longest = max(sub_block, unit)
        even = cls((length,), size, unit, largest_divisor(size, longest, unit))
        choices = []
        for sub in range(unit, max(unit, min(longest, most, length)) + 1, unit):
            largest = max(1, most // sub)  # number of sub-blocks
            smallest = 1
            if most >= length:
                smallest = largest = pl.cdiv(length, sub)
            counts = range(smallest, largest + 1)
            choices += [cls((length,), sub * count, unit, sub) for count in counts]
        return _cheapest([even], choices, scale=scale)

    @classmethod
    def overhanging(cls, length: int, most: int, unit: int) -> "Tiling":
        """Returns tiles of at most `most` elements, of which the last one costs as much as a whole
        one.
        """
        sizes = range(unit, max(unit, min(most, length)) + 1, unit)
        choices = [cls((length,), size, unit, size) for size in sizes]
        even = [choice for choice in choices[::-1] if length % choice.size == 0]
        return _cheapest(even[:1], choices)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of tiles of each dimension."""
        return tuple(pl.cdiv(length, self.size) for length in self.lengths)

    @property
    def count(self) -> int:
        """Number of tiles of all dimensions."""
        return sum(self.counts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tile, in order."""
        return tuple(
            min(self.size, length - first)
            for length in self.lengths
            for first in range(0, length, self.size)
        )

    def on_slice(self, tile: Scalar, use: Callable[[int, pl.Slice], None]) -> None:
        """Calls `use(number of the dimension, slice of it)` for a tile; the slice has a static
        size.
        """
        before = 0
        alone = len(self.lengths) == 1
        for number, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            whole, rest = divmod(length, self.size)

            def use_whole(number: int = number, before: int = before) -> None:
                if before:
                    index = tile - before
                else:
                    index = tile
                use(number, aligned(index * self.size, self.size, self.unit))

            def use_partial(
                number: int = number, first: int = length - rest, rest: int = rest
            ) -> None:
                use(number, pl.ds(first, rest))

            # what is known while the kernel is traced: all tiles are whole, or the only one is not
            always_whole = alone and not rest
            always_partial = alone and not whole
            if whole:
                when(always_whole or ((tile >= before) & (tile < before + whole)), use_whole)
            if rest:
                when(always_partial or tile == before + whole, use_partial)
            before += count

    def on_size(
        self,
        tile: Scalar,
        use: Callable[[int], None],
        among: Sequence[int] | None = None,
        condition: Condition = True,
    ) -> None:
        """Calls `use(elements of a tile)`, a static number, if `condition` holds.

        `use` is traced once for each size of the tiles in `among`, which have to include this one;
        None is all tiles.
        """
        all_sizes = self.sizes
        if among is not None:
            all_sizes = tuple(all_sizes[t] for t in among)
        sizes = sorted(set(all_sizes), reverse=True)
        if len(sizes) == 1:
            when(condition, use, sizes[0])
            return
        for size in sizes:
            when(jnp.logical_and(condition, self._has_size(tile, size)), use, size)

    def sub_blocks(self, tile: Scalar) -> Scalar:
        """Returns how many sub-blocks a tile of the only dimension has."""
        counts = [pl.cdiv(size, self._sub_block) for size in self.sizes]
        if len(set(counts)) == 1:
            return counts[0]
        return jnp.where(tile == self.count - 1, counts[-1], counts[0])

    def for_each_sub_block(self, tile: Scalar, use: Callable[[pl.Slice], None]) -> None:
        """Calls `use(where the sub-block lies in the tile)` in a loop of the kernel: its code is
        there once.
        """
        step = self._sub_block

        @pl.loop(0, self.sub_blocks(tile))
        def _(i: Scalar) -> None:
            use(aligned(i * step, step, self.unit))

    @property
    def _sub_block(self) -> int:
        return self.sub_block or self.size

    def _has_size(self, tile: Scalar, size: int) -> Condition:
        partial = [t for t, elements in enumerate(self.sizes) if elements != self.size]
        if size == self.size:
            return functools.reduce(jnp.logical_and, [tile != t for t in partial])
        alike = [t for t in partial if self.sizes[t] == size]
        return functools.reduce(jnp.logical_or, [tile == t for t in alike])


@dataclasses.dataclass(frozen=True)
class RowTiling:
    """Tiles of rows that lie in batches, [batches, rows, ...]: several whole batches, or some rows
    of one batch.

    The last tile of a batch may have fewer rows, or the last of all tiles fewer batches.
    """

    batches: Tiling  # tiles of the batches; one of more than one batch has all of their rows
    rows: Tiling  # tiles of the rows of one batch

    @classmethod
    def of(
        cls,
        batches: int,
        rows: int,
        most: int,
        unit: int,
        multiple: int = 1,
        *,
        sub_block: int | None = None,
    ) -> "RowTiling":
        """Returns tiles of at most `most` rows in all of their batches, multiplied at most
        `sub_block` at once.

        `unit` divides the rows of a tile, and `multiple` the batches of a tile that has more than
        one batch.
        """
        at_once = sub_block or SUB_BLOCK
        if rows * multiple * 2 <= most or multiple > 1:
            whole = max(multiple, most // rows)
            batches_at_once = max(1, at_once // rows)
            several = Tiling.in_sub_blocks(batches, whole, batches_at_once, multiple, scale=rows)
            if several.size > 1:
                return cls(several, Tiling((rows,), rows, unit))
        return cls(Tiling((batches,), 1, 1), Tiling.in_sub_blocks(rows, most, at_once, unit))

    @classmethod
    def fewest(cls, batches: int, rows: int, most: int, unit: int) -> "RowTiling":
        """Returns the fewest tiles of at most `most` rows, though smaller ones may be multiplied
        faster.
        """
        each = min(rows, most)
        in_batch = Tiling((rows,), each, unit, largest_divisor(each, SUB_BLOCK, unit))
        return cls(Tiling((batches,), min(batches, most // each), 1, 1), in_batch)

    @property
    def shape(self) -> tuple[int, int]:
        """Batches and rows of a tile that is not partial."""
        return self.batches.size, self.rows.size

    @property
    def size(self) -> int:
        """Rows of a tile that is not partial, in all of its batches."""
        return self.batches.size * self.rows.size

    @property
    def count(self) -> int:
        return self.batches.count * self.rows.count

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each tile, in order."""
        return tuple(batches * rows for batches in self.batches.sizes for rows in self.rows.sizes)

    def on_slice(self, tile: Scalar, use: Callable[[pl.Slice, pl.Slice], None]) -> None:
        """Calls `use(slice of the batches, slice of the rows)` for a tile; the slices have static
        sizes.
        """
        group, within = split(tile, self.rows.count)

        def on_batches(_: int, batches: pl.Slice) -> None:
            def on_rows(_: int, rows: pl.Slice) -> None:
                use(batches, rows)

            self.rows.on_slice(within, on_rows)

        self.batches.on_slice(group, on_batches)

    def for_each_sub_block(self, tile: Scalar, use: Callable[..., None]) -> None:
        """Calls `use(index, number of rows)` in a loop of the kernel: its code is there once.

        The index is that of a sub-block in a tile [batches, rows, ...]. The last sub-block of a
        partial tile may have more rows than the tile: then they are whatever the memory held.
        """
        group, within = split(tile, self.rows.count)
        rows = self.rows.size

        def on_batches(some: pl.Slice) -> None:
            use((some, slice(0, rows)), some.size * rows)

        def on_rows(some: pl.Slice) -> None:
            use((slice(0, 1), some), some.size)

        if self.batches.size > 1:
            self.batches.for_each_sub_block(group, on_batches)
        else:
            self.rows.for_each_sub_block(within, on_rows)

    def flattened(self) -> Tiling:
        """Returns the same tiles in the same order, as those of all rows of all batches."""
        (batches,) = self.batches.lengths
        (rows,) = self.rows.lengths
        if self.batches.size > 1:
            return Tiling((batches * rows,), self.size, self.rows.unit)
        return Tiling((rows,) * batches, self.rows.size, self.rows.unit)


def cost(tiling: Tiling, scale: int = 1) -> int:
    """Returns the cost of all tiles; see the head of this file. An element of the dimension is
    `scale` rows.
    """

    def of_tile(elements: int) -> int:
        one = min(tiling.sub_block or elements, tiling.size)
        product = max(SHORTEST, one * scale) + OVERHEAD
        return max(PREFETCH, pl.cdiv(elements, one) * product) + OVERHEAD

    return sum(map(of_tile, tiling.sizes))


def _cheapest(even: Sequence[Tiling], *others: Sequence[Tiling], scale: int = 1) -> Tiling:
    """Returns the first that costs little more than the best: of `even`, of the cheapest of each of
    the others.
    """

    def order(tiling: Tiling) -> tuple[int, int, int]:
        return cost(tiling, scale), tiling.size, tiling.sub_block or 0

    cheapest = [min(choices, key=order) for choices in others if choices]
    most = NEAR * cost(cheapest[-1], scale)
    candidates = [*even, *cheapest]
    return next(tiling for tiling in candidates if cost(tiling, scale) <= most)
