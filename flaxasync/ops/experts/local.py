"""What one device computes with its experts for the rows of some blocks: forward, and the gradient.

```
h    = act(rows @ gate) * (rows @ up)      rows [t, D] of x that chose an expert, gate and up [D, F], down [F, D]
y   += weight * (h @ down)                 added to the rows that they came from
```

Rows are taken, multiplied and added some tiles at a time, in a loop of as many turns as there are rows: no rows cost no
time, and no buffer is larger for a routing that is not balanced. Backward, h is computed again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.mesh import cast_to_varying
from flaxasync.ops.experts.assignments import Assignments, Tiles, TilesOf
from flaxasync.ops.matmul.mlp import Activation, activate
from flaxasync.ops.matmul.products import Arrays, accumulator_dtype, dot, weight_gradient
from flaxasync.ring import Index

type Split = Literal["experts", "hidden"]


class Weights(NamedTuple):
    """The weights of the experts of a device, e of them or a part of all."""

    columns: Arrays  # up, and gate if there is one: [e, D, F]
    down: Array  # [e, F, D]


class Products(Protocol):
    """The products of some tiles of rows, each with the weights of its expert. Hashable."""

    @property
    def tiles(self) -> int:
        """How many tiles are multiplied at once."""
        ...

    def multiply(self, xs: Arrays, ws: Arrays, tiles: Tiles, count: Array, *, transposed: bool = False) -> Arrays:
        """Returns x @ w of each pair, or x @ w.T, for x [c * t, k] and w [e, k, n], in the dtype that accumulates.

        The first `count` tiles have rows. Those of the others are not read, and get anything.
        """
        ...

    def add_weight_gradients(self, dws: Arrays, xs: Arrays, dys: Arrays, tiles: Tiles, count: Array) -> Arrays:
        """Returns dws [e, k, n] plus x.T @ dy of each tile in the place of its expert."""
        ...


@dataclasses.dataclass(frozen=True)
class OneTile:
    """Multiplies one tile at a time by JAX's product, on every device."""

    precision: lax.PrecisionLike = None
    tiles: int = 1

    def multiply(self, xs: Arrays, ws: Arrays, tiles: Tiles, count: Array, *, transposed: bool = False) -> Arrays:
        expert = tiles.experts[0]
        chosen = (lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in ws)
        return tuple(dot(x, w, self.precision, transposed=transposed) for x, w in zip(xs, chosen, strict=True))

    def add_weight_gradients(self, dws: Arrays, xs: Arrays, dys: Arrays, tiles: Tiles, count: Array) -> Arrays:
        return tuple(
            dw.at[tiles.experts[0]].add(weight_gradient(x, dy, self.precision))
            for dw, x, dy in zip(dws, xs, dys, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Experts:
    """What is static in a call. Hashable."""

    axis_name: str
    split: Split  # what the devices share out: experts, or the hidden features of each
    activation: Activation
    count: int  # of all experts
    tile_rows: int
    capacity: int | None
    products: Products


class Block(NamedTuple):
    """What travels: rows [n, D], their assignments and, backward, the cotangents of their outputs [n, D]."""

    x: Array
    assignments: Assignments
    dy: Array | None = None


class BlockGradients(NamedTuple):
    """The gradients of a block: dx [n, D], and those of the weights in the order of its assignments [n * k + t]."""

    dx: Array
    dweights: Array


def forward(experts: Experts, weights: Weights, blocks: tuple[Block, ...]) -> Arrays:
    """Returns what the experts of this device make of each block, [n, D], in the dtype that accumulates."""
    sizes = tuple(block.x.shape[0] for block in blocks)
    x, tiles_of = _joined([b.x for b in blocks]), _tiles_of(experts, weights, blocks)

    def add(tiles: Tiles, count: Array, y: Array) -> Array:
        rows = _take(x, tiles)
        products = experts.products.multiply((rows,) * len(weights.columns), weights.columns, tiles, count)
        h = activate(experts.activation, products).astype(x.dtype)
        (out,) = experts.products.multiply((h,), (weights.down,), tiles, count)
        return _add(y, tiles, out * tiles.weights.astype(out.dtype)[:, None])

    zeros = jnp.zeros(x.shape, accumulator_dtype(x))
    return tuple(lax.split(_for_each(experts, tiles_of, add, zeros, (blocks, weights)), sizes, axis=0))


def backward(
    experts: Experts, weights: Weights, blocks: tuple[Block, ...], gradients: Weights
) -> tuple[tuple[BlockGradients, ...], Weights]:
    """Returns the gradients of each block, and adds those of the weights to `gradients`."""
    sizes = tuple(block.x.shape[0] for block in blocks)
    x, dy = _joined([b.x for b in blocks]), _joined([b.dy for b in blocks if b.dy is not None])
    tiles_of, places = _tiles_of(experts, weights, blocks), [b.assignments.rows.size for b in blocks]
    products = experts.products

    def add(tiles: Tiles, count: Array, carry: Any) -> Any:
        dx, dweights, columns, down = carry
        rows, dys, weight = _take(x, tiles), _take(dy, tiles), tiles.weights.astype(dx.dtype)[:, None]
        wholes = products.multiply((rows,) * len(weights.columns), weights.columns, tiles, count)
        h, pull = jax.vjp(lambda wholes: activate(experts.activation, wholes), wholes)
        (dh,) = products.multiply((dys,), (weights.down,), tiles, count, transposed=True)
        dweight = jnp.where(tiles.valid, jnp.sum(h * dh, axis=-1), 0)
        dweights = _add_windows(dweights, dweight, tiles, places, experts.tile_rows)
        (dwholes,) = pull((dh * weight).astype(h.dtype))
        dwholes = tuple(d.astype(x.dtype) for d in dwholes)
        parts = products.multiply(dwholes, weights.columns, tiles, count, transposed=True)
        dx = _add(dx, tiles, functools.reduce(jnp.add, parts))
        (down,) = products.add_weight_gradients(
            (down,), (h.astype(x.dtype),), ((dys * weight).astype(x.dtype),), tiles, count
        )
        columns = products.add_weight_gradients(columns, (rows,) * len(columns), dwholes, tiles, count)
        return dx, dweights, columns, down

    wide = accumulator_dtype(x)
    zeros = jnp.zeros(x.shape, wide), jnp.zeros(sum(places), wide), *gradients
    dx, dweights, columns, down = _for_each(experts, tiles_of, add, zeros, (blocks, weights))
    parts = zip(lax.split(dx, sizes, axis=0), lax.split(dweights, places, axis=0), strict=True)
    return tuple(BlockGradients(*part) for part in parts), Weights(columns, down)


def no_gradients(weights: Weights) -> Weights:
    """Returns zeros in which gradients are added up."""
    return jax.tree.map(
        lambda w: cast_to_varying(jnp.zeros(w.shape, accumulator_dtype(w)), jax.typeof(w).mat.varying), weights
    )


def _tiles_of(experts: Experts, weights: Weights, blocks: tuple[Block, ...]) -> TilesOf:
    local = weights.down.shape[0]
    first: Index = lax.axis_index(experts.axis_name) * local if experts.split == "experts" else 0
    sizes = tuple(block.x.shape[0] for block in blocks)
    return TilesOf(tuple(block.assignments for block in blocks), first, local, sizes, experts.tile_rows)


def _for_each(
    experts: Experts, tiles_of: TilesOf, add: Callable[[Tiles, Array, Any], Any], zeros: Any, like: Any
) -> Any:
    """Calls add(tiles, count of those with rows, carry) with some tiles after the other, and returns the carry."""
    some = experts.products.tiles
    varying = frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(like)))

    def turn(number: Array, carry: Any) -> Any:
        start = number * some
        return add(tiles_of.take(start, some), jnp.minimum(tiles_of.count - start, some), carry)

    zeros = jax.tree.map(lambda leaf: cast_to_varying(leaf, varying), zeros)
    return lax.fori_loop(0, -(-tiles_of.count // some), turn, zeros)


def _joined(xs: list[Array]) -> Array:
    return xs[0] if len(xs) == 1 else lax.concatenate(xs, 0)


def _take(x: Array, tiles: Tiles) -> Array:
    """Returns the rows of the tiles, zeros for padding."""
    return x.at[tiles.rows].get(mode="fill", fill_value=0)


def _add(y: Array, tiles: Tiles, rows: Array) -> Array:
    return y.at[tiles.rows].add(rows, mode="drop")


def _add_windows(dweights: Array, values: Array, tiles: Tiles, places: list[int], tile_rows: int) -> Array:
    """Adds the gradient of each tile's weights at the place of its first assignment."""
    offsets = jnp.array([sum(places[:part]) for part in range(len(places))], jnp.int32)
    start = offsets[tiles.block] + tiles.first
    index = start[:, None] + jnp.arange(tile_rows, dtype=jnp.int32)
    return dweights.at[jnp.where(tiles.valid, index.reshape(-1), dweights.size)].add(values, mode="drop")
