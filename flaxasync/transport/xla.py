"""`lax.ppermute` behind start and done: any backend, any device.

XLA splits the permute into its own start and done and schedules compute between them. It can do so only if the permute
and the compute stand in one loop body, so the permute is issued by `done`: a start in the turn before would put it on
the far side of the loop's boundary from the compute that is to hide it. Safety is XLA's: it sees source and target.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flaxasync import ring
from flaxasync.transport.pair import aval


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["axis_name", "shift", "aval"])
@dataclasses.dataclass(frozen=True)
class Future:
    """A transfer that was started: where it goes; shape, dtype and varying axes of the block that belongs to it.

    It holds no array: in a loop's carry the block would stand there twice, and XLA would copy one of the two each turn.
    """

    axis_name: str
    shift: int
    aval: tuple[tuple[int, ...], jnp.dtype, frozenset[str]]


def start(x: jax.Array, axis_name: str, *, shift: int) -> tuple[jax.Array, Future]:
    """Marks `x` as being sent `shift` devices onward."""
    return x, Future(axis_name, shift, aval(x))


def done(x: jax.Array, future: Future) -> jax.Array:
    """Sends `x`; returns what arrives from the device `shift` before this one, of the same shape and dtype."""
    size = lax.axis_size(future.axis_name)
    return lax.ppermute(x, future.axis_name, ring.permutation(size, future.shift))


def pin(x: jax.Array, values: Any) -> tuple[jax.Array, Any]:
    """Ties nothing: XLA schedules its own permute, and needs the compute to be free to move over it."""
    return x, values


def check_unroll(unroll: int) -> None:
    """Any number of turns is safe: XLA knows what travels."""
