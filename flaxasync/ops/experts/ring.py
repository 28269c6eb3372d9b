"""How tokens and experts come together: a ring of blocks ("xla", "pallas", "stateful"), or one
gather ("none").

The third way, in which rows travel only to where they are needed, is in `exchange`; the VJP rule
here is that of all.

A block is the rows of a device with their assignments. It visits every device, whose experts
multiply the rows that chose them while the block travels on, and the sum of what they return
follows one turn behind (`ring_visit`). The gradient is the same ring with the cotangents of the
outputs in the block. With two directions there are two half-blocks, which are multiplied together
where they arrive.

```
operands   x [n, D], ids [n, k], weights [n, k], kernels         of this device
y          sum over k of weights * expert(x)          [n, D]     saved are the operands: nothing gathered
dx, dweights                                                     return to the owner of the rows
dkernels                                                         summed over all blocks where the experts are
```
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from flaxasync.ops.experts import local
from flaxasync.ops.experts.assignments import sort, unsort
from flaxasync.ops.experts.exchange import Exchange, exchange
from flaxasync.ops.experts.local import BlockGradients, ExpertBlock, Experts, Sums
from flaxasync.ops.experts.packing import pack, unpack
from flaxasync.ops.experts.products import Weights
from flaxasync.ops.matmul.products import accumulator_dtype
from flaxasync.ops.saved import PRODUCT, first_only
from flaxasync.ring import Index, Ring, ring_visit, shifts, split_rows

type Blocks = tuple[ExpertBlock, ...]
# (blocks, carry) -> (result of each, carry)
type Work = Callable[[Blocks, Any], tuple[tuple[Any, ...], Any]]

_first_derivative_only = first_only(
    "expert_mlp", "its gradient is a ring of its own", "differentiate it once"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply(
    experts: Experts, ring: Ring | Exchange, x: Array, ids: Array, weights: Array, kernels: Weights
) -> Array:
    blocks, _ = _blocks(experts, ring, x, ids, weights)

    def work(held: Blocks, carry: None) -> tuple[tuple[Array, ...], None]:
        return tuple(y.astype(x.dtype) for y in local.forward(experts, kernels, held)), carry

    with jax.named_scope("expert_mlp"):
        ys, _ = _for_all_devices(experts, ring, blocks, None, work)
    return lax.concatenate(ys, 0)


def _multiply_fwd(
    experts: Experts, ring: Ring | Exchange, x: Array, ids: Array, weights: Array, kernels: Weights
) -> tuple[Array, Any]:
    operands = _first_derivative_only(x, ids, weights, kernels)
    return checkpoint_name(multiply(experts, ring, *operands), PRODUCT), operands


def _multiply_bwd(
    experts: Experts, ring: Ring | Exchange, saved: PyTree, dy: Array
) -> tuple[Array, None, Array, Weights]:
    x, ids, weights, kernels, dy = _first_derivative_only(*saved, dy)
    blocks, places = _blocks(experts, ring, x, ids, weights, dy)

    def work(held: Blocks, sums: Sums) -> tuple[tuple[BlockGradients, ...], Sums]:
        found, sums = local.backward(experts, kernels, held, sums)
        # A body of a loop must begin with nothing kept if it ends so.
        if isinstance(ring, Ring) and ring.unroll % 2:
            sums = local.added_up(experts, kernels, sums)
        return tuple(one._replace(dx=one.dx.astype(x.dtype)) for one in found), sums

    with jax.named_scope("expert_mlp_gradient"):
        found, sums = _for_all_devices(experts, ring, blocks, Sums(), work)
        gradients = local.added_up(experts, kernels, sums).gradients
    dweights = [
        unsort(
            one.dweights, place, (one.dx.shape[0], ids.shape[1]), dropless=experts.capacity is None
        )
        for one, place in zip(found, places, strict=True)
    ]
    dkernels = jax.tree.map(
        lambda gradient, kernel: gradient.astype(kernel.dtype), gradients, kernels
    )
    dweight = lax.concatenate(dweights, 0).astype(weights.dtype)
    return lax.concatenate([one.dx for one in found], 0), None, dweight, dkernels


multiply.defvjp(_multiply_fwd, _multiply_bwd)


def _blocks(
    experts: Experts,
    ring: Ring | Exchange,
    x: Array,
    ids: Array,
    weights: Array,
    dy: Array | None = None,
) -> tuple[Blocks, list[Array]]:
    """Returns this device's half-blocks, or its whole block, and the places of their assignments in
    `ids`.
    """
    blocks = []
    places = []
    for start, rows in split_rows(x.shape[0], len(block_shifts(ring, x.shape[0]))):
        mine = slice(start, start + rows)
        found, place = sort(
            ids[mine],
            weights[mine],
            experts.count,
            parts=experts.parts,
            capacity=experts.capacity,
            tile_rows=experts.tile_rows,
        )
        blocks.append(ExpertBlock(x[mine], found, None if dy is None else dy[mine]))
        places.append(place)
    return tuple(blocks), places


def block_shifts(ring: Ring | Exchange, rows: int) -> tuple[int, ...]:
    """Returns the shift of each half-block of a device with so many rows, or of its whole block."""
    if isinstance(ring, Exchange):
        return (1,)
    if ring.transport is None or lax.axis_size(ring.axis_name) == 1:
        return (1,)
    return shifts(ring.directions, rows)


def _for_all_devices(
    experts: Experts, ring: Ring | Exchange, blocks: Blocks, carry: PyTree, work: Work
) -> tuple[tuple[Any, ...], Any]:
    """Returns the sum of what all devices make of each of this device's blocks, and the carry of
    this device's work.
    """
    size = lax.axis_size(ring.axis_name)
    if size == 1:
        return work(blocks, carry)
    if isinstance(ring, Exchange):
        (block,) = blocks
        result, carry = exchange(experts, ring, block, carry, work)
        return (result,), carry
    if ring.transport is None:
        (block,) = blocks
        gathered = lax.all_gather(block, ring.axis_name)
        found, carry = work(
            tuple(jax.tree.map(lambda leaf: leaf[i], gathered) for i in range(size)), carry
        )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
        return (jax.tree.map(lambda leaf: lax.psum_scatter(leaf, ring.axis_name), stacked),), carry
    _, features = blocks[0].x.shape
    dtype = blocks[0].x.dtype

    def packed(tree: PyTree) -> Array:
        return pack(tree, features, dtype)

    like_results = jax.eval_shape(lambda blocks: work(blocks, carry)[0], blocks)
    # by packed shape: halves can differ by a row
    like_of = {jax.eval_shape(packed, like).shape: like for like in like_results}

    def nothing(likes: tuple[Any, ...]) -> tuple[Array, ...]:
        return tuple(packed(jax.tree.map(jnp.zeros_like, like)) for like in likes)

    # Of its own blocks a device multiplies the first at hop 0, and the other one in `last`.
    def visit(hop: Index, held: tuple[Array, ...], carry: PyTree) -> tuple[tuple[Array, ...], Any]:
        unpacked = tuple(map(unpack, held, blocks))
        if isinstance(hop, int) and hop == 0:
            (first,), carry = work(unpacked[:1], carry)
            return (packed(first), *nothing(like_results[1:])), carry
        found, carry = work(unpacked, carry)
        return tuple(map(packed, found)), carry

    def last(carry: PyTree) -> tuple[tuple[Array, ...], Any]:
        found: tuple[Any, ...] = ()
        if blocks[1:]:
            found, carry = work(blocks[1:], carry)
        return (*nothing(like_results[:1]), *map(packed, found)), carry

    def add(arrived: Array, addend: Array) -> Array:
        like = like_of[arrived.shape]
        return packed(_add(unpack(arrived, like), unpack(addend, like)))

    sums, carry = ring_visit(
        ring,
        tuple(map(packed, blocks)),
        carry,
        visit,
        last,
        add=add,
        shifts=block_shifts(ring, sum(b.x.shape[0] for b in blocks)),
        hops=size - 1,
    )
    return tuple(map(unpack, sums, like_results)), carry


def _add(arrived: PyTree, addend: PyTree) -> Any:
    """Adds what a device made of a block to the sum that arrived, each pair in the dtype that
    accumulates.
    """

    def add(a: Array, b: Array) -> Array:
        wide = accumulator_dtype(a)
        return (a.astype(wide) + b.astype(wide)).astype(a.dtype)

    return jax.tree.map(add, arrived, addend)
