"""Keeps compute between a start and its done.

XLA may run an operation at any time that its operands and users allow. Nothing connects the compute
of a window to the transfer that it is to hide, so XLA may move it: XLA merges two windows that
follow each other in straight-line code, and it computes a product that does not read the travelling
block before the transfer begins (docs/async.md). `tie` makes the connection for transfers that
kernels begin and end. XLA's own permute must stay unconnected: what its operand is tied to runs
before it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree


def tie(*values: PyTree) -> Any:
    """Returns a tuple of `values`, of which none is available before all of them are computed; or
    the only value.

    The values are pytrees of arrays and numbers, and go through a `lax.optimization_barrier`, but
    for arrays in the memory of the host, which libtpu refuses there.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(jax.numpy.asarray, values))
    on_device = [jax.typeof(leaf).memory_space != jax.memory.Space.Host for leaf in leaves]
    places = [place for place, here in enumerate(on_device) if here]
    behind = lax.optimization_barrier([leaves[place] for place in places])
    for place, leaf in zip(places, behind, strict=True):
        leaves[place] = leaf
    tied = jax.tree.unflatten(tree, leaves)
    if len(values) == 1:
        return tied[0]
    return tied


def while_travelling(x: PyTree, compute: Callable[..., Any], *operands: PyTree) -> tuple[Any, Any]:
    """Runs `compute(*operands)` between the start that returned `x` and the done that takes it.

    ```python
    x, future = fa.ppermute_start(x, "model")
    x, z = while_travelling(x, compute, a, b)
    y = fa.ppermute_done(x, future)
    ```

    A start made of a kernel runs before the compute, and its done after it. The permute of backend
    "xla" reads the x that its start was given, so it depends on nothing here, and XLA runs it
    beside the compute.

    Args:
      x: What the start returned.
      compute: A function of arrays. What it computes from arrays that it closes over may run before
        the transfer.
      *operands: Pytrees of arrays.

    Returns:
      `(x, z)`: the x to give to the done, and what `compute` returned.
    """
    x, operands = tie(x, operands)
    return tie(x, compute(*operands))
