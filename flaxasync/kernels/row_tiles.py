"""Tiles of rows that lie in batches, [B, m, ...]: several whole batches, or a part of one; and the wait for a tile."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.tiles import largest_side, split

PART = 512  # rows of one product in the code of a step: tiles of more rows loop over it, which makes programs smaller


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How the rows of [B, m] are cut.

    Attributes:
      batches: of a tile.
      rows: of each of them.
      parts: tiles of rows in one batch.
      count: tiles in all.
      unit: rows of a hardware tile.
    """

    batches: int
    rows: int
    parts: int
    count: int
    unit: int

    @classmethod
    def of(cls, batch: int, m: int, most: int, unit: int) -> "RowTiles":
        """Tiles of at most `most` rows in all, which divide the rows; `unit` divides m."""
        rows = largest_side(m, most, unit)
        batches = largest_side(batch, max(1, most // m), 1) if rows == m else 1
        return cls(batches, rows, m // rows, batch // batches * (m // rows), unit)

    @property
    def size(self) -> int:
        """Rows of a tile, in all of its batches."""
        return self.batches * self.rows

    def at(self, i: Any) -> tuple[Any, Any]:
        """The batches and the rows of tile i."""
        group, part = split(i, self.parts)
        return pl.ds(group * self.batches, self.batches), pl.ds(pl.multiple_of(part * self.rows, self.unit), self.rows)

    def each_part(self, use: Callable[[tuple[Any, Any], int], None]) -> None:
        """Calls `use(index, rows)` in a loop of the kernel: an index into [batches, rows, ...] of a tile at a time."""
        if self.batches > 1:
            held = largest_side(self.batches, max(1, PART // self.rows), 1)
            pl.loop(0, self.batches // held)(
                lambda g: use((pl.ds(g * held, held), slice(0, self.rows)), held * self.rows)
            )
        else:
            held = largest_side(self.rows, PART, self.unit)
            pl.loop(0, self.rows // held)(
                lambda g: use((slice(0, 1), pl.ds(pl.multiple_of(g * held, self.unit), held)), held)
            )


def landed(tile: Any, sem: Any) -> None:
    """Waits for the one transfer of a tile, to it or from it, that its semaphore stands for."""
    pltpu.make_async_copy(tile, tile, sem).wait()
