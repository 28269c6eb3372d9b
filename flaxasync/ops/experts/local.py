"""What one device computes with its experts for the rows of some blocks: forward, and the gradient.

```
h    = act(rows @ gate) * (rows @ up)      rows [t, D] of x that chose an expert, gate and up [D, F], down [F, D]
y   += weight * (h @ down)                 added to the rows that they came from
```

Rows are taken, multiplied and added some tiles at a time, in a loop of as many turns as there are rows: no rows cost no
time, and no buffer is larger for a routing that is not balanced. Backward, h is computed again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.mesh import cast_to_varying
from flaxasync.ops.experts.assignments import Assignments, Tiles, TilesOf
from flaxasync.ops.matmul.mlp import Activation, activate
from flaxasync.ops.matmul.products import Arrays, accumulator_dtype, dot, sum_of_products, weight_gradient
from flaxasync.ring import Index

type Split = Literal["experts", "hidden"]


class Weights(NamedTuple):
    """The weights of the experts of a device, e of them or a part of all."""

    columns: Arrays  # up, and gate if there is one: [e, D, F]
    down: Array  # [e, F, D]


class Products(Protocol):
    """What multiplies some tiles of rows, each with the weights of its expert. Hashable."""

    @property
    def tiles(self) -> int:
        """How many tiles are multiplied at once."""
        ...

    def forward(self, rows: Array, weights: Weights, activation: Activation, tiles: Tiles, count: Array) -> Array:
        """Returns h @ down for rows [c * t, D]. The first `count` tiles have rows; those of the others get anything."""
        ...

    def backward(
        self, rows: Array, dys: Array, weights: Weights, activation: Activation, tiles: Tiles, count: Array,
        gradients: Weights,
    ) -> tuple[Array, Array, Weights]:  # fmt: skip
        """Returns the gradients of rows and of the weights in `tiles`, and adds those of the experts to `gradients`.

        `dys` are the cotangents of the outputs of the rows, before these are multiplied with their weights.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OneTile:
    """Multiplies one tile at a time by JAX's product, on every device."""

    precision: lax.PrecisionLike = None
    tiles: int = 1

    def forward(self, rows: Array, weights: Weights, activation: Activation, tiles: Tiles, count: Array) -> Array:
        weights = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, tiles.experts[0], keepdims=False), weights)
        h = activate(activation, tuple(dot(rows, w, self.precision) for w in weights.columns))
        return dot(h.astype(rows.dtype), weights.down, self.precision)

    def backward(
        self, rows: Array, dys: Array, weights: Weights, activation: Activation, tiles: Tiles, count: Array,
        gradients: Weights,
    ) -> tuple[Array, Array, Weights]:  # fmt: skip
        expert, weight = tiles.experts[0], tiles.weights[:, None]
        weights = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), weights)
        wholes = tuple(dot(rows, w, self.precision) for w in weights.columns)
        h, pull = jax.vjp(lambda wholes: activate(activation, wholes), wholes)
        dh = dot(dys, weights.down, self.precision, transposed=True)
        (dwholes,) = pull((dh * weight.astype(dh.dtype)).astype(h.dtype))
        dwholes = tuple(d.astype(rows.dtype) for d in dwholes)
        down = weight_gradient(h.astype(rows.dtype), (dys * weight.astype(dys.dtype)), self.precision)
        columns = tuple(weight_gradient(rows, d, self.precision) for d in dwholes)
        gradients = jax.tree.map(lambda sums, new: sums.at[expert].add(new), gradients, Weights(columns, down))
        dx = sum_of_products(dwholes, weights.columns, self.precision, transposed=True)
        return dx, jnp.sum(h * dh, axis=-1), gradients


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
    """The gradients of a block: dx [n, D], and those of the weights in its tiles [T, t]."""

    dx: Array
    dweights: Array


def forward(experts: Experts, weights: Weights, blocks: tuple[Block, ...]) -> Arrays:
    """Returns what the experts of this device make of each block, [n, D], in the dtype that accumulates."""
    sizes = tuple(block.x.shape[0] for block in blocks)
    x, tiles_of = _joined([b.x for b in blocks]), _tiles_of(experts, weights, blocks)

    def add(tiles: Tiles, count: Array, y: Array) -> Array:
        out = experts.products.forward(_take(x, tiles), weights, experts.activation, tiles, count)
        return _add(y, tiles, out * tiles.weights.astype(out.dtype)[:, None])

    zeros = jnp.zeros(x.shape, accumulator_dtype(x))
    return tuple(lax.split(_for_each(experts, tiles_of, add, zeros, (blocks, weights)), sizes, axis=0))


def backward(
    experts: Experts, weights: Weights, blocks: tuple[Block, ...], gradients: Weights
) -> tuple[tuple[BlockGradients, ...], Weights]:
    """Returns the gradients of each block, and adds those of the weights to `gradients`."""
    sizes, places = tuple(b.x.shape[0] for b in blocks), tuple(b.assignments.rows.shape[0] for b in blocks)
    x, dy = _joined([b.x for b in blocks]), _joined([b.dy for b in blocks if b.dy is not None])
    tiles_of = _tiles_of(experts, weights, blocks)

    def add(tiles: Tiles, count: Array, carry: tuple[Array, Array, Weights]) -> tuple[Array, Array, Weights]:
        dx, dweights, gradients = carry
        drows, dweight, gradients = experts.products.backward(
            _take(x, tiles), _take(dy, tiles), weights, experts.activation, tiles, count, gradients
        )
        found = dweight.reshape(-1, experts.tile_rows).astype(dweights.dtype)
        return _add(dx, tiles, drows), dweights.at[tiles.places].set(found, mode="drop"), gradients

    wide = accumulator_dtype(x)
    zeros = jnp.zeros(x.shape, wide), jnp.zeros((sum(places), experts.tile_rows), wide), gradients
    dx, dweights, gradients = _for_each(experts, tiles_of, add, zeros, (blocks, weights))
    parts = zip(lax.split(dx, sizes, axis=0), lax.split(dweights, places, axis=0), strict=True)
    return tuple(BlockGradients(*part) for part in parts), gradients


def no_gradients(weights: Weights) -> Weights:
    """Returns zeros in which gradients are added up."""
    return jax.tree.map(
        lambda w: cast_to_varying(jnp.zeros(w.shape, accumulator_dtype(w)), jax.typeof(w).mat.varying), weights
    )


def _tiles_of(experts: Experts, weights: Weights, blocks: tuple[Block, ...]) -> TilesOf:
    local = weights.down.shape[0]
    first: Index = lax.axis_index(experts.axis_name) * local if experts.split == "experts" else 0
    sizes = tuple(block.x.shape[0] for block in blocks)
    return TilesOf(tuple(block.assignments for block in blocks), first, local, sizes)


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
