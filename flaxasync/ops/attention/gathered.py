"""Attention without a ring: of whole sequences, or after one gather of all keys and values (backend "none")."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from flaxasync.kernels.attention_block import Carry, Gradients, Product
from flaxasync.mesh import cast_to_varying
from flaxasync.ops.attention.blocks import initial_carry
from flaxasync.ops.attention.shards import Block, Shards
from flaxasync.ops.dtypes import accumulator_dtype
from flaxasync.ring import Index


def attend_whole(shards: Shards) -> Carry:
    """Returns the softmax carry of queries whose keys and values are all on this device."""
    (block,) = shards.blocks()
    return shards.attend(block, shards.call.sequence.products(0, 0, own=True), initial_carry(shards.q))


def differentiate_whole(shards: Shards) -> Gradients:
    """Returns dq and dkv where all rows are on this device."""
    (block,) = shards.blocks()
    return shards.differentiate(block, shards.call.sequence.products(0, 0, own=True), initial_carry(shards.q)[0])


def attend_gathered(shards: Shards) -> Carry:
    """Returns the softmax carry of this device's queries over the keys and values of all devices."""

    def use(block: Block, products: list[Product], _: Index, carry: Carry) -> Carry:
        return shards.attend(block, products, carry)

    return _with_gathered(shards, use, initial_carry(shards.q))


def differentiate_gathered(shards: Shards) -> Gradients:
    """Returns dq, and dkv summed over all devices."""

    def use(block: Block, products: list[Product], owner: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dq, dkvs = carry
        dq, dkv = shards.differentiate(block, products, dq)
        return dq, lax.dynamic_update_index_in_dim(dkvs, dkv, owner, 0)

    dkvs = lax.empty((shards.call.sequence.size, *shards.kv.shape), accumulator_dtype(shards.q))
    dkvs = cast_to_varying(dkvs, jax.typeof(shards.kv).mat.varying)
    dq, dkvs = _with_gathered(shards, use, (initial_carry(shards.q)[0], dkvs))
    return dq, lax.psum_scatter(dkvs, shards.ring.axis_name)


def _with_gathered[T](shards: Shards, use: Callable[[Block, list[Product], Any, T], T], carry: T) -> T:
    """Gathers the rows of all devices and shows them to `use` one device at a time, beginning with this device."""
    axis_name, size, row_range = shards.ring.axis_name, shards.call.sequence.size, shards.row_ranges[0]
    index, (own,) = lax.axis_index(axis_name), shards.blocks()
    gathered = lax.all_gather(own, axis_name)
    carry = use(own, shards.products(index, row_range, own=True), index, carry)

    def other(turn: Index, carry: T) -> T:
        owner = (index - 1 - turn) % size
        block = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, owner, keepdims=False), gathered)
        return use(block, shards.products(owner, row_range, own=False), owner, carry)

    return lax.fori_loop(0, size - 1, other, carry)
