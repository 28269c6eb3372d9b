"""The ring collectives of ring attention: what travels in each turn, and what is computed meanwhile.

The forward pass is one staggered loop: each turn has the products of the kv that this device holds, while that kv
travels on. In the backward pass the gradient of a kv needs what a turn computes with it, so the partial sum of dkv
leaves one turn later than the kv itself:

```
turn          0          1         2 .. H-1      H           H+1               (H hops: R - 1, or fewer with a window)
travels       kv         kv        kv, dkv       dkv         dkv, to its owner
products of   own kv     arrived   arrived       arrived     own kv, the rest
```

So every transfer has products to hide behind: the products with a device's own kv are split between the first turn and
the last one. With two directions, each half-block has a partial sum of its own.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.attention_block import Carry, Gradients
from flaxasync.ops.attention.blocks import initial_carry
from flaxasync.ops.attention.shards import Block, Shards
from flaxasync.ring import Index, gathered_owner, staggered_loop

type Blocks = tuple[Block, ...]
type Arrays = tuple[Array, ...]


def attend(shards: Shards) -> Carry:
    """Returns the softmax carry of this device's queries over the keys and values of all devices."""
    assert shards.ring.transport is not None
    shifts, row_ranges, sequence = shards.shifts, shards.row_ranges, shards.call.sequence
    index, hops = lax.axis_index(shards.ring.axis_name), sequence.hops
    loop = functools.partial(
        staggered_loop, shards.ring.transport, shards.ring.axis_name, shifts=shifts, unroll=shards.ring.unroll
    )

    def own(_: Index, blocks: Blocks, carry: Carry) -> tuple[Blocks, Carry]:
        for block, row_range in zip(blocks, row_ranges, strict=True):
            carry = shards.attend(block, shards.products(index, row_range, own=True), carry)
        return blocks, carry

    def arrived(hop: Index, blocks: Blocks, carry: Carry) -> tuple[Blocks, Carry]:
        for block, shift, row_range in zip(blocks, shifts, row_ranges, strict=True):
            owner = gathered_owner(index, 1 + hop, size=sequence.size, shift=shift)
            carry = shards.attend(block, shards.products(owner, row_range, own=False), carry)
        return blocks, carry

    blocks, carry = shards.blocks(), initial_carry(shards.q)
    # The turn with the device's own rows is not in the loop: its products differ, and are known while tracing.
    blocks, carry = loop(blocks, carry, own, hops=1)
    blocks, carry = loop(blocks, carry, arrived, hops=hops - 1)
    return arrived(hops - 1, blocks, carry)[1]


def differentiate(shards: Shards) -> Gradients:
    """Returns dq, and dkv summed over all devices."""
    assert shards.ring.transport is not None
    shifts, row_ranges, sequence = shards.shifts, shards.row_ranges, shards.call.sequence
    index, size, hops = lax.axis_index(shards.ring.axis_name), sequence.size, sequence.hops
    loop = functools.partial(staggered_loop, shards.ring.transport, shards.ring.axis_name, unroll=shards.ring.unroll)
    onward = functools.partial(loop, shifts=shifts)
    first, rest = zip(*(shards.own_products(row_range) for row_range in row_ranges), strict=True)

    def own(blocks: Blocks, products: tuple, dq: Array) -> tuple[Array, Arrays]:
        dkvs = []
        for block, chosen in zip(blocks, products, strict=True):
            dq, dkv = shards.differentiate(block, chosen, dq)
            dkvs.append(dkv)
        return dq, tuple(dkvs)

    def arrived(hop: Index, blocks: Blocks, dq: Array) -> tuple[Array, Arrays]:
        dkvs = []
        for block, shift, row_range in zip(blocks, shifts, row_ranges, strict=True):
            owner = gathered_owner(index, hop, size=size, shift=shift)
            dq, dkv = shards.differentiate(block, shards.products(owner, row_range, own=False), dq)
            dkvs.append(dkv)
        return dq, tuple(dkvs)

    own_blocks, dq = shards.blocks(), initial_carry(shards.q)[0]
    # Turn 0: kv leaves.
    blocks, (dq, own_dkvs) = onward(own_blocks, dq, lambda _, blocks, dq: (blocks, own(blocks, first, dq)), hops=1)
    # Turn 1: the first gradients of other devices' rows are computed; they have not travelled yet.
    if hops == 1:
        dq, dkvs = arrived(1, blocks, dq)
    else:
        blocks, (dq, dkvs) = onward(blocks, dq, lambda _, blocks, dq: (blocks, arrived(1, blocks, dq)), hops=1)

    # Turns 2 .. H-1: kv and the partial sum for the kv before it travel together.
    def add(arrived: Block, addend: Block) -> Block:
        return arrived | {"dkv": arrived["dkv"] + addend["dkv"]}

    def both(hop: Index, blocks: Blocks, dq: Array) -> tuple[Blocks, Array]:
        dq, dkvs = arrived(2 + hop, blocks, dq)
        return tuple({"dkv": dkv} for dkv in dkvs), dq

    if hops > 2:
        travelling = tuple(block | {"dkv": dkv} for block, dkv in zip(blocks, dkvs, strict=True))
        travelling, dq = onward(travelling, dq, both, hops=hops - 2, merge=add)
        dkvs = tuple(block.pop("dkv") for block in travelling)
        blocks = travelling
    # Turn H: the last kv has arrived; its partial sum follows.
    if hops > 1:
        last = blocks

        def to_last(_: Index, __: Arrays, dq: Array) -> tuple[Arrays, Array]:
            dq, dkvs = arrived(hops, last, dq)
            return dkvs, dq

        dkvs, dq = onward(dkvs, dq, to_last, hops=1, merge=jnp.add)
    # Turn H+1: the sums return to the owners of their kv.
    back = tuple(-hops * shift % size for shift in shifts)
    dkvs, (dq, more) = loop(dkvs, dq, lambda _, __, dq: ((), own(own_blocks, rest, dq)), shifts=back, hops=1)
    return dq, shards.join(tuple(a + b + c for a, b, c in zip(own_dkvs, dkvs, more, strict=True)))
