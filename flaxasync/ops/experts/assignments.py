"""Which rows of a block go to which expert: the assignments of a block in tiles, each of one
expert.

```
ids [n, k]   ->   tiles of t assignments, sorted by expert:   [e0 e0] [e0 --] [e1 --] [e3 e3] ...
```

A block is sorted once, by its owner, and travels with its tiles. A tile that the rows of an expert
do not fill ends in padding, which sorts behind them: it is made as further assignments of that
expert. A device that has several blocks multiplies them together: the tiles of an expert follow
each other, whatever block they are of. The number of tiles is known on the device alone, so a loop
visits as many as there are.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from flaxasync.ring import Index, split_rows


class Assignments(NamedTuple):
    """The tiles of a block of n rows, sorted by expert, with T = n * k // t + E of them or fewer in
    use.
    """

    rows: Array  # [T, t]: the row of each assignment; n for padding
    weights: Array  # [T, t]: the weight of each; 0 for padding in the tiles in use
    tiles: Array  # [E]: how many tiles each expert has


def sort(
    ids: Array, weights: Array, experts: int, *, parts: int, capacity: int | None, tile_rows: int
) -> tuple[Assignments, Array]:
    """Sorts the assignments of a block into tiles.

    Args:
      ids, weights: [n, k].
      experts: E, the number of all experts.
      parts: How many parts the rows have, as `split_rows` splits them.
      capacity: The most assignments of an expert in each part that count; those of its last rows do
        not. None for all.
      tile_rows: t.

    Returns:
      The tiles, and the place of each of their assignments [T, t] in `ids`, counted along its rows;
      n * k for padding.
    """
    n, k = ids.shape
    number = n * k
    t = tile_rows
    # A key is expert * stride + place. The place of padding is `number`.
    stride = number + 1
    behind = experts * stride + number  # the key of what is in no tile: it sorts behind all of them
    if behind >= 2**31:
        raise ValueError(
            f"expert_mlp counts {number} choices of {experts} experts in 32 bits: give it fewer "
            "rows"
        )
    keys = ids.reshape(-1) * stride + lax.iota(jnp.int32, number)
    of_parts = counts_of_parts(ids, experts, parts)
    counts = jnp.sum(of_parts, axis=1, dtype=jnp.int32)
    weights = weights.reshape(-1)
    if capacity is not None:
        # sorted once more below: who is left out is known by the rank within an expert and part
        keys, weights = lax.sort((keys, weights), num_keys=1)
        expert = keys // stride
        place = keys % stride
        part: Index = 0
        for first, _ in split_rows(n, parts)[1:]:
            part = part + (place >= first * k).astype(jnp.int32)
        # how many sort before the first one of each expert and part
        before = jnp.cumsum(of_parts, dtype=jnp.int32).reshape(experts, parts) - of_parts
        rank = lax.iota(jnp.int32, number) - before[expert, part]
        keys = jnp.where(rank < capacity, keys, behind)
        counts = jnp.sum(jnp.minimum(of_parts, capacity), axis=1, dtype=jnp.int32)
    # Each expert's last tile is filled up; what is left sorts behind all tiles.
    missing = jnp.arange(t, dtype=jnp.int32)[None] < (-counts % t)[:, None]
    filling = jnp.arange(experts, dtype=jnp.int32)[:, None] * stride + number
    padding = jnp.where(missing, filling, behind).reshape(-1)
    keys = lax.concatenate([keys, padding], 0)
    weights = jnp.pad(weights, (0, padding.size))
    most = (number // t + experts) * t  # no routing fills more
    keys, weights = (x[:most].reshape(-1, t) for x in lax.sort((keys, weights), num_keys=1))
    places = keys % stride
    rows = jnp.where(places == number, n, places // k)
    return Assignments(rows, weights, -(-counts // t)), places


def counts_of_parts(ids: Array, experts: int, parts: int) -> Array:
    """Returns how many of the choices [n, k] in each part of the rows are for each expert, [E,
    parts].
    """
    numbers = jnp.arange(experts, dtype=ids.dtype)
    ranges = split_rows(ids.shape[0], parts)
    counts = [
        jnp.sum(ids[i : i + rows].reshape(-1, 1) == numbers[None], axis=0, dtype=jnp.int32)
        for i, rows in ranges
    ]
    return jnp.stack(counts, axis=1)


def dropped(ids: Array, experts: int, capacity: int) -> Array:
    """Returns how many of the choices [n, k] of a device `expert_mlp` drops with this capacity."""
    return jnp.sum(jnp.maximum(counts_of_parts(ids, experts, 2) - capacity_of_half(capacity), 0))


def capacity_of_half(capacity: int) -> int:
    """Returns the capacity of an expert for each half of the rows of a device."""
    return -(-capacity // 2)


def unsort(values: Array, places: Array, shape: tuple[int, int], *, dropless: bool) -> Array:
    """Returns values of the assignments of a block, [T, t], in the order of its ids, [n, k]; 0 for
    what was dropped.
    """
    number = shape[0] * shape[1]
    places = places.reshape(-1)
    values = values.reshape(-1)
    # every place is there once, so a sort does it, in a seventh of a scatter's time on a TPU
    if dropless:
        return lax.sort((places, values), num_keys=1)[1][:number].reshape(shape)
    return jnp.zeros(number, values.dtype).at[places].set(values, mode="drop").reshape(shape)


class Tiles(NamedTuple):
    """Some tiles of the blocks that a device has, with its own experts."""

    experts: Array  # [c]: the number on this device of the expert of each tile
    # [c]: where each tile is among the tiles of all blocks, one block after the other
    places: Array
    # [c * t]: the row of each assignment, counted on from block to block; that after the last for
    # padding
    rows: Array
    weights: Array  # [c * t]: the weight of each; 0 for padding


class TilesOf:
    """The tiles of the experts `first` .. `first` + `local` in all of `blocks`, which have n rows
    each.
    """

    def __init__(
        self, blocks: tuple[Assignments, ...], first: Index, local: int, n: tuple[int, ...]
    ):
        counts = []
        starts = []
        rows = []
        offset = 0
        before = 0
        for block, size in zip(blocks, n, strict=True):
            start = jnp.cumsum(block.tiles, dtype=jnp.int32) - block.tiles + before
            counts.append(lax.dynamic_slice_in_dim(block.tiles, first, local))
            starts.append(lax.dynamic_slice_in_dim(start, first, local))
            rows.append(jnp.where(block.rows == size, sum(n), block.rows + offset))
            offset = offset + size
            before = before + block.rows.shape[0]
        self.blocks, self.none = len(blocks), sum(n)
        self.rows, self.weights = (
            lax.concatenate(rows, 0),
            lax.concatenate([b.weights for b in blocks], 0),
        )
        # The tiles of each expert and block, expert after expert: how many there are, and where
        # they are.
        each, at = (jnp.stack(x, axis=1).reshape(-1) for x in (counts, starts))
        self.ends = jnp.cumsum(each, dtype=jnp.int32)
        self.shifts = at - (self.ends - each)

    @property
    def count(self) -> Array:
        """The number of tiles; 1, of padding, if there are none."""
        return jnp.maximum(self.ends[-1], 1)

    def take(self, start: Index, count: int) -> Tiles:
        """Returns the tiles `start` .. `start` + `count`; those beyond the last one are padding of
        the last expert.
        """
        tile = start + lax.iota(jnp.int32, count)
        group = jnp.minimum(
            jnp.sum(tile[:, None] >= self.ends[None], axis=1, dtype=jnp.int32), self.ends.size - 1
        )
        live = tile < self.ends[-1]
        places = jnp.where(live, tile + self.shifts[group], 0)
        rows, weights = (
            x.at[places].get(mode="promise_in_bounds") for x in (self.rows, self.weights)
        )
        return Tiles(
            group // self.blocks,
            jnp.where(live, places, self.rows.shape[0]),
            jnp.where(live[:, None], rows, self.none).reshape(-1),
            jnp.where(live[:, None], weights, 0).reshape(-1),
        )
