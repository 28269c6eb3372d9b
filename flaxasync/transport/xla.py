"""A ring on `lax.ppermute`: backend "xla", which runs on every device.

XLA splits the permute into a start and a done of its own and schedules compute between them. It can
do so only if the permute and the compute are in the same loop body, so the channel issues the
permute at the end of a hop. If it issued the permute in the turn before, the boundary of the loop
would lie between the permute and the compute that is to hide it. XLA keeps this safe by itself,
because it sees the source and the target of the transfer.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree

from flaxasync import ring
from flaxasync.ring import Block, Update


@dataclasses.dataclass(frozen=True)
class XlaTransport:
    """A `flaxasync.ring.Transport` that moves blocks with `lax.ppermute`."""

    def open(self, block: Block, axis_name: str, *, shift: int) -> "XlaChannel":
        return XlaChannel(block, axis_name, ring.permutation(lax.axis_size(axis_name), shift))

    def check_unroll(self, unroll: int) -> None:
        """Accepts any number of turns, because XLA itself keeps its permute safe."""


@dataclasses.dataclass(frozen=True)
class XlaChannel:
    """The channel of a block that XLA moves. Its state is the block."""

    block: Block
    axis_name: str
    permutation: list[tuple[int, int]]

    def start(self) -> Block:
        return self.block

    def read(self, state: Block, turn: int) -> Block:
        return state

    def tie(self, state: Block, values: PyTree) -> tuple[Block, Any]:
        return state, values  # untied: the compute must be free to move across XLA's own permute

    def hop(self, state: Block, update: Update, turn: int) -> Block:
        arrived: jax.Array = lax.ppermute(state, self.axis_name, self.permutation)
        if update is None:
            return arrived
        return update(arrived)

    finish = hop
