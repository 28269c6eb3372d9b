"""The operands of attention on one device, and what they compute with a block of keys and values.

Keys and values travel as one block. With two directions, each direction carries the same half of the rows of every
chunk, so each half-block has the products that the layout gives to its chunks.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.attention_block import BlockKernel, Carry, Product, Scores, Segments
from flaxasync.mesh import cast_to_varying
from flaxasync.ops.attention.blocks import where_needed
from flaxasync.ops.attention.layouts import Sequence
from flaxasync.ops.dtypes import accumulator_dtype
from flaxasync.ring import Index, Ring, gathered_owner, shifts, split_rows


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call. Hashable."""

    ring: Ring | None  # how blocks travel; None where no row needs a row of another device
    sequence: Sequence  # which rows the devices hold, and which products they need
    scores: Scores  # what turns the product of a query and a key into a score
    kernel: BlockKernel  # what multiplies two blocks


class Half(NamedTuple):
    """A half-block, or the whole block: how far it is sent in a hop, and which rows of every chunk it has."""

    shift: int
    first: int
    rows: int


class Block(NamedTuple):
    """What travels as one half-block."""

    dkv: Array | None  # the partial sum of the gradient of a kv, in the backward pass
    ids: Array | None  # the segments of the rows, [b, rows]; None for one segment
    kv: Array  # keys and values, [2, b, n, rows, d]


type Blocks = tuple[Block, ...]
type Arrays = tuple[Array, ...]
type Products = list[Product]  # with one half-block


@dataclasses.dataclass(frozen=True)
class Shards:
    """The operands on this device. `do` and `rows` are None in the forward pass."""

    call: Call
    q: Array  # [b, n, g, s, d]
    kv: Array  # keys and values, [2, b, n, s, d]
    ids: Array | None  # segment ids, [b, s]; None for one segment
    do: Array | None = None  # the cotangent of the output, as q
    rows: Array | None = None  # statistics of the rows of q for the gradient, [b, n, g, 2, s]

    @property
    def ring(self) -> Ring:
        assert self.call.ring is not None
        return self.call.ring

    @property
    def index(self) -> Index:
        """The number of this device on the ring."""
        return 0 if self.call.ring is None else lax.axis_index(self.ring.axis_name)

    @property
    def halves(self) -> list[Half]:
        """The half-blocks; the whole block as one where it goes one way."""
        ring, sequence = self.call.ring, self.call.sequence
        rows = sequence.rows // sequence.chunks
        whole = ring is None or ring.transport is None or sequence.one_way
        block_shifts = (1,) if whole else shifts(self.ring.directions, rows)
        row_ranges = split_rows(rows, len(block_shifts))
        return [Half(shift, *row_range) for shift, row_range in zip(block_shifts, row_ranges, strict=True)]

    def blocks(self) -> Blocks:
        """Returns this device's half-blocks."""
        chunks = self.call.sequence.chunks

        def rows(x: Array, half: Half, axis: int) -> Array:
            """Returns the half-block's rows of every chunk."""
            if half.rows * chunks == x.shape[axis]:
                return x
            starts = [chunk * (x.shape[axis] // chunks) + half.first for chunk in range(chunks)]
            parts = [lax.slice_in_dim(x, start, start + half.rows, axis=axis) for start in starts]
            return lax.concatenate(parts, axis % x.ndim)

        ids = [None if self.ids is None else rows(self.ids, half, -1) for half in self.halves]
        return tuple(Block(None, i, rows(self.kv, half, -2)) for i, half in zip(ids, self.halves, strict=True))

    def join(self, halves: Arrays) -> Array:
        """Joins the arrays [2, b, n, rows, d] of all half-blocks into one of the shape of kv."""
        if len(halves) == 1:
            return halves[0]
        chunks = self.call.sequence.chunks
        chunked = [half.reshape(*half.shape[:-2], chunks, -1, half.shape[-1]) for half in halves]
        return lax.concatenate(chunked, chunked[0].ndim - 2).reshape(self.kv.shape)

    def own_products(self) -> list[Products]:
        """Returns the products with each half-block of this device."""
        products = self.call.sequence.products
        return [products(self.index, self.index, own=True, offset=half.first, count=half.rows) for half in self.halves]

    def products(self, hop: Index) -> list[Products]:
        """Returns the products with each half-block that this device holds after `hop` hops, one or more."""
        found, sequence = [], self.call.sequence
        for half in self.halves:
            owner = gathered_owner(self.index, hop, size=sequence.size, shift=half.shift)
            found.append(sequence.products(self.index, owner, own=False, offset=half.first, count=half.rows))
        return found

    def attend(self, blocks: Blocks, products: Iterable[Products], carry: Carry) -> Carry:
        """Adds products with blocks to the running softmax."""
        kernel = self.call.kernel
        for block, chosen in zip(blocks, products, strict=True):
            segments = self._segments(block)
            for product in chosen:
                add = functools.partial(kernel.forward, self.call.scores, self.q, block.kv, segments, product)
                carry = where_needed(product, add, carry)
        return carry

    def differentiate(self, blocks: Blocks, products: Iterable[Products], dq: Array) -> tuple[Array, Arrays]:
        """Adds what products with blocks contribute to dq; returns it, and their contributions to dkv."""
        assert self.do is not None
        assert self.rows is not None
        kernel, dkvs = self.call.kernel, []
        for block, chosen in zip(blocks, products, strict=True):
            zeros, segments = jnp.zeros(block.kv.shape, accumulator_dtype(self.q)), self._segments(block)
            dkv = cast_to_varying(zeros, jax.typeof(block.kv).mat.varying)
            for product in chosen:
                add = functools.partial(
                    kernel.backward, self.call.scores, self.q, block.kv, segments, self.do, self.rows, product
                )
                dq, dkv = where_needed(product, add, (dq, dkv))
            dkvs.append(dkv)
        return dq, tuple(dkvs)

    def _segments(self, block: Block) -> Segments:
        return None if self.ids is None or block.ids is None else (self.ids, block.ids)
