"""Transports that move arrays as values: their base class, and the channel that they share."""

import abc
import dataclasses
from typing import Any

import jax

from flaxasync.ring import Block, State, Update

type Future = Any  # what a start returns beside the array: a pytree that belongs to one transfer


class ValueTransport(abc.ABC):
    """A `flaxasync.ring.Transport` whose blocks are values. A subclass says how one array moves to a neighbour."""

    @abc.abstractmethod
    def start(self, x: jax.Array, axis_name: str, *, shift: int) -> tuple[jax.Array, Future]:
        """Begins sending `x`; returns the `x` to use from here on, and a future for what arrives."""

    @abc.abstractmethod
    def done(self, x: jax.Array, future: Future) -> jax.Array:
        """Waits for both ends of the transfer; returns what arrived."""

    @abc.abstractmethod
    def tie(self, x: jax.Array, values: Any) -> tuple[jax.Array, Any]:
        """Keeps the computation of `values` between start and done, where XLA could otherwise move it."""

    @abc.abstractmethod
    def check_unroll(self, unroll: int) -> None:
        """Raises ValueError where a loop body of `unroll` turns is not safe."""

    def open(self, block: Block, axis_name: str, *, shift: int) -> "ValueChannel":
        """Returns a channel on which all arrays of `block` travel together."""
        return ValueChannel(self, block, axis_name, shift)


@dataclasses.dataclass(frozen=True)
class ValueChannel:
    """The channel of a block that is a value. The loop carries each array of the block together with its future."""

    transport: ValueTransport
    block: Block
    axis_name: str
    shift: int

    def start(self) -> State:
        return self._start(self.block)

    def read(self, state: State, turn: int) -> Block:
        arrays, _ = state
        return jax.tree.unflatten(jax.tree.structure(self.block), arrays)

    def tie(self, state: State, values: Any) -> tuple[State, Any]:
        arrays, futures = state
        tied = []
        for x in arrays:
            x, values = self.transport.tie(x, values)
            tied.append(x)
        return (tied, futures), values

    def hop(self, state: State, update: Update, turn: int) -> State:
        return self._start(self.finish(state, update, turn))

    def finish(self, state: State, update: Update, turn: int) -> Block:
        arrived = [self.transport.done(x, future) for x, future in zip(*state, strict=True)]
        block = jax.tree.unflatten(jax.tree.structure(self.block), arrived)
        return block if update is None else update(block)

    def _start(self, block: Block) -> State:
        pairs = [self.transport.start(x, self.axis_name, shift=self.shift) for x in jax.tree.leaves(block)]
        return [x for x, _ in pairs], [future for _, future in pairs]
