"""The passes of ring attention: what travels, what is computed meanwhile, forward and backward, on a ring or gathered.

The forward pass is one staggered loop: in each turn the products of the kv in hand, while it travels on. In the
backward pass the sum of a kv's gradient needs what this turn computes, so it leaves a turn later than the kv itself:

```
turn          0          1         2 .. H-1      H           H+1                   (H hops; R - 1, or fewer by a window)
travels       kv         kv        kv, dkv       dkv         dkv, home
products of   own kv     arrived   arrived       arrived     own kv, the rest
```

so every transfer has products to hide behind: those with a device's own kv are parted between the two ends.

With two directions half of each chunk's rows go each way, each half with its own sum. Where a gather takes the place of
the loop, kv is gathered once and the same products are made, this device's own rows first. Where no row needs one of
another device, there is the one product.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.mesh import cast_to_varying
from flaxasync.ops.attention.blocks import BlockKernel, Carry, Gradients, Scores, initial_carry, where_needed
from flaxasync.ops.attention.layouts import Product, Sequence
from flaxasync.ops.dtypes import sum_dtype
from flaxasync.ring import Ring, gathered_owner, shifts, split_rows, staggered_loop

type Block = dict[str, Array]  # what travels: "kv", "ids" where there are segments, "dkv" in the backward pass


@dataclasses.dataclass(frozen=True)
class Op:
    """The static half of a call."""

    ring: Ring | None  # None where no row needs one of another device
    sequence: Sequence
    scores: Scores
    kernel: BlockKernel


def attend(op: Op, q: Array, kv: Array, ids: Array | None) -> Carry:
    """The running softmax of this device's queries over the keys and values of all devices."""
    call = _Call(op, q, kv, ids)
    if op.ring is None:
        (block,) = call.blocks()
        return call.attend(block, op.sequence.products(0, 0, own=True), initial_carry(q))
    return _attend_gathered(call) if op.ring.transport is None else _attend_on_ring(call)


def differentiate(op: Op, q: Array, kv: Array, ids: Array | None, do: Array, rows: Array) -> Gradients:
    """dq as the sums of a carry, and dkv as kv, both in their dtype and without the scale; summed over all devices."""
    call = _Call(op, q, kv, ids, do, rows)
    if op.ring is None:
        (block,) = call.blocks()
        return call.differentiate(block, op.sequence.products(0, 0, own=True), initial_carry(q)[0])
    return _backward_gathered(call) if op.ring.transport is None else _backward_on_ring(call)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The operands of one pass on this device, and what they compute with rows of another."""

    op: Op
    q: Array
    kv: Array
    ids: Array | None
    do: Array | None = None
    rows: Array | None = None

    @property
    def ring(self) -> Ring:
        assert self.op.ring is not None
        return self.op.ring

    @property
    def directions(self) -> tuple[int, ...]:
        sequence = self.op.sequence
        if self.op.ring is None or sequence.one_way or self.ring.transport is None:
            return (1,)
        return shifts(self.ring.directions, sequence.rows // sequence.chunks)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first row, rows) of every chunk that go each way."""
        return split_rows(self.op.sequence.rows // self.op.sequence.chunks, len(self.directions))

    def blocks(self) -> tuple[Block, ...]:
        """What travels each way."""
        return tuple(self._rows_of_chunks(start, count) for start, count in self.runs)

    def _rows_of_chunks(self, start: int, count: int) -> Block:
        chunks = self.op.sequence.chunks

        def rows(x: Array, axis: int) -> Array:
            if count * chunks == x.shape[axis]:
                return x
            size = x.shape[axis] // chunks
            parts = [lax.slice_in_dim(x, c * size + start, c * size + start + count, axis=axis) for c in range(chunks)]
            return lax.concatenate(parts, axis % x.ndim)

        block = {"kv": rows(self.kv, -2)}
        return block if self.ids is None else block | {"ids": rows(self.ids, -1)}

    def whole(self, pieces: tuple[Array, ...]) -> Array:
        """Puts what `blocks` parted together again: [2, b, n, rows, d]."""
        if len(pieces) == 1:
            return pieces[0]
        chunks = self.op.sequence.chunks
        parted = [piece.reshape(*piece.shape[:-2], chunks, -1, piece.shape[-1]) for piece in pieces]
        return lax.concatenate(parted, parted[0].ndim - 2).reshape(self.kv.shape)

    def products(self, owner: Any, run: tuple[int, int], *, own: bool) -> list[Product]:
        index = lax.axis_index(self.ring.axis_name)
        return self.op.sequence.products(index, owner, own=own, offset=run[0], count=run[1])

    def own_products(self, run: tuple[int, int]) -> tuple[list[Product], list[Product]]:
        """The products with this device's own rows, for the first turn of the backward pass and for its last one."""
        products = self.products(lax.axis_index(self.ring.axis_name), run, own=True)
        if len(products) > 1:
            return products[:1], products[1:]
        (product,) = products
        if product.q_rows % 256:
            return products, []
        half = product.q_rows // 2
        parts = [
            dataclasses.replace(
                product, q_block=2 * product.q_block + i, q_rows=half, q_start=product.q_start + i * half
            )
            for i in (0, 1)
        ]
        return parts[1:], parts[:1]

    def _segments(self, block: Block) -> tuple[Array, Array] | None:
        return None if self.ids is None else (self.ids, block["ids"])

    def attend(self, block: Block, products: list[Product], carry: Carry) -> Carry:
        """Adds products with a block to the running softmax."""
        for product in products:

            def add(carry: Carry, product: Product = product) -> Carry:
                scores, segments = self.op.scores, self._segments(block)
                return self.op.kernel.forward(scores, self.q, block["kv"], segments, product, carry)

            carry = where_needed(product, add, carry)
        return carry

    def differentiate(self, block: Block, products: list[Product], dq: Array) -> Gradients:
        """Adds what products with a block contribute to dq; returns it, and their contribution to dkv."""
        dkv = cast_to_varying(jnp.zeros(block["kv"].shape, sum_dtype(self.q)), jax.typeof(block["kv"]).mat.varying)
        gradients = dq, dkv
        for product in products:

            def add(gradients: Gradients, product: Product = product) -> Gradients:
                scores, segments = self.op.scores, self._segments(block)
                assert self.do is not None
                assert self.rows is not None
                return self.op.kernel.backward(
                    scores, self.q, block["kv"], segments, self.do, self.rows, product, gradients
                )

            gradients = where_needed(product, add, gradients)
        return gradients


def _transport(call: _Call) -> Any:
    assert call.ring.transport is not None
    return call.ring.transport


def _attend_on_ring(call: _Call) -> Carry:
    op, directions, runs = call.op, call.directions, call.runs
    index, size, hops = lax.axis_index(call.ring.axis_name), op.sequence.size, op.sequence.hops
    loop = functools.partial(
        staggered_loop, _transport(call), call.ring.axis_name, shifts=directions, unroll=call.ring.unroll
    )

    def own(_: Any, blocks: tuple[Block, ...], carry: Carry) -> tuple[tuple[Block, ...], Carry]:
        for block, run in zip(blocks, runs, strict=True):
            carry = call.attend(block, call.products(index, run, own=True), carry)
        return blocks, carry

    def arrived(hop: Any, blocks: tuple[Block, ...], carry: Carry) -> tuple[tuple[Block, ...], Carry]:
        for block, shift, run in zip(blocks, directions, runs, strict=True):
            owner = gathered_owner(index, 1 + hop, size=size, shift=shift)
            carry = call.attend(block, call.products(owner, run, own=False), carry)
        return blocks, carry

    blocks, carry = call.blocks(), initial_carry(call.q)
    # The turn with a device's own rows is no turn of the loop: its products are others, and known when it is traced.
    blocks, carry = loop(blocks, carry, own, hops=1)
    blocks, carry = loop(blocks, carry, arrived, hops=hops - 1)
    return arrived(hops - 1, blocks, carry)[1]


def _backward_on_ring(call: _Call) -> tuple[Array, Array]:
    op, directions, runs = call.op, call.directions, call.runs
    index, size, hops = lax.axis_index(call.ring.axis_name), op.sequence.size, op.sequence.hops
    loop = functools.partial(staggered_loop, _transport(call), call.ring.axis_name, unroll=call.ring.unroll)
    onward = functools.partial(loop, shifts=directions)
    first, rest = zip(*(call.own_products(run) for run in runs), strict=True)

    def own(blocks: tuple[Block, ...], products: tuple, dq: Array) -> tuple[Array, tuple[Array, ...]]:
        dkvs = []
        for block, chosen in zip(blocks, products, strict=True):
            dq, dkv = call.differentiate(block, chosen, dq)
            dkvs.append(dkv)
        return dq, tuple(dkvs)

    def arrived(hop: Any, blocks: tuple[Block, ...], dq: Array) -> tuple[Array, tuple[Array, ...]]:
        dkvs = []
        for block, shift, run in zip(blocks, directions, runs, strict=True):
            owner = gathered_owner(index, hop, size=size, shift=shift)
            dq, dkv = call.differentiate(block, call.products(owner, run, own=False), dq)
            dkvs.append(dkv)
        return dq, tuple(dkvs)

    own_blocks, dq = call.blocks(), initial_carry(call.q)[0]
    # Turn 0: kv leaves.
    blocks, (dq, home) = onward(own_blocks, dq, lambda _, blocks, dq: (blocks, own(blocks, first, dq)), hops=1)
    # Turn 1: the first gradients of others' rows are made; they have not travelled yet.
    if hops == 1:
        dq, sums = arrived(1, blocks, dq)
    else:
        blocks, (dq, sums) = onward(blocks, dq, lambda _, blocks, dq: (blocks, arrived(1, blocks, dq)), hops=1)

    # Turns 2 .. H-1: kv and the sum for the kv before it travel together.
    def add(arrived: Block, part: Block) -> Block:
        return arrived | {"dkv": arrived["dkv"] + part["dkv"]}

    def both(hop: Any, blocks: tuple[Block, ...], dq: Array) -> tuple[tuple[Block, ...], Array]:
        dq, dkvs = arrived(2 + hop, blocks, dq)
        return tuple({"dkv": dkv} for dkv in dkvs), dq

    if hops > 2:
        travelling = tuple(block | {"dkv": dkv} for block, dkv in zip(blocks, sums, strict=True))
        travelling, dq = onward(travelling, dq, both, hops=hops - 2, merge=add)
        sums = tuple(block.pop("dkv") for block in travelling)
        blocks = travelling
    # Turn H: the last kv has come; its sum follows.
    if hops > 1:
        last = blocks

        def to_last(_: Any, __: tuple, dq: Array) -> tuple[tuple[Array, ...], Array]:
            dq, dkvs = arrived(hops, last, dq)
            return dkvs, dq

        sums, dq = onward(sums, dq, to_last, hops=1, merge=jnp.add)
    # Turn H+1: the sums go home.
    back = tuple(-hops * shift % size for shift in directions)
    sums, (dq, more) = loop(sums, dq, lambda _, __, dq: ((), own(own_blocks, rest, dq)), shifts=back, hops=1)
    return dq, call.whole(tuple(a + b + c for a, b, c in zip(home, sums, more, strict=True)))


def _attend_gathered(call: _Call) -> Carry:
    def use(block: Block, products: list[Product], _: Any, carry: Carry) -> Carry:
        return call.attend(block, products, carry)

    return _with_gathered(call, use, initial_carry(call.q))


def _backward_gathered(call: _Call) -> tuple[Array, Array]:
    axis_name, size = call.ring.axis_name, call.op.sequence.size

    def use(block: Block, products: list[Product], owner: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dq, dkvs = carry
        dq, dkv = call.differentiate(block, products, dq)
        return dq, lax.dynamic_update_index_in_dim(dkvs, dkv, owner, 0)

    dkvs = cast_to_varying(lax.empty((size, *call.kv.shape), sum_dtype(call.q)), jax.typeof(call.kv).mat.varying)
    dq, dkvs = _with_gathered(call, use, (initial_carry(call.q)[0], dkvs))
    return dq, lax.psum_scatter(dkvs, axis_name)


def _with_gathered[T](call: _Call, use: Callable[[Block, list[Product], Any, T], T], carry: T) -> T:
    """Shows every device's rows to `use`, this device's first, after one gather."""
    axis_name, size, run = call.ring.axis_name, call.op.sequence.size, call.runs[0]
    index, (own,) = lax.axis_index(axis_name), call.blocks()
    gathered = lax.all_gather(own, axis_name)
    carry = use(own, call.products(index, run, own=True), index, carry)

    def other(turn: Any, carry: T) -> T:
        owner = (index - 1 - turn) % size
        block = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, owner, keepdims=False), gathered)
        return use(block, call.products(owner, run, own=False), owner, carry)

    return lax.fori_loop(0, size - 1, other, carry)
