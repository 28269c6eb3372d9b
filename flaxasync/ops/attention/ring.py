"""The loops of attention over blocks of keys and values: around a ring, after one gather, or over a
single block.

The forward pass around a ring is one staggered loop: each turn has the products of the kv that this
device holds, while that kv travels on. The backward pass is `flaxasync.ring.ring_visit`: every kv
visits the devices whose queries attend to it, and its dkv follows. With two directions, each
direction carries the same half of the rows of every chunk, and each half-block has the products
that the layout gives to its chunks, and a partial sum of its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.attention_block import (
    BlockKernel,
    BlockOperands,
    Carry,
    Gradients,
    Product,
    Scores,
)
from flaxasync.mesh import vary_like
from flaxasync.ops.attention.blocks import initial_carry, where_needed
from flaxasync.ops.attention.layouts import Sequence
from flaxasync.ops.matmul.products import Arrays, accumulator_dtype
from flaxasync.ring import (
    Index,
    Ring,
    gathered_owner,
    ring_visit,
    shifts,
    split_rows,
    staggered_loop,
)


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call. Hashable."""

    ring: Ring | None  # how blocks travel; None where no row needs a row of another device
    sequence: Sequence  # which rows the devices hold, and which products they need
    scores: Scores  # what turns the product of a query and a key into a score
    kernel: BlockKernel  # what multiplies two blocks


class Half(NamedTuple):
    """A half-block, or the whole block: how far it is sent in a hop, and which rows of every chunk
    it has.
    """

    shift: int
    first: int
    rows: int


class Block(NamedTuple):
    """What travels as one half-block."""

    ids: Array | None  # the segments of the rows, [b, rows]; None for one segment
    kv: Array  # keys and values, [2, b, n, rows, d]


type Blocks = tuple[Block, ...]
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
        if self.call.ring is None:
            return 0
        return lax.axis_index(self.ring.axis_name)

    @property
    def halves(self) -> list[Half]:
        """The half-blocks; the whole block as one where it goes one way."""
        ring = self.call.ring
        sequence = self.call.sequence
        rows = sequence.rows // sequence.chunks
        whole = ring is None or ring.transport is None or sequence.one_way
        block_shifts = (1,) if whole else shifts(self.ring.directions, rows)
        row_ranges = split_rows(rows, len(block_shifts))
        return [
            Half(shift, *row_range)
            for shift, row_range in zip(block_shifts, row_ranges, strict=True)
        ]

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
        return tuple(
            Block(i, rows(self.kv, half, -2)) for i, half in zip(ids, self.halves, strict=True)
        )

    def join(self, halves: Arrays) -> Array:
        """Joins the arrays [2, b, n, rows, d] of all half-blocks into one of the shape of kv."""
        if len(halves) == 1:
            return halves[0]
        chunks = self.call.sequence.chunks
        chunked = [half.reshape(*half.shape[:-2], chunks, -1, half.shape[-1]) for half in halves]
        return lax.concatenate(chunked, chunked[0].ndim - 2).reshape(self.kv.shape)

    def products(self, hop: Index) -> list[Products]:
        """Returns the products with each half-block that this device holds after `hop` hops: its
        own if `hop` is 0.
        """
        found = []
        sequence = self.call.sequence
        own = isinstance(hop, int) and hop == 0
        for half in self.halves:
            if own:
                owner = self.index
            else:
                owner = gathered_owner(self.index, hop, size=sequence.size, shift=half.shift)
            found.append(
                sequence.products(self.index, owner, own=own, offset=half.first, count=half.rows)
            )
        return found

    def attend(self, blocks: Blocks, products: Iterable[Products], carry: Carry) -> Carry:
        """Adds products with blocks to the running softmax."""
        kernel = self.call.kernel
        for block, chosen in zip(blocks, products, strict=True):
            operands = self._operands(block)
            for product in chosen:
                add = functools.partial(kernel.forward, operands, product)
                carry = where_needed(product, add, carry)
        return carry

    def differentiate(
        self, blocks: Blocks, products: Iterable[Products], dq: Array
    ) -> tuple[Array, Arrays]:
        """Adds what products with blocks contribute to dq; returns it, and their contributions to
        dkv.
        """
        assert self.do is not None
        assert self.rows is not None
        kernel = self.call.kernel
        dkvs = []
        for block, chosen in zip(blocks, products, strict=True):
            zeros = jnp.zeros(block.kv.shape, accumulator_dtype(self.q))
            operands = self._operands(block)
            dkv = vary_like(zeros, block.kv)
            for product in chosen:
                add = functools.partial(kernel.backward, operands, self.do, self.rows, product)
                dq, dkv = where_needed(product, add, (dq, dkv))
            dkvs.append(dkv)
        return dq, tuple(dkvs)

    def _operands(self, block: Block) -> BlockOperands:
        segments = None
        if self.ids is not None and block.ids is not None:
            segments = (self.ids, block.ids)
        return BlockOperands(self.call.scores, self.q, block.kv, segments)


def attend(shards: Shards) -> Carry:
    """Returns the softmax carry of this device's queries over all keys and values that they attend
    to.
    """

    def own(_: Index, blocks: Blocks, carry: Carry) -> tuple[Blocks, Carry]:
        return blocks, shards.attend(blocks, shards.products(0), carry)

    def arrived(hop: Index, blocks: Blocks, carry: Carry) -> tuple[Blocks, Carry]:
        return blocks, shards.attend(blocks, shards.products(1 + hop), carry)

    blocks = shards.blocks()
    carry = initial_carry(shards.q)
    hops = shards.call.sequence.hops
    if shards.call.ring is None:
        return own(0, blocks, carry)[1]
    if shards.ring.transport is None:
        gathered = lax.all_gather(blocks, shards.ring.axis_name)
        _, carry = own(0, blocks, carry)
        return _for_each_other(
            shards, gathered, lambda hop, blocks, _, carry: arrived(hop, blocks, carry)[1], carry
        )
    # The turn with the device's own rows is not in the loop: its products differ, and are known
    # while tracing.
    half_shifts = tuple(half.shift for half in shards.halves)
    onward = functools.partial(staggered_loop, shards.ring, shifts=half_shifts)
    blocks, carry = onward(blocks, carry, own, hops=1)
    blocks, carry = onward(blocks, carry, arrived, hops=hops - 1)
    return arrived(hops - 1, blocks, carry)[1]


def differentiate(shards: Shards) -> Gradients:
    """Returns dq, and dkv summed over all devices."""
    blocks = shards.blocks()
    dq = initial_carry(shards.q)[0]
    if shards.call.ring is None:
        dq, (dkv,) = shards.differentiate(blocks, shards.products(0), dq)
        return dq, dkv
    if shards.ring.transport is None:
        return _differentiate_gathered(shards, blocks, dq)
    return _differentiate_ring(shards, blocks, dq)


def _differentiate_gathered(shards: Shards, own: Blocks, dq: Array) -> Gradients:
    axis_name = shards.ring.axis_name
    put = functools.partial(lax.dynamic_update_index_in_dim, axis=0)

    def other(hop: Index, blocks: Blocks, owner: Index, carry: Gradients) -> Gradients:
        dq, dkvs = carry
        dq, (dkv,) = shards.differentiate(blocks, shards.products(1 + hop), dq)
        return dq, put(dkvs, dkv, owner)

    gathered = lax.all_gather(own, axis_name)
    dkvs = lax.empty((shards.call.sequence.size, *shards.kv.shape), accumulator_dtype(shards.q))
    dkvs = vary_like(dkvs, shards.kv)
    dq, (dkv,) = shards.differentiate(own, shards.products(0), dq)
    dq, dkvs = _for_each_other(shards, gathered, other, (dq, put(dkvs, dkv, shards.index)))
    return dq, lax.psum_scatter(dkvs, axis_name)


def _for_each_other[T](
    shards: Shards, gathered: Blocks, use: Callable[[Index, Blocks, Index, T], T], carry: T
) -> T:
    """Calls `use(hop, blocks, owner, carry)` with the rows of every other device, after a
    gather.
    """
    size = shards.call.sequence.size

    def turn(hop: Index, carry: T) -> T:
        owner = gathered_owner(shards.index, 1 + hop, size=size, shift=1)
        blocks = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, owner, keepdims=False), gathered
        )
        return use(hop, blocks, owner, carry)

    return lax.fori_loop(0, size - 1, turn, carry)


def _differentiate_ring(shards: Shards, own: Blocks, dq: Array) -> Gradients:
    sequence = shards.call.sequence
    first, rest = zip(*map(_split, shards.products(0)), strict=True)

    def visit(hop: Index, blocks: Blocks, dq: Array) -> tuple[Arrays, Array]:
        own = isinstance(hop, int) and hop == 0
        dq, dkvs = shards.differentiate(blocks, first if own else shards.products(hop), dq)
        return dkvs, dq

    def last(dq: Array) -> tuple[Arrays, Array]:
        dq, dkvs = shards.differentiate(own, rest, dq)
        return dkvs, dq

    half_shifts = tuple(half.shift for half in shards.halves)
    dkvs, dq = ring_visit(
        shards.ring, own, dq, visit, last, add=jnp.add, shifts=half_shifts, hops=sequence.hops
    )
    return dq, shards.join(dkvs)


def _split(products: Products) -> tuple[Products, Products]:
    """Splits the products with this device's own rows between the first and the last turn of the
    backward pass.
    """
    if len(products) > 1:
        return products[:1], products[1:]
    (product,) = products
    if product.q_rows % 256:
        return products, []
    rows = product.q_rows // 2
    first, second = (
        dataclasses.replace(
            product,
            q_block=2 * product.q_block + i,
            q_rows=rows,
            q_start=product.q_start + i * rows,
        )
        for i in (0, 1)
    )
    return [second], [first]
