"""The order of work in the overlapped kernel: one flat walk over all products of tiles, so that no step starts cold.

The columns of the result are cut into chunks, a device's rows into one part for each of the Y mesh columns, a part into
groups of `rows` tiles, the contraction into `depth` tiles. A round is one chunk of one group: Y phases, one for each
part. What is multiplied in all of them but the last is for others:

    give   in phases 0 .. Y-2 another column's rows, contraction outermost: a piece of w is used for all rows as soon as
           it arrives. The sums of a chunk are all finished in the last `rows` steps, and leave; from phase 1 on, what
           the neighbour gave in its phase before is added first
    keep   in phase Y-1 the own rows, rows outermost: a tile of the result is finished every `depth` steps, and leaves.
           Before it is rounded the neighbour's sums are added, which it gave one phase before

                 x x x x|x x x x|...       x  one product of tiles
    give         t=0     t=1               of all rows
    keep         i=0     i=1               of all of the contraction

With one mesh column there is nobody to give to, and the only phase, which keeps, has the contraction outermost, too.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from flaxasync.kernels.tiles import split


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step of the walk is; scalars, traced or not."""

    round: Any  # chunk and group
    phase: Any
    position: Any  # of the step in its phase
    chunk: Any  # of columns
    group: Any  # of rows
    i: Any  # tile of rows in its group
    t: Any  # tile of the contraction, in the order of their use
    outer: Any  # the contraction is the outer loop: every tile of rows has a sum of its own
    w_slot: Any  # of two: where its tile of w lies
    w_new: Any  # its tile of w is not that of the step before


@dataclasses.dataclass(frozen=True)
class Walk:
    """All steps of a kernel.

    Attributes:
      chunks: of columns.
      groups: of rows, in each part of a device's rows.
      rows: tiles of rows in a group.
      depth: tiles of the contraction.
      phases: parts of a device's rows, one for each mesh column.
    """

    chunks: int
    groups: int
    rows: int
    depth: int
    phases: int = 2

    @property
    def rounds(self) -> int:
        return self.chunks * self.groups

    @property
    def area(self) -> int:
        """Steps of a phase."""
        return self.rows * self.depth

    @property
    def steps(self) -> int:
        return self.rounds * self.phases * self.area

    def at(self, step: Any) -> Place:
        """Returns the place of a step."""
        round_, within = split(step, self.phases * self.area)
        chunk, group = split(round_, self.groups)
        phase, position = split(within, self.area)
        outer = jnp.logical_or(phase < self.phases - 1, self.phases == 1)
        t_outer, i_inner = split(position, self.rows)
        i_outer, t_inner = split(position, self.depth)
        i, t = jnp.where(outer, i_inner, i_outer), jnp.where(outer, t_outer, t_inner)
        in_round = self.depth if self.phases == 1 else (self.phases - 1) * self.depth + self.area  # tiles of w
        before = round_ * in_round + phase * self.depth + jnp.where(outer, t_outer, position)
        new = jnp.logical_or(jnp.logical_not(outer), i == 0)
        return Place(round_, phase, position, chunk, group, i, t, outer, split(before, 2)[1], new)
