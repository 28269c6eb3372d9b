"""What one device computes with its experts for the rows of some blocks: forward, and the gradient.

Rows are taken, multiplied and added some tiles at a time, in a loop of as many turns as there are
rows: no rows cost no time, and no buffer is larger for a routing that is not balanced. Backward, h
is computed again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from flaxasync.mesh import vary_like
from flaxasync.ops.experts.assignments import Assignments, Tiles, TilesOf
from flaxasync.ops.experts.products import Products, ToAdd, Weights
from flaxasync.ops.matmul.products import Arrays, accumulator_dtype
from flaxasync.ring import Index

type Split = Literal["experts", "hidden"]


@dataclasses.dataclass(frozen=True)
class Experts:
    """What is static in a call. Hashable."""

    axis_name: str
    split: Split  # what the devices share out: experts, or the hidden features of each
    count: int  # of all experts
    mean: int  # the rows of a device's block that choose an expert if all experts are chosen alike
    tile_rows: int
    # of the rows of a block, each with a capacity: 2, or 1 where a block has half of the rows of a
    # device
    parts: int
    capacity: int | None  # of each expert for one of these parts
    products: Products


class ExpertBlock(NamedTuple):
    """What travels: rows [n, D], their assignments and, backward, the cotangents of their outputs
    [n, D].
    """

    x: Array
    assignments: Assignments
    dy: Array | None = None


class BlockGradients(NamedTuple):
    """The gradients of a block: dx [n, D], and those of the weights in its tiles [T, t]."""

    dx: Array
    dweights: Array


class Sums(NamedTuple):
    """The gradients of the weights: what was added up, and what is kept until it can be added with
    more.
    """

    gradients: Weights | None = None  # None for zeros
    kept: ToAdd | None = None


def forward(experts: Experts, weights: Weights, blocks: tuple[ExpertBlock, ...]) -> Arrays:
    """Returns what the experts of this device make of each block, [n, D], in its dtype or that
    which accumulates.
    """
    sizes = tuple(block.x.shape[0] for block in blocks)
    x = lax.concatenate([b.x for b in blocks], 0)

    def add(tiles: Tiles, count: Array, y: Array | None) -> Array:
        return experts.products.forward(y, x, weights, tiles, count)

    y = _for_each(experts, weights, blocks, add, None, jnp.zeros(x.shape, accumulator_dtype(x)))
    return tuple(lax.split(y, sizes, axis=0))


def backward(
    experts: Experts, weights: Weights, blocks: tuple[ExpertBlock, ...], sums: Sums
) -> tuple[tuple[BlockGradients, ...], Sums]:
    """Returns the gradients of each block, and adds those of the weights to `sums`.

    Where many tiles are multiplied at once, every other call keeps what it found for the next one,
    so that gradients are read and written half as often. `added_up` adds what is kept at the end.
    """
    sizes = tuple(b.x.shape[0] for b in blocks)
    places = tuple(b.assignments.rows.shape[0] for b in blocks)
    x = lax.concatenate([b.x for b in blocks], 0)
    dy = lax.concatenate([b.dy for b in blocks if b.dy is not None], 0)

    def add(tiles: Tiles, count: Array, carry: PyTree) -> tuple[Array, Array, Sums]:
        dx, dweights, sums = carry
        is_in_loop = dx is not None
        dx, dweight, found = experts.products.backward(dx, x, dy, weights, tiles, count)
        sums = _taken(experts, weights, sums, found, in_loop=is_in_loop)
        dweight = dweight.reshape(-1, experts.tile_rows).astype(dweights.dtype)
        return dx, dweights.at[tiles.places].set(dweight, mode="drop"), sums

    wide = accumulator_dtype(x)
    dweights = jnp.zeros((sum(places), experts.tile_rows), wide)
    zeros = (
        jnp.zeros(x.shape, wide),
        dweights,
        sums if sums.gradients else Sums(_no_gradients(weights)),
    )
    dx, dweights, sums = _for_each(experts, weights, blocks, add, (None, dweights, sums), zeros)
    parts = zip(lax.split(dx, sizes, axis=0), lax.split(dweights, places, axis=0), strict=True)
    return tuple(BlockGradients(*part) for part in parts), sums


def _taken(experts: Experts, weights: Weights, sums: Sums, found: ToAdd, *, in_loop: bool) -> Sums:
    """Adds what one call found, or keeps it until the next call.

    The carry of a loop keeps its structure, so what was kept before it stays. The first call of all
    writes gradients without reading any.
    """
    if in_loop:
        return _plus(experts, weights, Sums(sums.gradients), found)._replace(kept=sums.kept)
    if sums.gradients is not None and sums.kept is None:
        return sums._replace(kept=found)
    return _plus(experts, weights, sums, found)


def added_up(experts: Experts, weights: Weights, sums: Sums) -> Sums:
    """Returns the sums with what was kept added."""
    if sums.kept:
        return _plus(experts, weights, sums)
    return sums


def _plus(experts: Experts, weights: Weights, sums: Sums, *found: ToAdd) -> Sums:
    if sums.kept:
        found = (sums.kept, *found)
    return Sums(experts.products.add(sums.gradients, found, weights.down.shape[0]))


def _no_gradients(weights: Weights) -> Weights:
    """Returns zeros in which gradients are added up."""
    return jax.tree.map(lambda w: vary_like(jnp.zeros(w.shape, accumulator_dtype(w)), w), weights)


def _for_each(
    experts: Experts,
    weights: Weights,
    blocks: tuple[ExpertBlock, ...],
    add: Callable[[Tiles, Array, PyTree], PyTree],
    begin: PyTree,
    zeros: PyTree,
) -> Any:
    """Calls add(tiles, count of those with rows, carry) with some tiles after the other, and
    returns the carry.

    Where many tiles are multiplied at once, the first call is before the loop, which is then rarely
    entered, and has the carry `begin`, in which None stands for zeros that are never stored.
    """
    local = weights.down.shape[0]
    sizes = tuple(block.x.shape[0] for block in blocks)
    first: Index = lax.axis_index(experts.axis_name) * local if experts.split == "experts" else 0
    tiles_of = TilesOf(tuple(block.assignments for block in blocks), first, local, sizes)
    some = experts.products.tiles(experts.mean, len(sizes), local, experts.tile_rows)
    several = some > 1  # whether the products take several tiles in a call, or one alone
    if experts.capacity is not None:
        most = local * sum(
            -(-min(experts.parts * experts.capacity, size) // experts.tile_rows) for size in sizes
        )
        # few more tiles than are expected spare a loop
        if several and most <= 2 * some:
            some = most

    def turn(number: Array, carry: PyTree) -> Any:
        start = number * some
        return add(tiles_of.take(start, some), jnp.clip(tiles_of.count - start, 0, some), carry)

    if experts.capacity is not None and several and some == most:
        return add(tiles_of.take(0, some), tiles_of.count, begin)  # there cannot be more
    if several:
        carry = turn(jnp.int32(0), begin)
        done = 1
    else:
        carry = vary_like(zeros, weights, blocks)
        done = 0
    return lax.fori_loop(done, -(-tiles_of.count // some), turn, carry)
