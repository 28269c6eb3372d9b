"""Transfers of arrays that run beside a computation, whether XLA schedules them or a start/done pair makes them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from flaxasync.transport.pair import Future
from flaxasync.transport.schedule import tie


@dataclasses.dataclass
class Transfer:
    """An array that arrives.

    Attributes:
      x: What is sent while the transfer is under way; what arrived, if there is no future.
      future: The future of a direct transfer; None where XLA schedules the transfer, or nothing travels.
      summed_in: The dtype in which the blocks that arrive are added; None if they are not.
    """

    x: Array
    future: Future | None = None
    summed_in: DTypeLike | None = None

    def done(self) -> Array:
        """Waits, and returns what arrived."""
        if self.future is None:
            return self.x
        arrived = self.future.pair.done(self.x, self.future)
        return arrived if self.summed_in is None else jnp.sum(arrived.astype(self.summed_in), 0)


@dataclasses.dataclass
class Transfers:
    """Transfers that are waited for together; `scope` names their dones in a profile."""

    begun: list[Transfer]
    scope: str

    def done(self) -> tuple[Array, ...]:
        """Waits for all of them, and returns what arrived."""
        with jax.named_scope(self.scope):
            return tuple(transfer.done() for transfer in self.begun)


def meanwhile[T](transfers: list[Transfers], compute: Callable[..., T], *operands: Any) -> T:
    """Returns `compute(*operands)`, which runs after direct transfers were started and before they are waited for.

    The operands are pytrees of arrays.

    XLA schedules its own transfers. Nothing ties them to the computation.
    """
    started = [transfer for group in transfers for transfer in group.begun if transfer.future is not None]
    if not started:
        return compute(*operands)
    sent, operands = tie([transfer.x for transfer in started], operands)
    sent, result = tie(sent, compute(*operands))
    for transfer, x in zip(started, sent, strict=True):
        transfer.x = x
    return result
