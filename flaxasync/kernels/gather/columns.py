"""Tiles of columns over several ws side by side, inside a kernel: which w a tile is of, and how wide it is."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl

from flaxasync.kernels.tiles import LANES


@dataclasses.dataclass(frozen=True)
class Columns:
    """Tiles of `n` columns, the last one of each w perhaps narrower.

    Attributes:
      widths: columns of each w.
      n: columns of a tile.
    """

    widths: tuple[int, ...]
    n: int

    @classmethod
    def of(cls, widths: Sequence[int], most: int, unit: int = LANES) -> "Columns":
        """Tiles of at most `most` columns and at least half of that with which least of them hangs over edges."""
        longest = max(unit, min(most, max(widths)) // unit * unit)
        choices = range(longest, max(unit, longest // 2 // unit * unit) - 1, -unit)
        return cls(tuple(widths), min(choices, key=lambda n: (sum(pl.cdiv(w, n) * n for w in widths), -n)))

    @property
    def count(self) -> int:
        return sum(pl.cdiv(w, self.n) for w in self.widths)

    def at(self, column: Any, do: Callable[[int, Any, int], None]) -> None:
        """Calls do(which w, slice of its columns, width) for one tile."""
        n, before = self.n, 0
        for q, width in enumerate(self.widths):
            whole, rest = divmod(width, n)

            def run(q: int = q, first: int = before) -> None:
                do(q, pl.ds(pl.multiple_of((column - first) * n, n), n), n)

            def run_last(q: int = q, first: int = whole * n, rest: int = rest) -> None:
                do(q, pl.ds(first, rest), rest)

            if whole:
                pl.when((column >= before) & (column < before + whole))(run)
            if rest:
                pl.when(column == before + whole)(run_last)
            before += whole + bool(rest)
