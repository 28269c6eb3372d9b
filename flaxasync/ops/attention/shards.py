"""The operands of attention on one device, and what they compute with a block of keys and values.

Keys and values travel as one block. With two directions, each direction carries the same half of the rows of every
chunk, so each half-block has the products that the layout gives to its chunks.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.attention_block import BlockKernel, Carry, Gradients, Product, Scores
from flaxasync.mesh import cast_to_varying
from flaxasync.ops.attention.blocks import where_needed
from flaxasync.ops.attention.layouts import Sequence
from flaxasync.ops.dtypes import accumulator_dtype
from flaxasync.ring import Index, Ring, shifts, split_rows

type Block = dict[str, Array]  # what travels: "kv", "ids" where there are segments, "dkv" in the backward pass


@dataclasses.dataclass(frozen=True)
class Call:
    """The static half of a call.

    Attributes:
      ring: How blocks travel; None where no row needs a row of another device.
      sequence: Which rows the devices hold, and which products they need.
      scores: What turns the product of a query and a key into a score.
      kernel: What multiplies two blocks.
    """

    ring: Ring | None
    sequence: Sequence
    scores: Scores
    kernel: BlockKernel


@dataclasses.dataclass(frozen=True)
class Shards:
    """The operands on this device.

    Attributes:
      call: The static half of the call.
      q: Queries, [b, n, g, s, d].
      kv: Keys and values, [2, b, n, s, d].
      ids: Segment ids, [b, s]; None for one segment.
      do: The cotangent of the output, as q; None in the forward pass.
      rows: Statistics of the rows of q for the gradient, [b, n, g, 2, s]; None in the forward pass.
    """

    call: Call
    q: Array
    kv: Array
    ids: Array | None
    do: Array | None = None
    rows: Array | None = None

    @property
    def ring(self) -> Ring:
        assert self.call.ring is not None
        return self.call.ring

    @property
    def shifts(self) -> tuple[int, ...]:
        """The shift of each half-block."""
        sequence = self.call.sequence
        if self.call.ring is None or sequence.one_way or self.ring.transport is None:
            return (1,)
        return shifts(self.ring.directions, sequence.rows // sequence.chunks)

    @property
    def row_ranges(self) -> tuple[tuple[int, int], ...]:
        """(first row, row count) within every chunk of each half-block."""
        return split_rows(self.call.sequence.rows // self.call.sequence.chunks, len(self.shifts))

    def blocks(self) -> tuple[Block, ...]:
        """Returns this device's half-blocks."""
        return tuple(self._rows_of_chunks(start, count) for start, count in self.row_ranges)

    def join(self, halves: tuple[Array, ...]) -> Array:
        """Joins the arrays [2, b, n, rows, d] of all half-blocks into one of the shape of kv."""
        if len(halves) == 1:
            return halves[0]
        chunks = self.call.sequence.chunks
        chunked = [half.reshape(*half.shape[:-2], chunks, -1, half.shape[-1]) for half in halves]
        return lax.concatenate(chunked, chunked[0].ndim - 2).reshape(self.kv.shape)

    def products(self, owner: Index, row_range: tuple[int, int], *, own: bool) -> list[Product]:
        """Returns this device's products with a half-block of `owner`; `own` says whether that is this device."""
        index, (offset, count) = lax.axis_index(self.ring.axis_name), row_range
        return self.call.sequence.products(index, owner, own=own, offset=offset, count=count)

    def own_products(self, row_range: tuple[int, int]) -> tuple[list[Product], list[Product]]:
        """Splits the products with this device's own rows between the first and the last turn of the backward pass."""
        products = self.products(lax.axis_index(self.ring.axis_name), row_range, own=True)
        if len(products) > 1:
            return products[:1], products[1:]
        (product,) = products
        if product.q_rows % 256:
            return products, []
        half = product.q_rows // 2
        first, second = (
            dataclasses.replace(
                product, q_block=2 * product.q_block + i, q_rows=half, q_start=product.q_start + i * half
            )
            for i in (0, 1)
        )
        return [second], [first]

    def attend(self, block: Block, products: list[Product], carry: Carry) -> Carry:
        """Adds products with a block to the running softmax."""
        for product in products:

            def add(carry: Carry, product: Product = product) -> Carry:
                scores, segments = self.call.scores, self._segments(block)
                return self.call.kernel.forward(scores, self.q, block["kv"], segments, product, carry)

            carry = where_needed(product, add, carry)
        return carry

    def differentiate(self, block: Block, products: list[Product], dq: Array) -> Gradients:
        """Adds what products with a block contribute to dq; returns it, and their contribution to dkv."""
        zeros = jnp.zeros(block["kv"].shape, accumulator_dtype(self.q))
        gradients = dq, cast_to_varying(zeros, jax.typeof(block["kv"]).mat.varying)
        for product in products:

            def add(gradients: Gradients, product: Product = product) -> Gradients:
                scores, segments = self.call.scores, self._segments(block)
                assert self.do is not None
                assert self.rows is not None
                return self.call.kernel.backward(
                    scores, self.q, block["kv"], segments, self.do, self.rows, product, gradients
                )

            gradients = where_needed(product, add, gradients)
        return gradients

    def _rows_of_chunks(self, start: int, count: int) -> Block:
        """Returns `count` rows of every chunk, from row `start` of the chunk on."""
        chunks = self.call.sequence.chunks

        def rows(x: Array, axis: int) -> Array:
            if count * chunks == x.shape[axis]:
                return x
            size = x.shape[axis] // chunks
            ranges = [(c * size + start, c * size + start + count) for c in range(chunks)]
            return lax.concatenate([lax.slice_in_dim(x, *ends, axis=axis) for ends in ranges], axis % x.ndim)

        block = {"kv": rows(self.kv, -2)}
        return block if self.ids is None else block | {"ids": rows(self.ids, -1)}

    def _segments(self, block: Block) -> tuple[Array, Array] | None:
        return None if self.ids is None else (self.ids, block["ids"])
