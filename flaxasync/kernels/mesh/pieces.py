"""Which pieces of w a device multiplies, from whom each comes and to whom it goes on: a broadcast along mesh rows.

LHS[M_X, K_Y] . RHS[K_X, N] cuts the contraction by mesh column on the left and by mesh row on the right. Cut into
pieces that divide both, mesh row r holds pieces r*held .. (r+1)*held-1 of RHS, and every device of mesh column c
multiplies with c*depth .. (c+1)*depth-1, which it calls t = 0 .. depth-1. So each of these has one owner in the column,
and goes from there around the column, from device to device:

    2 x 2   the device on the diagonal owns the column's only piece, and sends it to the other
    4 x 1   every device owns a quarter of what all need
    1 x 4   a device holds what all columns need: nothing travels
    2 x 4   mesh row c // 2 owns what column c needs, which is half of its block

With two ways, pieces with an even t go one way and the others the other way. A device uses pieces in the order of
their hops, its own first, and may send each on when it uses it: who waits for a piece of h hops waits for a device
that has waited for pieces of fewer hops only, so that nobody waits for itself.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flaxasync.kernels.neighbours import enter, toward
from flaxasync.kernels.tiles import LANES


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of a kernel; methods are called inside it.

    Attributes:
      axis_names: of mesh rows and mesh columns.
      size: mesh rows, the devices of a column.
      rows: of w in a piece.
      depth: pieces that a device multiplies with.
      held: pieces that a device holds.
      ways: 1, or 2 to send every other piece the other way.
    """

    axis_names: tuple[str, str]
    size: int
    rows: int
    depth: int
    held: int
    ways: int

    @property
    def table(self) -> tuple[int]:
        """Shape of what `sort` fills."""
        return (self.depth + 1,)

    def way(self, t: Any) -> Any:
        return lax.rem(jnp.int32(t), jnp.int32(self.ways))

    def hops(self, t: Any) -> Any:
        """How many hops a piece takes to get here; 0 for one of this device's own."""
        rows, columns = self.axis_names
        return self.hops_to(lax.axis_index(rows), lax.axis_index(columns), t)

    def hops_to(self, row: Any, column: Any, t: Any) -> Any:
        """How many hops a column's piece takes to a mesh row."""
        onward = row - lax.div(column * self.depth + t, jnp.int32(self.held))
        return lax.rem(self.size + jnp.where(self.way(t) == 0, onward, -onward), jnp.int32(self.size))

    def own(self, t: Any) -> Any:
        return self.hops(t) == 0

    def goes_on(self, t: Any) -> Any:
        """Whether this device sends a piece to the next one."""
        return self.hops(t) < self.size - 1

    def to(self, t: Any) -> dict[str, Any]:
        """The device that a piece goes to from here."""
        return toward(self.axis_names[0], self.way(t))

    def held_rows(self, t: Any) -> Any:
        """Where a piece lies in this device's w, if it owns it."""
        return self._rows(self._number(t) - lax.axis_index(self.axis_names[0]) * self.held)

    def needed_rows(self, t: Any) -> Any:
        """Where a piece lies among all that this device multiplies with: rows of those, columns of x."""
        return self._rows(t)

    def sort(self, order: Any) -> None:
        """Fills scalar memory of shape `table`: the pieces in the order of their use."""

        def put(hops: Any, count: Any) -> Any:
            def one(t: Any, count: Any) -> Any:
                order[count] = t  # the next one takes its place unless this one belongs here
                return count + (self.hops(t) == hops).astype(jnp.int32)

            return lax.fori_loop(0, self.depth, one, count)

        lax.fori_loop(0, self.size, put, jnp.int32(0))

    def received(self, way: int) -> Any:
        """Whether any piece comes here on a way: the device that sends it is to be told that this one has entered."""
        return self._any(lambda t: (self.way(t) == way) & (self.hops(t) > 0))

    def sent(self, way: int) -> Any:
        """Whether any piece leaves here on a way."""
        return self._any(lambda t: (self.way(t) == way) & self.goes_on(t))

    def _any(self, what: Any) -> Any:
        found = lax.fori_loop(0, self.depth, lambda t, found: found | what(t).astype(jnp.int32), jnp.int32(0))
        return found > 0

    def _number(self, t: Any) -> Any:
        """Of a piece, among all of RHS."""
        return lax.axis_index(self.axis_names[1]) * self.depth + t

    def _rows(self, number: Any) -> Any:
        return pl.ds(pl.multiple_of(number * self.rows, self.rows), self.rows)


def check_unit(caller: str, axis_names: tuple[str, str], k: int, held: int) -> int:
    """The most rows of RHS that make whole pieces for every mesh row and every mesh column.

    Raises:
      ValueError: they are no whole hardware tiles.
    """
    unit = math.gcd(k, held)
    if unit % LANES:
        size, columns = (lax.axis_size(name) for name in axis_names)
        raise ValueError(
            f"{caller} cuts the contraction into pieces for a mesh of {size} x {columns}, in whole hardware tiles: got "
            f"K={k * columns} in pieces of {unit}, needed a multiple of {LANES}; pad K, or use backend='none'"
        )
    return unit


def enter_column(caller: str, pieces: Pieces, collective_id: int | None, neighbours: Any = ()) -> None:
    """The barrier. Around a column only some devices send; who gets nothing has nobody to tell.

    Args:
      caller: and what else tells this barrier from those of other kernels.
      pieces: that go around the column.
      collective_id: of the barrier.
      neighbours: others that send to this device, and get as much from it.
    """
    rows = pieces.axis_names[0]
    perhaps = [(toward(rows, 1 - way), pieces.received(way), pieces.sent(way)) for way in range(pieces.ways)]
    name = f"{caller} {' '.join(pieces.axis_names)} {pieces.ways}"
    enter(name, neighbours, collective_id, perhaps=perhaps if pieces.size > 1 else ())
