"""`lax.ppermute` as a start and a done: backend "xla", which runs on every device.

XLA splits the permute into a start and a done of its own and schedules compute between them. It can do so only if the
permute and the compute are in the same loop body, so `done` issues the permute. If `start` issued it, in the turn
before, the boundary of the loop would lie between the permute and the compute that is to hide it. XLA keeps this safe
by itself, because it sees the source and the target of the transfer.

Whatever the permute's operand depends on runs before the transfer. The public pair, whose x `while_travelling` ties to
the compute, therefore keeps the block of the start in the future and sends that one.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax

from flaxasync import ring
from flaxasync.transport.pair import Aval, aval
from flaxasync.transport.values import ValueTransport


@functools.partial(jax.tree_util.register_dataclass, data_fields=["block"], meta_fields=["axis_name", "shift", "aval"])
@dataclasses.dataclass(frozen=True)
class Future:
    """A transfer that was started.

    Attributes:
      axis_name: The mesh axis along which the block goes.
      shift: How many devices onward it goes.
      aval: The shape, dtype and varying axes of the x that belongs to the future.
      block: What is sent: the block that `ppermute_start` was given. None in a ring, which sends the x that is handed
        to the done: with a block here, the carry of its loop would hold that array twice, and XLA would copy one of the
        two in every turn.
    """

    axis_name: str
    shift: int
    aval: Aval
    block: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class XlaTransport(ValueTransport):
    """Moves arrays with `lax.ppermute`."""

    def start(self, x: jax.Array, axis_name: str, *, shift: int) -> tuple[jax.Array, Future]:
        return x, Future(axis_name, shift, aval(x))

    def done(self, x: jax.Array, future: Future) -> jax.Array:
        size = lax.axis_size(future.axis_name)
        sent = x if future.block is None else future.block
        return lax.ppermute(sent, future.axis_name, ring.permutation(size, future.shift))

    def tie(self, x: jax.Array, values: Any) -> tuple[jax.Array, Any]:
        """Ties nothing: XLA schedules its own permute, and the compute must be free to move across it."""
        return x, values

    def check_unroll(self, unroll: int) -> None:
        """Accepts any number of turns, because XLA itself keeps its permute safe."""
