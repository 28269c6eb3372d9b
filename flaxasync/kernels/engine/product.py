"""The product of two tiles, and its float32 accumulation over the tiles of a contraction.

Three forms of one step keep passes over the accumulator to a minimum: the first product is stored, so that nothing has
to be cleared; the middle ones are added; the last one is finished (rounded and put where it leaves from) by its own
code and is never written back to the accumulator.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flaxasync.kernels.engine.refs import Condition, Ref, Scalar
from flaxasync.kernels.engine.tiling import Tiling


def dot(x: jax.Array, w: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns x @ w, or x @ w.T, in float32."""
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(x, w, dimensions, preferred_element_type=jnp.float32)


def accumulate(
    tiles: Tiling,
    tile: Scalar,
    *,
    repeats: int = 1,
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
      tiles: the tiles of the contraction.
      tile: the tile of this step.
      repeats: how many times all tiles are gone through, once for every block that arrives.
      first, last: whether this is the first or the last step of the sum. Both hold if there is one step only.
      accumulator: [*tile of the result] VMEM, float32. It is not used if there is one step only.
      for_each_sub_block: calls its argument for each sub-block, in a loop of the kernel.
      product: product(elements of the tile of the contraction, *sub-block) returns the product, in float32. It reads
        its operands itself: values that cross a branch would be copied first.
      finish: finish(sum, *sub-block) puts a finished sum where it leaves from.
    """
    steps = tiles.count * repeats

    def store(depth: int, index: Any, *rest: Any) -> None:
        accumulator[index] = product(depth, index, *rest)

    def add(depth: int, index: Any, *rest: Any) -> None:
        accumulator[index] += product(depth, index, *rest)

    def end(depth: int, index: Any, *rest: Any) -> None:
        value = product(depth, index, *rest)
        finish(value if steps == 1 else value + accumulator[index], index, *rest)

    def do(use: Callable[..., None], among: Sequence[int], condition: Condition) -> None:
        tiles.on_size(tile, lambda depth: for_each_sub_block(functools.partial(use, depth)), among, condition)

    if steps > 1:
        do(store, [0], first)
    if steps > 2:
        middle = range(tiles.count) if repeats > 1 else range(1, tiles.count - 1)
        do(add, middle, jnp.logical_not(jnp.logical_or(first, last)))
    do(end, [tiles.count - 1], last)
