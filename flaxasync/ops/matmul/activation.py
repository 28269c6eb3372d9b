"""The activation of an MLP, with a gate or without."""

from collections.abc import Callable, Sequence

import jax
from jax import Array

type Activation = Callable[[Array], Array]

FUSED: tuple[Activation, ...] = (jax.nn.silu, jax.nn.gelu, jax.nn.relu)
"""The activations that a rule of an MLP's gradient may hold as static. Another function may not lower
in a kernel for a TPU, or may close over arrays.
"""


def activate(activation: Activation, products: Sequence[Array]) -> Array:
    """Returns act(gate) * up of the products (up, gate), or act(up) of (up,)."""
    up, *gate = products
    if gate:
        return activation(gate[0]) * up
    return activation(up)
