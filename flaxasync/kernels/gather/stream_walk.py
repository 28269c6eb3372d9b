"""All steps of all_gather_matmul where x streams from HBM, and the tiles of one: what is decided at trace time.

`stream` has the picture, and what a device does in a step.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from flaxasync.kernels.gather.columns import Columns
from flaxasync.kernels.gather.hops import Parts
from flaxasync.kernels.tiles import LANES, Tiles, check_vmem, largest_side, split, sublanes

TILES = Tiles(1024, 1024, 2048)
SUMS = 32 * 2**20  # bytes of sums that stay in vector memory, at most


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step is; scalars."""

    group: Any
    first: Any  # tile of rows of its round
    column: Any  # tile of columns, counted over all ws
    t: Any  # tile of the contraction
    i: Any  # tile of rows, in its round
    round: Any  # (group, part of its rows, tile of columns)
    w_slot: Any  # of two


@dataclasses.dataclass(frozen=True)
class Walk:
    """All steps, and the tiles of one.

    Attributes:
      groups: of rows, as they arrive.
      cuts: parts of a group's rows whose sums are held at once.
      columns: tiles of columns of all ws.
      depth: tiles of the contraction.
      tiles: of rows, in one cut.
      batches, rows: of a tile of rows.
      k: of a tile.
      parts: of a group.
      vmem_bytes: that all buffers take.
    """

    groups: int
    cuts: int
    columns: Columns
    depth: int
    tiles: int
    batches: int
    rows: int
    k: int
    parts: Parts
    vmem_bytes: int

    @property
    def m(self) -> int:
        return self.batches * self.rows

    @property
    def n(self) -> int:
        return self.columns.n

    @property
    def elements_read(self) -> int:
        """Elements of x and w from HBM, and of what arrives there."""
        x, w = self.tiles * self.m * self.k, self.k * self.n
        batches, rows = self.parts.group
        return self.rounds * self.depth * (x + w) + 2 * (self.groups - 1) * batches * rows * self.k * self.depth

    @property
    def rounds(self) -> int:
        return self.groups * self.cuts * self.columns.count

    @property
    def steps(self) -> int:
        return self.rounds * self.depth * self.tiles

    def at(self, step: Any) -> Place:
        outer, i = split(step, self.tiles)
        round_, t = split(outer, self.depth)
        return self.of_round(round_, t, i, lax.rem(outer, jnp.int32(2)))

    def of_round(self, round_: Any, t: Any, i: Any, w_slot: Any) -> Place:
        outer, column = split(round_, self.columns.count)
        group, cut = split(outer, self.cuts)
        return Place(group, cut * self.tiles, column, t, i, round_, w_slot)


def plan(caller: str, parts: Parts, size: int, k: int, widths: Sequence[int], tiles: Tiles, dtype: Any) -> Walk:
    """Returns the walk with the largest tiles up to `tiles`.

    Raises:
      ValueError: tiles that exceed vector memory.
    """
    rows = largest_side(parts.rows, tiles.m, sublanes(dtype))
    batches = largest_side(parts.batches, max(1, tiles.m // rows), 1) if rows == parts.rows else 1
    columns = Columns.of(widths, tiles.n)
    n = columns.n
    k_tile = largest_side(k, tiles.k, LANES)
    of_group = parts.count * (parts.batches // batches) * (parts.rows // rows)
    held = largest_side(of_group, max(1, SUMS // (4 * batches * rows * n)), 1)
    return Walk(
        size, of_group // held, columns, k // k_tile, held, batches, rows, k_tile, parts,
        check_vmem(caller, Tiles(batches * rows, k_tile, n), lambda t: _vmem_bytes(t, held, dtype)),
    )  # fmt: skip


def _vmem_bytes(tiles: Tiles, held: int, dtype: Any) -> int:
    streamed = 2 * (tiles.m * tiles.k + tiles.k * tiles.n + tiles.m * tiles.n)
    return streamed * jnp.dtype(dtype).itemsize + 4 * held * tiles.m * tiles.n
