"""Which blocks of w a device multiplies with, from whom each comes and to whom it goes on: broadcasts in mesh columns.

LHS[M_X, K_Y] . RHS[K_X, N] divides the contraction among mesh columns on the left and among mesh rows on the right. In
blocks whose size divides both shares, mesh row r holds blocks r*held .. (r+1)*held-1 of RHS, and every device of mesh
column c multiplies with blocks c*needed .. (c+1)*needed-1, which are called t = 0 .. needed-1 there. Each of them has
one owner in that column, and goes around the column from there, from device to device:

    2 x 2   the device on the diagonal owns the only block of its column, and sends it to the other device
    4 x 1   every device owns a quarter of the blocks that all need
    1 x 4   a device holds what all columns need: nothing travels
    2 x 4   mesh row c // 2 owns what column c needs, which is half of its blocks

With two directions, blocks with an even t go onward and the others backward. A device uses blocks in the order of
their hops, its own first, and may send each one on when it uses it. So a device that waits for a block of h hops waits
for one that has waited for blocks of fewer hops only, and no device waits for itself.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.grid import remainder, split
from flaxasync.kernels.engine.operands import LANES
from flaxasync.kernels.engine.refs import Condition, Ref, Scalar, ScratchShapes, aligned
from flaxasync.kernels.engine.ring import Device, Ring, enter


@dataclasses.dataclass(frozen=True)
class WeightBlocks:
    """The blocks of w; methods are called inside a kernel."""

    ring: Ring  # the devices of a mesh column, and the directions of the blocks
    axis_name: str  # the mesh axis of the mesh columns
    rows: int  # rows of w in a block
    needed: int  # blocks that a device multiplies with
    held: int  # blocks that a device holds

    @property
    def most_alike(self) -> int:
        """How many blocks may come to a device over one number of hops, at most."""
        return min(self.held, self.needed) + self.ring.directions - 1

    def hops(self, t: Scalar) -> jax.Array:
        """Returns how many hops a block takes to get to this device; 0 if the device owns it."""
        return self.hops_to(self.ring.index, lax.axis_index(self.axis_name), t)

    def hops_to(self, row: Scalar, column: Scalar, t: Scalar) -> jax.Array:
        """Returns how many hops block t of a mesh column takes to a mesh row."""
        onward = row - split(column * self.needed + t, self.held)[0]
        return remainder(self.ring.size + jnp.where(self._direction(t) == 0, onward, -onward), self.ring.size)

    def goes_on(self, t: Scalar) -> jax.Array:
        """Returns whether this device sends a block to the next one."""
        return self.hops(t) < self.ring.size - 1

    def receiver(self, t: Scalar) -> Device:
        """Returns the device that a block goes to from here."""
        return self.ring.receiver(self._direction(t))

    def held_rows(self, t: Scalar) -> pl.Slice:
        """Returns where a block lies in this device's w, if the device owns it."""
        return self.needed_rows(lax.axis_index(self.axis_name) * self.needed + t - self.ring.index * self.held)

    def needed_rows(self, t: Scalar) -> pl.Slice:
        """Returns where a block lies among all that this device multiplies with, which are as many columns of x."""
        return aligned(jnp.int32(t * self.rows), self.rows, self.rows)

    def tables(self) -> tuple[ScratchShapes, ScratchShapes]:
        """Returns the scratch memory of the two tables that `sort` fills."""
        return pltpu.SMEM((self.needed + 1,), jnp.int32), pltpu.SMEM((self.ring.size,), jnp.int32)

    def sort(self, order: Ref, first: Ref) -> None:
        """Fills the tables: blocks in the `order` of their use, and where the `first` of each number of hops stands."""

        def put(hops: Scalar, count: Scalar) -> jax.Array:
            def one(t: Scalar, count: Scalar) -> jax.Array:
                order[count] = t  # the next block overwrites it unless this one has so many hops
                return count + (self.hops(t) == hops).astype(jnp.int32)

            first[hops] = count
            return lax.fori_loop(0, self.needed, one, count)

        lax.fori_loop(0, self.ring.size, put, jnp.int32(0))

    def enter(self, tag: str, collective_id: int | None, senders: Sequence[Device] = ()) -> None:
        """Waits until the receivers have entered the kernel; `senders` are those outside of the mesh column.

        In a mesh column only some devices send to the next one. See `engine.ring.enter`.
        """
        ring = self.ring

        def any_block(direction: int, moves: Callable[[Scalar], Condition]) -> jax.Array:
            def found(t: Scalar, before: jax.Array) -> jax.Array:
                return before | ((self._direction(t) == direction) & moves(t)).astype(jnp.int32)

            return lax.fori_loop(0, self.needed, found, jnp.int32(0)) > 0

        columns = [
            (ring.sender(d), any_block(d, lambda t: self.hops(t) > 0), any_block(d, self.goes_on))
            for d in (ring.both if ring.size > 1 else ())
        ]
        enter(f"{tag} {ring.axis_name} {self.axis_name} {ring.directions}", senders, collective_id, conditional=columns)

    def _direction(self, t: Scalar) -> jax.Array:
        return remainder(t, self.ring.directions)


def largest_block(caller: str, axis_names: tuple[str, str], k: int, held: int) -> int:
    """Returns the most rows of a block that divides K/X and K/Y; raises if they are no whole hardware tiles."""
    rows = math.gcd(k, held)
    if rows % LANES:
        size, columns = (lax.axis_size(name) for name in axis_names)
        raise ValueError(
            f"{caller} divides the contraction into blocks for a mesh of {size} x {columns}, in whole hardware tiles: "
            f"got K={k * columns} in blocks of {rows}, needed a multiple of {LANES}; pad K, or use backend='none'"
        )
    return rows
