"""Tiles of rows that lie in batches, [batches, rows, ...]: several whole batches, or some rows of one batch.

The last tile of a batch may have fewer rows, or the last of all tiles fewer batches.
"""

import dataclasses
from collections.abc import Callable

from jax.experimental import pallas as pl

from flaxasync.kernels.engine.grid import split
from flaxasync.kernels.engine.refs import Scalar
from flaxasync.kernels.engine.tiling import Tiling

SUB_BLOCK = 512  # rows of one product in the code of a step; a tile of more rows loops over them


@dataclasses.dataclass(frozen=True)
class RowTiling:
    """Tiles of the rows of [batches, rows, ...]."""

    batches: Tiling  # tiles of the batches; one of more than one batch has all of their rows
    rows: Tiling  # tiles of the rows of one batch

    @classmethod
    def of(
        cls, batches: int, rows: int, most: int, unit: int, multiple: int = 1, *, sub_block: int | None = None
    ) -> "RowTiling":
        """Returns tiles of at most `most` rows in all of their batches, multiplied at most `sub_block` at once.

        `unit` divides the rows of a tile, and `multiple` the batches of a tile that has more than one batch.
        """
        sub_block = sub_block or SUB_BLOCK
        if rows * multiple * 2 <= most or multiple > 1:
            whole = max(multiple, most // rows)
            several = Tiling.in_sub_blocks(batches, whole, max(1, sub_block // rows), multiple, scale=rows)
            if several.size > 1:
                return cls(several, Tiling((rows,), rows, unit))
        return cls(Tiling((batches,), 1, 1), Tiling.in_sub_blocks(rows, most, sub_block, unit))

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
        """Calls `use(slice of the batches, slice of the rows)` for a tile; the slices have static sizes."""
        group, within = split(tile, self.rows.count)
        self.batches.on_slice(group, lambda _, batches: self.rows.on_slice(within, lambda _, rows: use(batches, rows)))

    def for_each_sub_block(self, tile: Scalar, use: Callable[..., None]) -> None:
        """Calls `use(index, number of rows)` in a loop of the kernel: its code is there once.

        The index is that of a sub-block in a tile [batches, rows, ...]. The last sub-block of a partial tile may have
        more rows than the tile: then they are whatever the memory held.
        """
        group, within = split(tile, self.rows.count)
        if self.batches.size > 1:
            rows = self.rows.size
            self.batches.for_each_sub_block(group, lambda some: use((some, slice(0, rows)), some.size * rows))
        else:
            self.rows.for_each_sub_block(within, lambda some: use((slice(0, 1), some), some.size))

    def flattened(self) -> Tiling:
        """Returns the same tiles in the same order, as those of all rows of all batches."""
        (batches,), (rows,) = self.batches.lengths, self.rows.lengths
        if self.batches.size > 1:
            return Tiling((batches * rows,), self.size, self.rows.unit)
        return Tiling((rows,) * batches, self.rows.size, self.rows.unit)
