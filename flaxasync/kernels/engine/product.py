"""The product of two tiles, and its float32 accumulation over the tiles of a contraction.

Three forms of one step keep passes over the accumulator to a minimum: the first product is stored, so that nothing has
to be cleared; the middle ones are added; the last one is finished (rounded and put where it leaves from) by its own
code and is never written back to the accumulator.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flaxasync.kernels.engine.refs import Condition, Ref, Scalar
from flaxasync.kernels.engine.tiling import Tiling


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The order in which the contraction of one tile of a result is gone through.

    Attributes:
      tiles: the tiles of the contraction.
      repeats: how many times all of them are gone through, once for every block that arrives.
    """

    tiles: Tiling
    repeats: int = 1

    @property
    def steps(self) -> int:
        """Products of one tile of the result."""
        return self.tiles.count * self.repeats


def dot(x: jax.Array, w: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns x @ w, or x @ w.T, in float32."""
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(x, w, dimensions, preferred_element_type=jnp.float32)


def accumulate(
    contraction: Contraction,
    tile: Scalar,
    *,
    first: Condition,
    last: Condition,
    accumulator: Ref,
    for_each_sub_block: Callable[[Callable[..., None]], None],
    product: Callable[..., jax.Array],
    finish: Callable[..., None],
) -> None:
    """Adds the product of one tile of the contraction to the float32 sum of a tile of the result.

    A sub-block of the result is handed on as it comes from `for_each_sub_block`: (index, ...).

    Args:
      contraction: the steps of the sum.
      tile: this step's tile of the contraction, in `contraction.tiles`.
      first: whether this is the first step of the sum.
      last: whether this is the last one. Both hold if there is one step only.
      accumulator: [*tile of the result] VMEM, float32. It is not used if there is one step only.
      for_each_sub_block: calls its argument for each sub-block, in a loop of the kernel.
      product: product(elements of the tile of the contraction, *sub-block) returns the product, in float32. It reads
        its operands itself: values that cross a branch would be copied first.
      finish: finish(sum, *sub-block) puts a finished sum where it leaves from.
    """

    def store(depth: int) -> None:
        def one(index: Any, *rest: Any) -> None:
            accumulator[index] = product(depth, index, *rest)

        for_each_sub_block(one)

    def add(depth: int) -> None:
        def one(index: Any, *rest: Any) -> None:
            accumulator[index] += product(depth, index, *rest)

        for_each_sub_block(one)

    def end(depth: int) -> None:
        def one(index: Any, *rest: Any) -> None:
            value = product(depth, index, *rest)
            finish(value if contraction.steps == 1 else value + accumulator[index], index, *rest)

        for_each_sub_block(one)

    tiles, steps = contraction.tiles, contraction.steps
    if steps > 1:
        tiles.on_size(tile, store, among=[0], condition=first)
    if steps > 2:
        middle = range(tiles.count) if contraction.repeats > 1 else range(1, tiles.count - 1)
        tiles.on_size(tile, add, among=middle, condition=jnp.logical_not(jnp.logical_or(first, last)))
    tiles.on_size(tile, end, among=[tiles.count - 1], condition=last)
