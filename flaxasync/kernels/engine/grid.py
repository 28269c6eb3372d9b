"""The order in which a kernel visits its tiles: nested loops, flattened into one.

A kernel with one flat loop can start the transfers of the next step during this step whichever loop advances, so that
no border between rows, columns or ring steps leaves the matrix unit without data.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from flaxasync.kernels.engine.refs import Scalar


@dataclasses.dataclass(frozen=True)
class IterationGrid:
    """Nested loops as one loop over `steps`."""

    sizes: tuple[int, ...]  # iterations of each loop, the outermost first

    @property
    def steps(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self, step: Scalar) -> tuple[jax.Array, ...]:
        """Returns the iteration of each loop at a step. Beyond the last step the first coordinate is out of range."""
        inner = []
        for size in reversed(self.sizes[1:]):
            step, iteration = split(step, size)
            inner.append(iteration)
        return jnp.int32(step), *reversed(inner)


def split(number: Scalar, by: int) -> tuple[jax.Array, jax.Array]:
    """Returns the quotient and the remainder of a number that is not negative."""
    number, divisor = jnp.int32(number), jnp.int32(by)
    return lax.div(number, divisor), lax.rem(number, divisor)


def remainder(number: Scalar, by: int) -> jax.Array:
    """Returns the remainder of a number that is not negative."""
    return split(number, by)[1]
