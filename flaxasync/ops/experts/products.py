"""What multiplies rows with the weights of their experts: JAX's products one tile at a time, or
Pallas kernels.

```
forward    h    = act(rows @ gate) * (rows @ up)                       rows [c * t, D] of c tiles
           y   += weight * (h @ down)                                  each row where it came from
backward   dh   = dys @ down.T,   dweight = sum(h * dh)                dys: rows of dy, not yet weighted
           dx  += weight * (dgate @ gate.T + dup @ up.T)               dgate, dup: gradients of h for dh
           dgate_w, dup_w += (weight * rows).T @ (dgate, dup),   ddown += h.T @ (weight * dys)
```
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.add_rows import add_rows
from flaxasync.kernels.engine.operands import LANES
from flaxasync.kernels.grouped_matmul import grouped_matmul
from flaxasync.kernels.grouped_weight_gradient import Factors, grouped_weight_gradient
from flaxasync.ops.experts.assignments import Tiles
from flaxasync.ops.matmul.activation import Activation, activate
from flaxasync.ops.matmul.mlp import Activate, ActivateGradient
from flaxasync.ops.matmul.products import (
    Arrays,
    accumulator_dtype,
    dot,
    sum_of_products,
    weight_gradient,
)


class Weights(NamedTuple):
    """The weights of the experts of a device, e of them or a part of all; or their gradients."""

    columns: Arrays  # up, and gate if there is one: [e, D, F]
    down: Array  # [e, F, D]


class ToAdd(NamedTuple):
    """What is still to be multiplied and added to gradients."""

    columns: Factors  # weighted rows, and the gradients of each product of them
    down: Factors  # h, and weighted rows of dy


class Products(Protocol):
    """What multiplies some tiles at a time. Hashable. The first `count` of the tiles have rows;
    others get anything.
    """

    def tiles(self, mean: int, blocks: int, experts: int, tile_rows: int) -> int:
        """Returns how many tiles to multiply at once, where each expert has `mean` rows of each
        block on average.
        """

    def forward(
        self, y: Array | None, x: Array, weights: Weights, tiles: Tiles, count: Array
    ) -> Array:
        """Adds to y [n, D], from zeros if it is None, what the experts make of x [n, D]."""

    def backward(
        self, dx: Array | None, x: Array, dy: Array, weights: Weights, tiles: Tiles, count: Array
    ) -> tuple[Array, Array, ToAdd]:
        """Adds to dx as `forward` does to y; returns it, dweight of every row of the tiles, and
        what gradients take.
        """

    def add(self, gradients: Weights | None, found: Sequence[ToAdd], experts: int) -> Weights:
        """Adds to the gradients of a device's experts, from zeros if they are None."""

    def add_rows(self, y: Array, values: Array, rows: Array) -> Array:
        """Returns y [n, D] with each of the values [m, D] added to the row that it names; none
        where that is n.
        """


@dataclasses.dataclass(frozen=True)
class OneTile:
    """JAX's products, on every device."""

    activation: Activation
    precision: lax.PrecisionLike = None

    def tiles(self, mean: int, blocks: int, experts: int, tile_rows: int) -> int:
        return 1

    def forward(
        self, y: Array | None, x: Array, weights: Weights, tiles: Tiles, count: Array
    ) -> Array:
        rows = _take(x, tiles)
        weights = _of_expert(weights, tiles)
        h = activate(self.activation, tuple(dot(rows, w, self.precision) for w in weights.columns))
        out = dot(h.astype(rows.dtype), weights.down, self.precision)
        return _add(y, x, tiles, out)

    def backward(
        self, dx: Array | None, x: Array, dy: Array, weights: Weights, tiles: Tiles, count: Array
    ) -> tuple[Array, Array, ToAdd]:
        rows = _take(x, tiles)
        dys = _take(dy, tiles)
        weights = _of_expert(weights, tiles)
        wholes = tuple(dot(rows, w, self.precision) for w in weights.columns)
        h, pull = jax.vjp(lambda wholes: activate(self.activation, wholes), wholes)
        dh = dot(dys, weights.down, self.precision, transposed=True)
        dwholes = tuple(d.astype(rows.dtype) for d in pull(dh)[0])
        drows = sum_of_products(dwholes, weights.columns, self.precision, transposed=True)
        found = _to_add(rows, dwholes, h.astype(rows.dtype), dys, tiles, count)
        return _add(dx, x, tiles, drows), jnp.sum(h * dh, axis=-1), found

    def add(self, gradients: Weights | None, found: Sequence[ToAdd], experts: int) -> Weights:
        assert gradients is not None  # tiles are added in a loop, whose carry begins with zeros
        for one in found:
            columns, down = (
                tuple(weight_gradient(side.x, dy, self.precision) for dy in side.dys)
                for side in (one.columns, one.down)
            )
            expert = one.down.experts[0]
            new = Weights(columns, *down)
            gradients = jax.tree.map(
                lambda sums, new, expert=expert: sums.at[expert].add(new), gradients, new
            )
        return gradients

    def add_rows(self, y: Array, values: Array, rows: Array) -> Array:
        wide = accumulator_dtype(y)
        return y.astype(wide).at[rows].add(values.astype(wide), mode="drop").astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Pallas TPU kernels, which multiply many tiles at once, and add rows in vector memory. They
    need a gate.
    """

    activation: Activation

    def tiles(self, mean: int, blocks: int, experts: int, tile_rows: int) -> int:
        """Returns as many as rows have that are spread evenly, and half a tile more for each expert
        and block.
        """
        return -(-mean // tile_rows) * blocks * experts + max(1, blocks * experts // 2)

    def forward(
        self, y: Array | None, x: Array, weights: Weights, tiles: Tiles, count: Array
    ) -> Array:
        t = tiles.rows.size // tiles.experts.size
        epilogue = Activate(self.activation, 0)
        (h,) = grouped_matmul(
            (_take(x, tiles),),
            weights.columns,
            tiles.experts,
            count,
            tile_rows=t,
            epilogue=epilogue,
        )
        (out,) = grouped_matmul((h,), (weights.down,), tiles.experts, count, tile_rows=t)
        return self._add(y, x, tiles, count, out)

    def backward(
        self, dx: Array | None, x: Array, dy: Array, weights: Weights, tiles: Tiles, count: Array
    ) -> tuple[Array, Array, ToAdd]:
        rows = _take(x, tiles)
        dys = _take(dy, tiles)
        t = tiles.rows.size // tiles.experts.size
        up, gate = grouped_matmul((rows,), weights.columns, tiles.experts, count, tile_rows=t)
        dup, dgate, h = grouped_matmul(
            (dys,),
            (weights.down,),
            tiles.experts,
            count,
            tile_rows=t,
            transposed=True,
            epilogue=ActivateGradient(self.activation, 2),
            operands=(up, gate),
        )
        (drows,) = grouped_matmul(
            (dup, dgate), weights.columns, tiles.experts, count, tile_rows=t, transposed=True
        )
        # as h * dh, because h is act * up
        dweight = jnp.sum(up.astype(jnp.float32) * dup.astype(jnp.float32), axis=-1)
        return (
            self._add(dx, x, tiles, count, drows),
            dweight,
            _to_add(rows, (dup, dgate), h, dys, tiles, count),
        )

    def add(self, gradients: Weights | None, found: Sequence[ToAdd], experts: int) -> Weights:
        initial = ((), ()) if gradients is None else (gradients.columns, (gradients.down,))
        tile_rows = found[0].down.x.shape[0] // found[0].down.experts.size
        columns, down = (
            grouped_weight_gradient(sides, experts, tile_rows=tile_rows, initial=old)
            for sides, old in zip(zip(*found, strict=True), initial, strict=True)
        )
        return Weights(columns, *down)

    def add_rows(self, y: Array, values: Array, rows: Array) -> Array:
        rows = rows.reshape(-1, LANES)
        return _sum(
            y,
            add_rows(values, rows, jnp.ones(rows.shape, jnp.float32), rows.shape[0], n=y.shape[0]),
        )

    def _add(self, y: Array | None, x: Array, tiles: Tiles, count: Array, out: Array) -> Array:
        shape = tiles.experts.size, -1
        new = add_rows(
            out, tiles.rows.reshape(shape), tiles.weights.reshape(shape), count, n=x.shape[0]
        )
        if y is None:
            return new
        return _sum(y, new)


def _of_expert(weights: Weights, tiles: Tiles) -> Weights:
    return jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, tiles.experts[0], keepdims=False), weights
    )


def _take(x: Array, tiles: Tiles) -> Array:
    """Returns the rows of the tiles, zeros for padding."""
    return x.at[tiles.rows].get(mode="fill", fill_value=0)


def _to_add(
    rows: Array, dwholes: Arrays, h: Array, dys: Array, tiles: Tiles, count: Array
) -> ToAdd:
    return ToAdd(
        Factors(_weighted(rows, tiles), dwholes, tiles.experts, count),
        Factors(h, (_weighted(dys, tiles),), tiles.experts, count),
    )


def _weighted(rows: Array, tiles: Tiles) -> Array:
    return (rows.astype(tiles.weights.dtype) * tiles.weights[:, None]).astype(rows.dtype)


def _sum(y: Array, new: Array) -> Array:
    return (y.astype(jnp.float32) + new.astype(jnp.float32)).astype(y.dtype)


def _add(y: Array | None, x: Array, tiles: Tiles, rows: Array) -> Array:
    if y is None:
        y = jnp.zeros(x.shape, accumulator_dtype(x))
    return y.at[tiles.rows].add(rows * tiles.weights.astype(rows.dtype)[:, None], mode="drop")
