"""The order of work in the overlapped kernel: one flat walk over all products of tiles, so that no step starts cold.

The columns of the result are cut into chunks, a device's half of the rows into groups of `rows` tiles, the contraction
into `depth` tiles. Every chunk of every group is multiplied twice:

    give   the neighbour's rows, contraction outermost: a piece of w is used for all rows as soon as it arrives.
           The sums of a chunk are all finished in the last `rows` steps, and leave
    keep   the own rows, rows outermost: a tile of the result is finished every `depth` steps, and leaves. Before it is
           rounded the neighbour's sums are added, which it gave while this device gave, one product or more before

                 x x x x|x x x x|...       x  one product of tiles
    give         t=0     t=1               of all rows
    keep         i=0     i=1               of all of the contraction
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step of the walk is; scalars, traced or not."""

    give: Any  # multiplies the neighbour's rows
    chunk: Any  # of columns
    group: Any  # of rows
    i: Any  # tile of rows in its group
    t: Any  # tile of the contraction
    w_slot: Any  # of two: where its tile of w lies
    w_new: Any  # its tile of w is not that of the step before


@dataclasses.dataclass(frozen=True)
class Walk:
    """All steps of a kernel.

    Attributes:
      chunks: of columns.
      groups: of rows, in each half of a device's rows.
      rows: tiles of rows in a group.
      depth: tiles of the contraction.
    """

    chunks: int
    groups: int
    rows: int
    depth: int

    @property
    def steps(self) -> int:
        return self.chunks * self.groups * 2 * self.rows * self.depth

    def at(self, step: Any) -> Place:
        """Returns the place of a step."""
        area = self.rows * self.depth
        round_, within = _split(step, 2 * area)
        chunk, group = _split(round_, self.groups)
        keep, position = _split(within, area)
        give = keep == 0
        t_outer, i_inner = _split(position, self.rows)
        i_outer, t_inner = _split(position, self.depth)
        i, t = jnp.where(give, i_inner, i_outer), jnp.where(give, t_outer, t_inner)
        before = round_ * (self.depth + area) + jnp.where(give, t_outer, self.depth + position)  # tiles of w, so far
        return Place(give, chunk, group, i, t, _split(before, 2)[1], jnp.logical_or(keep == 1, i == 0))


def _split(value: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of a number that is not negative."""
    value, divisor = jnp.int32(value), jnp.int32(by)
    return lax.div(value, divisor), lax.rem(value, divisor)
