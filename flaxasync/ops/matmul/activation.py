"""The activation of an MLP, with a gate or without."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax import Array

type Activation = Callable[[Array], Array]

FUSED: tuple[Activation, ...] = (jax.nn.silu, jax.nn.gelu, jax.nn.relu)
"""The activations that a rule of an MLP's gradient may hold as static. Another function may not lower
in a kernel for a TPU, or may close over arrays.
"""


@dataclasses.dataclass(frozen=True)
class MLP[E]:
    """What is static in an MLP that has a rule for its gradient. Hashable."""

    executor: E  # of both of its collective matmuls
    keep: bool  # whether all_gather(x) is kept for the backward pass
    activation: Activation


def activate(activation: Activation, products: Sequence[Array]) -> Array:
    """Returns act(gate) * up of the products (up, gate), or act(up) of (up,)."""
    up, *gate = products
    if gate:
        return activation(gate[0]) * up
    return activation(up)
