"""Ring arithmetic, and the one staggered loop under every collective matmul and ring layer.

Everything here runs inside `jax.shard_map`, on local shards. A ring is a mesh axis of R devices; shift s sends from
device i to device (i + s) % R. Trip counts are Python ints: a ring's size is known when it is traced. The loop knows
nothing of matmuls and nothing of how a block moves; both are arguments. Two passes stand on it: in `gather_pass` every
device sees every block; in `reduce_pass` every device ends with the sum of what all have for it.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

Block = Any  # what travels: a pytree of arrays
Carry = Any  # what stays: a pytree of arrays
Counted = tuple[Any, tuple[list, Carry]]  # the hop, and the loop's state: a channel's state each, and the carry


class Transport(Protocol):
    """How one array moves to a neighbour, as a value. `flaxasync.transport` has the implementations."""

    def start(self, x: jax.Array, axis_name: str, *, shift: int) -> tuple[jax.Array, Any]:
        """Begins sending `x`; returns the `x` to use from here on, and a future for what arrives."""
        ...

    def done(self, x: jax.Array, future: Any) -> jax.Array:
        """Waits for both ends of the transfer; returns what arrived."""
        ...

    def pin(self, x: jax.Array, values: Any) -> tuple[jax.Array, Any]:
        """Keeps `values` between start and done, if they stand there and XLA might move them."""
        ...

    def check_unroll(self, unroll: int) -> None:
        """Raises ValueError where a loop body of so many turns is not safe."""
        ...


class RefTransport(Protocol):
    """How one block moves to a neighbour in buffers that stand outside the loop."""

    def open(self, block: Block, axis_name: str, *, shift: int) -> "Channel":
        """Makes the buffers of one block, with the block in them."""
        ...

    def check_unroll(self, unroll: int) -> None:
        """Raises ValueError where a loop body of so many turns is not safe."""
        ...


class Channel(Protocol):
    """The way of one block through the loop. `state` is a pytree that the loop carries; `turn` is right modulo 2."""

    def start(self) -> Any:
        """Begins sending the block; returns the state."""
        ...

    def read(self, state: Any, turn: int) -> Block:
        """The block in hand, which is being sent."""
        ...

    def tie(self, state: Any, values: Any) -> tuple[Any, Any]:
        """Keeps `values` between start and done."""
        ...

    def hop(self, state: Any, update: Callable[[Block], Block] | None, turn: int) -> Any:
        """Waits for the next block, updates it, and begins sending it; returns the state."""
        ...

    def finish(self, state: Any, update: Callable[[Block], Block] | None, turn: int) -> Block:
        """Waits for the last block, updates it, and returns it."""
        ...


def permutation(size: int, shift: int) -> list[tuple[int, int]]:
    """The (source, destination) pairs that send every block `shift` devices onward, as `lax.ppermute` takes them."""
    return [(source, (source + shift) % size) for source in range(size)]


def gathered_owner(index: Any, hop: Any, *, size: int, shift: int) -> Any:
    """Whose block device `index` holds after `hop` hops of a ring in which blocks travel unchanged."""
    return (index - shift * hop) % size


def reduced_owner(index: Any, hop: Any, *, size: int, shift: int) -> Any:
    """For whom the sum that device `index` adds to at `hop` is meant, in a ring in which partial sums travel.

    A sum makes size - 1 hops and must end at its owner, so at `hop` it still has size - 1 - hop to go.
    """
    return (index - shift * (hop + 1)) % size


def shifts(directions: int, rows: int) -> tuple[int, ...]:
    """The shift of each piece of a block with `rows` rows: one piece one way, or two pieces that part ways."""
    return (1, -1) if directions == 2 and rows >= 2 else (1,)


def split_rows(rows: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """(first row, row count) of each of `pieces` runs of rows; they differ by one row at most.

    >>> split_rows(7, 2)
    ((0, 4), (4, 3))
    """
    edges = [-(-rows * piece // pieces) for piece in range(pieces + 1)]
    return tuple((start, stop - start) for start, stop in itertools.pairwise(edges))


def staggered_loop(
    transport: Transport | RefTransport,
    axis_name: str,
    blocks: tuple[Block, ...],
    carry: Carry,
    window: Callable[[Any, tuple[Block, ...], Carry], tuple[tuple[Block, ...], Carry]],
    *,
    shifts: tuple[int, ...],
    hops: int,
    merge: Callable[[Block, Block], Block] | None = None,
    unroll: int = 2,
) -> tuple[tuple[Block, ...], Carry]:
    """Sends `blocks` along the ring `hops` times, and runs `window` while each transfer is under way.

    ```
    blocks, futures = start(blocks)                           prologue
    for hop in range(hops):                                   fori_loop(unroll=2), but for its first and last turn
        parts, carry = window(hop, blocks, carry)             the blocks in hand, while they travel
        blocks = merge(done(blocks, futures), parts)
        blocks, futures = start(blocks)                       not after the last hop: epilogue
    ```

    Each part of this shape removes one hazard of asynchronous transfers (docs/async.md shows them compiled):

    * start is in the turn before its done: a whole turn stands between the two.
    * the window is tied to the blocks in flight, before it and after it (`Transport.pin`): the loop's boundary alone
      keeps compute where it stands in one of two turns, and outside a loop nothing does.
    * `blocks` goes through start and on into done: whoever reads it in the window reads memory that is still alive.
    * `unroll=2`: the two buffers change roles every turn. With one turn a body, XLA would have to copy one of them,
      while it is being written, to give the loop's carry a fixed place. A single turn is written out, since a loop of
      one turn has one turn a body.
    * the last turn stands outside: no transfer is started that nobody waits for.
    * the first turn stands outside: a carry of zeros is seen to be zeros, and is never stored.

    Args:
      transport: what moves an array.
      axis_name: the ring's mesh axis.
      blocks: one pytree a direction; all of its arrays travel together.
      carry: what `window` updates.
      window: `(hop, blocks, carry) -> (parts, carry)`. `hop` is an int or, in the loop, a traced one. `parts` has
        the structure of `blocks` and is what `merge` adds to the blocks that arrive; without `merge` it is unused.
      shifts: where each of `blocks` goes: +1 or -1, say.
      hops: how many transfers, >= 0. A block that is to pass every device makes R - 1.
      merge: `(arrived, part) -> block`, one block at a time; by default what arrived travels on as it is.
      unroll: turns in one loop body. Turns that fill no body are written out behind the loop.

    Returns:
      The blocks after the last hop, which no window has used yet, and the carry.

    Raises:
      ValueError: the transport's buffers would be copied in a loop body of `unroll` turns.
    """
    transport.check_unroll(unroll)
    if hops == 0:
        return blocks, carry
    channels = [_open(transport, block, axis_name, shift) for block, shift in zip(blocks, shifts, strict=True)]

    def inside(hop: Any, states: list, carry: Carry, turn: int) -> tuple[list, list, Carry]:
        """The window, pinned between the start that made `states` and the done that takes them."""
        with jax.named_scope("window"):
            states, hop = _tie(channels, states, hop)
            blocks = tuple(channel.read(state, turn) for channel, state in zip(channels, states, strict=True))
            parts, carry = window(hop, blocks, carry)
            states, (parts, carry) = _tie(channels, states, (None if merge is None else parts, carry))
        updates = [None] * len(channels) if merge is None else [_merging(merge, part) for part in parts]
        return states, updates, carry

    def one_turn(hop: Any, state: tuple[list, Carry], turn: int) -> tuple[list, Carry]:
        states, carry = state
        states, updates, carry = inside(hop, states, carry, turn)
        with jax.named_scope("hop"):
            return [c.hop(s, u, turn) for c, s, u in zip(channels, states, updates, strict=True)], carry

    def turns(first: int, count: int) -> Callable[[Any, Counted], Counted]:
        def body(_: Any, counted: Counted) -> Counted:
            hop, state = counted
            for turn in range(first, first + count):
                hop, state = hop + 1, one_turn(hop, state, turn)
            return hop, state

        return body

    with jax.named_scope("hop"):
        state = ([channel.start() for channel in channels], carry)
    if hops > 1:
        state = one_turn(0, state, 0)
    # A loop of one body would be no loop. The turns that are left over count on from the loop's own counter: with a
    # number that XLA knows, their compute would depend on nothing in the loop, and XLA would hoist it out and keep it.
    bodies = (hops - 2) // unroll if hops - 2 >= 2 * unroll else 0
    counted: Counted = (1, state)
    if bodies:
        counted = lax.fori_loop(0, bodies, turns(1, unroll), (jnp.int32(1), state))
    _, state = turns(1 + bodies * unroll, max(hops - 2, 0) - bodies * unroll)(None, counted)
    states, carry = state
    states, updates, carry = inside(hops - 1, states, carry, hops - 1)
    with jax.named_scope("hop"):
        return tuple(c.finish(s, u, hops - 1) for c, s, u in zip(channels, states, updates, strict=True)), carry


@dataclasses.dataclass(frozen=True)
class _Values:
    """The channel of a block that is a value: its arrays travel through the loop's carry, each with its future."""

    transport: Transport
    block: Block
    axis_name: str
    shift: int

    def start(self) -> Any:
        return self._start(self.block)

    def read(self, state: Any, turn: int) -> Block:
        xs, _ = state
        return jax.tree.unflatten(jax.tree.structure(self.block), xs)

    def tie(self, state: Any, values: Any) -> tuple[Any, Any]:
        xs, futures = state
        pinned = []
        for x in xs:
            x, values = self.transport.pin(x, values)
            pinned.append(x)
        return (pinned, futures), values

    def hop(self, state: Any, update: Callable[[Block], Block] | None, turn: int) -> Any:
        return self._start(self.finish(state, update, turn))

    def finish(self, state: Any, update: Callable[[Block], Block] | None, turn: int) -> Block:
        arrived = [self.transport.done(x, future) for x, future in zip(*state, strict=True)]
        block = jax.tree.unflatten(jax.tree.structure(self.block), arrived)
        return block if update is None else update(block)

    def _start(self, block: Block) -> Any:
        pairs = [self.transport.start(x, self.axis_name, shift=self.shift) for x in jax.tree.leaves(block)]
        return [x for x, _ in pairs], [future for _, future in pairs]


def _open(transport: Any, block: Block, axis_name: str, shift: int) -> Channel:
    if hasattr(transport, "open"):
        return transport.open(block, axis_name, shift=shift)
    return _Values(transport, block, axis_name, shift)


def _tie(channels: list[Channel], states: list, values: Any) -> tuple[list, Any]:
    tied = []
    for channel, state in zip(channels, states, strict=True):
        state, values = channel.tie(state, values)
        tied.append(state)
    return tied, values


def _merging(merge: Callable[[Block, Block], Block], part: Block) -> Callable[[Block], Block]:
    return lambda block: merge(block, part)


@dataclasses.dataclass(frozen=True)
class Ring:
    """How blocks pass along one mesh axis. Hashable: it is a static argument of the custom rules.

    Attributes:
      axis_name: the mesh axis.
      transport: what moves a block; None for one collective operation instead of a ring.
      directions: 1, or 2 to send half of every block each way, which halves the bytes of a hop.
      unroll: turns in one loop body; see `staggered_loop`.
    """

    axis_name: str
    transport: Transport | RefTransport | None
    directions: int = 1
    unroll: int = 2


def gather_pass(
    ring: Ring, x: jax.Array, carry: Carry, use: Callable[[jax.Array, Any, Carry], Carry], *, axis: int = -2
) -> Carry:
    """Shows every device's rows of `x` to `use`, one block at a time, while the next ones travel.

    Args:
      ring: how the blocks pass.
      x: this device's rows: m of them on dimension `axis`. Device i's rows are i * m .. (i + 1) * m of the gathered x.
      carry: what `use` updates.
      use: `(block, row, carry) -> carry`: `block` is a run of rows of the gathered x that begins at `row`.
      axis: the dimension of rows.

    Returns:
      The carry, after every row of the gathered x was used once.
    """
    if ring.transport is None:
        return use(lax.all_gather(x, ring.axis_name, axis=axis % x.ndim, tiled=True), 0, carry)
    size, index, rows = lax.axis_size(ring.axis_name), lax.axis_index(ring.axis_name), x.shape[axis]
    directions = shifts(ring.directions if size > 1 else 1, rows)
    runs = split_rows(rows, len(directions))

    def window(hop: Any, blocks: tuple[jax.Array, ...], carry: Carry) -> tuple[tuple[jax.Array, ...], Carry]:
        for block, shift, (offset, _) in zip(blocks, directions, runs, strict=True):
            owner = gathered_owner(index, hop, size=size, shift=shift)
            carry = use(block, owner * rows + offset, carry)
        return blocks, carry

    blocks = tuple(lax.slice_in_dim(x, start, start + count, axis=axis) for start, count in runs)
    blocks, carry = staggered_loop(
        ring.transport, ring.axis_name, blocks, carry, window, shifts=directions, hops=size - 1, unroll=ring.unroll
    )
    return window(size - 1, blocks, carry)[1]


def reduce_pass(
    ring: Ring, rows: int, produce: Callable[[Any, int], jax.Array], dtype: jnp.dtype, *, axis: int = -2
) -> jax.Array:
    """Sums what all devices produce for this device's rows, while partial sums travel.

    Args:
      ring: how the partial sums pass.
      rows: m, the rows that each device owns; device i owns i * m .. (i + 1) * m.
      produce: `(row, count) -> part`: this device's addend for rows row .. row + count of all R * m.
      dtype: of the sums that travel; each addition is done in the dtype of `part`.
      axis: the dimension of rows in `part`.

    Returns:
      The sum over all devices for this device's m rows, of dtype `dtype`.
    """
    size, index = lax.axis_size(ring.axis_name), lax.axis_index(ring.axis_name)
    if ring.transport is None:
        part = produce(0, size * rows).astype(dtype)
        return lax.psum_scatter(part, ring.axis_name, scatter_dimension=axis % part.ndim, tiled=True)
    directions = shifts(ring.directions if size > 1 else 1, rows)
    runs = split_rows(rows, len(directions))

    def parts(hop: Any) -> tuple[jax.Array, ...]:
        owners = (reduced_owner(index, hop, size=size, shift=shift) for shift in directions)
        return tuple(produce(owner * rows + start, count) for owner, (start, count) in zip(owners, runs, strict=True))

    def merge(arrived: jax.Array, part: jax.Array) -> jax.Array:
        return (arrived.astype(part.dtype) + part).astype(dtype)

    sums, _ = staggered_loop(
        ring.transport,
        ring.axis_name,
        tuple(part.astype(dtype) for part in parts(0)),
        None,
        lambda hop, sums, carry: (parts(hop + 1), carry),
        shifts=directions,
        hops=size - 1,
        merge=merge,
        unroll=ring.unroll,
    )
    return sums[0] if len(sums) == 1 else lax.concatenate(sums, dimension=axis % sums[0].ndim)
