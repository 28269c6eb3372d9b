"""Tiles of rows that lie in batches, [B, m, ...]: several whole batches, or a part of one; and the wait for a tile.

Where no tiles divide the rows well, the last tile of a batch has fewer of them, or the last of all fewer batches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.cut import Cut
from flaxasync.kernels.tiles import largest_side, split

PART = 512  # rows of one product in the code of a step: tiles of more rows loop over it, which makes programs smaller
FEWEST = 128  # rows that a product of fewer rows is as slow as: the matrix unit loads w meanwhile
EXTRA = 16  # rows in whose time a product is begun and ended
FETCH = 448  # rows in whose time a tile of w comes from HBM
NEAR = 1.03  # tiles that divide are taken, where they cost no more than that


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How the rows of [B, m] are cut.

    Attributes:
      over: batches, the batches of a tile.
      within: rows of a batch, those of a tile in each of its batches; all of them, where it has several batches.
      held: rows, or batches, of one product in the code.
    """

    over: Cut
    within: Cut
    held: int

    @classmethod
    def of(cls, batch: int, m: int, most: int, unit: int, batches: int = 1, *, part: int | None = None) -> "RowTiles":
        """Tiles of at most `most` rows, in parts of at most `part`; `unit` divides m, `batches` those of a tile."""
        part = part or PART
        if m * batches * 2 <= most or batches > 1:
            several, held = in_parts(batch, max(batches, most // m), max(1, part // m), batches, m)
            if several > 1:
                return cls(Cut((batch,), several, batches), Cut((m,), m, unit), held)
        rows, held = in_parts(m, most, part, unit)
        return cls(Cut((batch,), 1, 1), Cut((m,), rows, unit), held)

    @property
    def batches(self) -> int:
        return self.over.size

    @property
    def rows(self) -> int:
        return self.within.size

    @property
    def parts(self) -> int:
        """Tiles of rows in one batch."""
        return self.within.count

    @property
    def count(self) -> int:
        return self.over.count * self.parts

    @property
    def size(self) -> int:
        """Rows of a tile, in all of its batches."""
        return self.batches * self.rows

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each tile."""
        return tuple(batches * rows for batches in self.over.widths for rows in self.within.widths)

    def sides(self, i: int) -> tuple[int, int]:
        """Batches and rows of a tile: of the first, 0, or the last, -1."""
        return self.over.widths[i], self.within.widths[i]

    def at(self, i: Any, do: Callable[[Any, Any], None]) -> None:
        """Calls do(batches, rows), slices of static sizes, for tile i."""
        group, part = split(i, self.parts)
        self.over.at(group, lambda _, batches: self.within.at(part, lambda _, rows: do(batches, rows)))

    def first(self, i: Any) -> Any:
        """Rows before tile i."""
        (batch,), (m,) = self.over.sides, self.within.sides
        if batch == 1 or m == self.parts * self.rows:
            return i * self.size
        group, part = split(i, self.parts)
        return group * self.batches * m + part * self.rows

    def each_part(self, use: Callable[[tuple[Any, Any], int], None], i: Any = 0) -> None:
        """Calls `use(index, rows)` in a loop of the kernel: an index into [batches, rows, ...] of a tile at a time.

        The last part may have more rows than tile i: they hold what was there.
        """
        (group, part), held, unit = split(i, self.parts), self.held, self.within.unit
        if self.batches > 1:
            pl.loop(0, parts_of(self.over, held, group))(
                lambda g: use((pl.ds(g * held, held), slice(0, self.rows)), held * self.rows)
            )
        else:
            pl.loop(0, parts_of(self.within, held, part))(
                lambda g: use((slice(0, 1), pl.ds(pl.multiple_of(g * held, unit), held)), held)
            )


def in_parts(side: int, most: int, part: int, unit: int, rows: int = 1) -> tuple[int, int]:
    """Sizes of a tile, at most `most`, and of its parts, at most `part`; one of the side is so many rows.

    They divide the side, where that costs no more than `NEAR` as much. If not, tiles are of whole parts, and the last
    one holds less; a tile of all of the side, too.
    """

    def cost(tile: int, held: int) -> int:
        """In rows: a part of few takes as long as one of `FEWEST`, and a tile as long as w takes to come."""
        full, rest = divmod(side, tile)
        one = max(FEWEST, held * rows) + EXTRA
        last = max(FETCH, pl.cdiv(rest, held) * one) + EXTRA if rest else 0
        return full * (max(FETCH, tile // held * one) + EXTRA) + last

    dividing, part = largest_side(side, most, unit), max(part, unit)
    even = dividing, largest_side(dividing, part, unit)
    choices = []
    for held in range(unit, max(unit, min(part, most, side)) + 1, unit):
        times = range(1, max(1, most // held) + 1) if most < side else [pl.cdiv(side, held)]
        choices += [(held * t, held) for t in times]
    best = min(choices, key=lambda c: (cost(*c), c))
    return even if cost(*even) <= NEAR * cost(*best) else best


def parts_of(cut: Cut, held: int, tile: Any) -> Any:
    """Parts that a tile has."""
    parts = [pl.cdiv(width, held) for width in cut.widths]
    if len(set(parts)) == 1:
        return parts[0]
    return jnp.where(tile == cut.count - 1, parts[-1], parts[0])


def landed(tile: Any, sem: Any) -> None:
    """Waits for the one transfer of a tile, to it or from it, that its semaphore stands for."""
    pltpu.make_async_copy(tile, tile, sem).wait()
