"""The grid of the flash attention kernels: which block of each array every step has in vector
memory.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from flaxasync.kernels.attention_block import Mask, Product
from flaxasync.kernels.engine.operands import LANES, Ref, Scalar, largest_divisor
from flaxasync.kernels.engine.tiling import split

type Indices = tuple[Scalar, ...]  # of a block


@dataclasses.dataclass(frozen=True)
class Grid:
    """The steps of a call: batch, group, head of the group, tile of q, tile of kv."""

    batch: int  # sequences
    groups: int  # groups of heads that share keys and values
    heads: int  # heads of a group
    head_size: int  # elements of a head
    q_rows: int  # rows of the block of queries
    q_tile: int  # rows of a tile of queries
    k_rows: int  # rows of the block of keys and values
    k_tile: int  # rows of a tile of keys and values
    sub_block: int  # rows of a tile of keys and values that are multiplied at once
    parts: int = 1  # parts of a group, which are visited as if each were a group of its own

    @classmethod
    def of(
        cls, heads: tuple[int, ...], product: Product, q_tile: int, kv_tile: int, sub_block: int
    ) -> "Grid":
        """Returns the steps for heads of queries [b, n, g, s, d], with the largest tiles, up to
        those that are given, that divide the blocks."""
        b, n, g, _, d = heads
        q_tile = largest_divisor(product.q_rows, q_tile, LANES)
        k_tile = largest_divisor(product.k_rows, kv_tile, LANES)
        return cls(
            b,
            n,
            g,
            d,
            product.q_rows,
            q_tile,
            product.k_rows,
            k_tile,
            largest_divisor(k_tile, sub_block, LANES),
        )

    def sub_blocks(self) -> list[Any]:
        return [pl.ds(start, self.sub_block) for start in range(0, self.k_tile, self.sub_block)]

    @property
    def q_tiles(self) -> int:
        return self.q_rows // self.q_tile

    @property
    def k_tiles(self) -> int:
        return self.k_rows // self.k_tile

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, self.groups, self.heads, self.q_tiles, self.k_tiles

    def in_parts(self, parts: int) -> "Grid":
        """Returns the steps for each group in parts of equally many heads."""
        groups = self.groups * parts
        return dataclasses.replace(self, groups=groups, heads=self.heads // parts, parts=parts)

    def scalars(self, product: Product) -> Array:
        """Returns the scalars [4] that every step can read.

        These are the index of the block of queries in its array, the index of the block of keys,
        and the positions in the sequence of their first rows.
        """
        values = (product.q_block, product.k_block, product.q_start, product.k_start)
        return jnp.stack([jnp.asarray(value, jnp.int32) for value in values])

    def queries(self) -> pl.BlockSpec:
        """Returns the block [q_tile, d] of queries, or of sums, [b, n, g, s, d]."""
        shape = (None, None, None, self.q_tile, self.head_size)
        return pl.BlockSpec(shape, lambda b, n, g, i, j, s: (b, n, g, s[0] * self.q_tiles + i, 0))

    def joined(self) -> pl.BlockSpec:
        """Returns the block [q_tile, d] of one head of rows [b, s, n * g * d], whose heads are
        whole registers wide.
        """
        shape = (None, self.q_tile, self.head_size)
        return pl.BlockSpec(
            shape, lambda b, n, g, i, j, s: (b, s[0] * self.q_tiles + i, n * self.heads + g)
        )

    def keys(self, which: int) -> pl.BlockSpec:
        """Returns the block [k_tile, d] of keys (which=0) or of values (which=1) [2, b, n, t,
        d].
        """
        shape = (None, None, None, self.k_tile, self.head_size)
        return pl.BlockSpec(
            shape, lambda b, n, g, i, j, s: (which, b, n, s[1] * self.k_tiles + j, 0)
        )

    def joined_keys(self) -> pl.BlockSpec:
        """Returns the block [k_tile, d] of one head of keys or of values [b, t, n * d]."""
        shape = (None, self.k_tile, self.head_size)

        def index(b: Scalar, n: Scalar, g: Scalar, i: Scalar, j: Scalar, s: Ref) -> Indices:
            return b, s[1] * self.k_tiles + j, self._group(n)[0]

        return pl.BlockSpec(shape, index)

    def joined_key_gradients(self) -> pl.BlockSpec:
        """Returns the block [k_rows, d] of dk or dv [b, t, n * d]; it stays in VMEM for all heads
        of a group. Groups in parts have a block for each of them, of [parts, b, t, n * d].
        """

        def of_part(b: Scalar, n: Scalar, g: Scalar, i: Scalar, j: Scalar, s: Ref) -> Indices:
            group, part = self._group(n)
            return part, b, s[1], group

        shape = (None, self.k_rows, self.head_size)
        if self.parts > 1:
            return pl.BlockSpec((None, *shape), of_part)
        return pl.BlockSpec(shape, lambda b, n, g, i, j, s: (b, s[1], n))

    def statistics(self, count: int = 2) -> pl.BlockSpec:
        """Returns the block [count, q_tile] of statistics [b, n, g, count, s]."""
        shape = (None, None, None, count, self.q_tile)
        return pl.BlockSpec(shape, lambda b, n, g, i, j, s: (b, n, g, 0, s[0] * self.q_tiles + i))

    def key_gradients(self) -> pl.BlockSpec:
        """Returns the block [2, k_rows, d] of dkv [2, b, n, t, d]; it stays in VMEM for all heads
        of a group.
        """
        shape = (2, None, None, self.k_rows, self.head_size)
        return pl.BlockSpec(shape, lambda b, n, g, i, j, s: (0, b, n, s[1], 0))

    def ids_of_queries(self) -> pl.BlockSpec:
        """Returns the block [1, q_tile] of the segment ids [b, 1, s] of queries."""
        shape = (None, 1, self.q_tile)
        return pl.BlockSpec(shape, lambda b, n, g, i, j, s: (b, 0, s[0] * self.q_tiles + i))

    def ids_of_keys(self) -> pl.BlockSpec:
        """Returns the block [1, k_tile] of the segment ids [b, 1, t] of keys."""
        shape = (None, 1, self.k_tile)
        return pl.BlockSpec(shape, lambda b, n, g, i, j, s: (b, 0, s[1] * self.k_tiles + j))

    def cost(
        self, mask: Mask, products: Sequence[Product], *, matmuls: int, itemsize: int
    ) -> pl.CostEstimate:
        """Returns the cost of a call with this number of matmuls for each pair of tiles.

        Where a loop makes the call, it has a product in each iteration, and the cost is their mean.
        """
        heads = self.batch * self.groups * self.heads
        shares = [self._reached(mask, product) for product in products]
        scores = int(heads * self.q_rows * self.k_rows * sum(shares) / len(shares))
        kv_bytes = 2 * heads * self.q_tiles * self.k_rows * self.head_size * itemsize
        # read; a float32 sum is read and written
        q_bytes = heads * self.q_rows * self.head_size * (itemsize + 8)
        return pl.CostEstimate(
            flops=2 * matmuls * scores * self.head_size,
            transcendentals=scores,
            bytes_accessed=kv_bytes + q_bytes,
        )

    def has_triangles(self, mask: Mask, product: Product) -> bool:
        """Says whether tiles are above the diagonal of a causal product, on it, or below: blocks
        begin at multiples of their rows, so square tiles are."""
        return product.masked and is_triangle(mask) and self.q_tile == self.k_tile

    def _group(self, number: Scalar) -> tuple[Scalar, Scalar]:
        """Returns a group, and which part of it, from the number of the part among all."""
        if self.parts == 1:
            return number, 0
        return split(number, self.parts)

    def _reached(self, mask: Mask, product: Product) -> float:
        """Returns the share of the scores that are computed; 1 if the positions are traced
        values.
        """
        known = isinstance(product.q_start, int) and isinstance(product.k_start, int)
        if not product.masked or not known:
            return 1.0
        # On the diagonal each sub-block of keys is multiplied with the queries from its own first
        # row on.
        on_diagonal = 1.0
        if self.has_triangles(mask, product):
            on_diagonal = (1 + self.sub_block / self.k_tile) / 2
        shares = []
        for i, j in itertools.product(range(self.q_tiles), range(self.k_tiles)):
            q = product.q_start + i * self.q_tile
            k = product.k_start + j * self.k_tile
            if mask.covers(q, self.q_tile, k, self.k_tile):
                shares.append(1.0)
            elif mask.reaches(q, self.q_tile, k, self.k_tile):
                shares.append(on_diagonal)
            else:
                shares.append(0.0)
        return sum(shares) / len(shares)


def is_triangle(mask: Mask) -> bool:
    return mask.causal and mask.window is None
