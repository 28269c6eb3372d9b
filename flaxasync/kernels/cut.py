"""Sides cut into tiles, inside a kernel: how large they are, where they lie, and the last one, which may be narrower.

A narrow tile has code of its own, with static sizes. Sides that tiles divide have none of it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxasync.kernels.tiles import LANES, largest_side

FETCH = 0.625  # of a tile: in the time of that much the next one comes, which a narrower one waits for
FEWEST = 256  # columns that narrower tiles are as slow as
EXTRA = 32  # columns in whose time a product is begun and ended, and added to the sum
NEAR = 1.03  # tiles that divide are taken, where they cost no more than that


@dataclasses.dataclass(frozen=True)
class Cut:
    """Tiles of `size` over sides that follow each other; the last tile of each side is what is left of it.

    Attributes:
      sides: each a multiple of `unit`.
      size: of a tile.
      unit: of a hardware tile.
    """

    sides: tuple[int, ...]
    size: int
    unit: int

    @classmethod
    def of(cls, sides: Sequence[int], most: int, unit: int = LANES) -> "Cut":
        """Tiles of at most `most` columns, or of so much of the contraction.

        They divide all sides, where that costs no more than `NEAR` as much as the best. If not, on the same condition,
        they are pairs of units: the matrix units of some chips are as wide. If not, they are the best.
        """
        longest = max(unit, min(most, max(sides)) // unit * unit)
        dividing = cls(tuple(sides), largest_side(math.gcd(*sides), most, unit), unit)
        any_size = [cls(dividing.sides, size, unit) for size in range(unit, longest + 1, unit)]
        pairs = [cut for cut in any_size if cut.size % (2 * unit) == 0]
        best = [min(cuts, key=lambda cut: cut.cost) for cuts in (pairs, any_size) if cuts]
        return next(cut for cut in (dividing, *best) if cut.cost <= NEAR * best[-1].cost)

    @property
    def cost(self) -> float:
        """Of all tiles, in columns."""
        return sum(max(width, FETCH * self.size, FEWEST) + EXTRA for width in self.widths)

    @property
    def counts(self) -> tuple[int, ...]:
        """Tiles of each side."""
        return tuple(pl.cdiv(side, self.size) for side in self.sides)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of all tiles, in order."""
        return tuple(min(self.size, side - first) for side in self.sides for first in range(0, side, self.size))

    def at(self, tile: Any, do: Callable[[int, Any], None]) -> None:
        """Calls do(which side, slice of it) for one tile; the slice has a static size."""
        before, alone = 0, len(self.sides) == 1
        for q, (side, count) in enumerate(zip(self.sides, self.counts, strict=True)):
            whole, rest = divmod(side, self.size)

            def run(q: int = q, before: int = before) -> None:
                number = tile - before if before else tile
                do(q, pl.ds(pl.multiple_of(number * self.size, self.unit), self.size))

            def run_last(q: int = q, first: int = side - rest, rest: int = rest) -> None:
                do(q, pl.ds(first, rest))

            if whole:
                pl.when((alone and not rest) or ((tile >= before) & (tile < before + whole)))(run)
            if rest:
                pl.when((alone and not whole) or tile == before + whole)(run_last)
            before += count

    def sized(
        self, tile: Any, do: Callable[[int], None], among: Sequence[int] | None = None, condition: Any = True
    ) -> None:
        """Calls do(width) for one tile, of those `among`; under a condition."""
        widths = self.widths if among is None else [self.widths[t] for t in among]
        sizes = sorted(set(widths), reverse=True)
        for size in sizes:
            alike = condition if len(sizes) == 1 else jnp.logical_and(condition, self.has(tile, size))
            pl.when(alike)(functools.partial(do, size))

    def has(self, tile: Any, size: int) -> Any:
        """Whether a tile, one of the count, is so wide."""
        narrow = [t for t, width in enumerate(self.widths) if width != self.size]
        if size != self.size:
            return functools.reduce(jnp.logical_or, [tile == t for t in narrow if self.widths[t] == size])
        return functools.reduce(jnp.logical_and, [tile != t for t in narrow])


def inside(part: Any) -> Any:
    """Where a slice of a side lies in the tile that holds it."""
    return pl.ds(0, part.size)
