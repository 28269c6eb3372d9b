"""Which rows of a block go to which expert: the assignments of a block, sorted, and the tiles of rows made of them.

```
ids [n, k]     ->  assignments, sorted by expert:   e0 e0 e0 e1 e3 e3 ...        n * k of them, and the count of each
                   tiles of t rows of one expert:   [e0 e0] [e0 --] [e1 --] [e3 e3] ...
```

A block is sorted once, by its owner, and travels with its assignments. A device that has several blocks multiplies them
together: the tiles of an expert follow each other, whatever block their rows are of. A tile that an expert does not
fill ends in padding. The number of tiles is known on the device alone, so a loop visits as many as there are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.ring import Index


class Assignments(NamedTuple):
    """The assignments of the n rows of a block to k experts each, sorted by expert. It travels beside the rows."""

    rows: Array  # [n * k + t]: the row of each assignment; the last t are padding, which a tile may read
    weights: Array  # [n * k + t]: the weight of each
    counts: Array  # [E]: how many each expert has


def sort(ids: Array, weights: Array, experts: int, *, capacity: int | None, padding: int) -> tuple[Assignments, Array]:
    """Sorts the assignments of a block, and returns them with the place of each in the order of `ids`.

    Args:
      ids, weights: [n, k].
      experts: The number of all experts.
      capacity: The most assignments of an expert that count; those of its last rows do not. None for all.
      padding: The entries to append.
    """
    n, k = ids.shape
    flat, places = ids.reshape(-1), lax.iota(jnp.int32, n * k)
    flat, places, weights = lax.sort((flat, places, weights.reshape(-1)), num_keys=1, is_stable=True)
    counts = jnp.sum(flat[:, None] == jnp.arange(experts, dtype=flat.dtype), axis=0, dtype=jnp.int32)
    if capacity is not None:  # what is left out stays where it is, behind those that count
        first = jnp.cumsum(counts, dtype=jnp.int32) - counts
        rank = lax.iota(jnp.int32, n * k) - first[flat]
        order = (jnp.where(rank < capacity, flat, experts), places, weights)
        _, places, weights = lax.sort(order, num_keys=1, is_stable=True)
        counts = jnp.minimum(counts, capacity)
    rows = jnp.pad(places // k, (0, padding), constant_values=n)
    return Assignments(rows, jnp.pad(weights, (0, padding)), counts), places


class Tiles(NamedTuple):
    """Some tiles of the blocks that a device has, each block with n rows."""

    experts: Array  # [c]: the number on this device of the expert of each tile
    first: Array  # [c]: where in its block the first assignment of each tile is
    block: Array  # [c]: the number of its block
    rows: Array  # [c * t]: the row of each assignment, blocks counted on; that beyond the last one for padding
    weights: Array  # [c * t]: the weight of each; 0 for padding
    valid: Array  # [c * t]: False for padding


class TilesOf:
    """The tiles of the experts `first` .. `first` + `local` in all of `blocks`, which have n rows each."""

    def __init__(self, blocks: tuple[Assignments, ...], first: Index, local: int, n: tuple[int, ...], tile_rows: int):
        self.blocks, self.rows, self.tile_rows = blocks, n, tile_rows
        counts, starts = [], []
        for block in blocks:
            before = jnp.cumsum(block.counts, dtype=jnp.int32) - block.counts
            counts.append(lax.dynamic_slice_in_dim(block.counts, first, local))
            starts.append(lax.dynamic_slice_in_dim(before, first, local))
        # The groups of rows, expert after expert, and in each the blocks one after the other: [local * blocks].
        self.counts, self.starts = (jnp.stack(x, axis=1).reshape(-1) for x in (counts, starts))
        tiles = -(-self.counts // tile_rows)
        self.ends = jnp.cumsum(tiles, dtype=jnp.int32)

    @property
    def count(self) -> Array:
        """The number of tiles."""
        return self.ends[-1]

    def take(self, start: Array, count: int) -> Tiles:
        """Returns the tiles `start` .. `start` + `count`; those beyond the last one are padding of the last expert."""
        t, parts = self.tile_rows, len(self.blocks)
        tile = start + lax.iota(jnp.int32, count)
        group = jnp.minimum(jnp.sum(tile[:, None] >= self.ends, axis=1, dtype=jnp.int32), self.ends.size - 1)
        before = jnp.where(group > 0, self.ends[jnp.maximum(group, 1) - 1], 0)
        offset = (tile - before) * t
        block, first = group % parts, self.starts[group] + offset
        left = jnp.where(tile < self.count, self.counts[group] - offset, 0)
        valid = lax.broadcasted_iota(jnp.int32, (count, t), 1) < left[:, None]
        rows = self._windows([b.rows for b in self.blocks], block, first)
        offsets = [sum(self.rows[:part]) for part in range(parts)]
        rows += jnp.array(offsets, jnp.int32)[block][:, None]
        weights = self._windows([b.weights for b in self.blocks], block, first)
        return Tiles(
            group // parts, first, block,
            jnp.where(valid, rows, sum(self.rows)).reshape(-1), jnp.where(valid, weights, 0).reshape(-1),
            valid.reshape(-1),
        )  # fmt: skip

    def _windows(self, arrays: list[Array], block: Array, first: Array) -> Array:
        """Returns t consecutive entries of one array for each tile, [c, t]."""

        def window(x: Array) -> Array:
            start = jnp.minimum(first, x.size - self.tile_rows)  # where the tile is padding
            return jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, self.tile_rows))(start)

        found = window(arrays[0])
        for part, x in enumerate(arrays[1:], 1):
            found = jnp.where((block == part)[:, None], window(x), found)
        return found
