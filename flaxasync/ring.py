"""Ring arithmetic, the staggered loop behind every ring, and the three ring collectives that are
built on it.

Everything here runs inside `jax.shard_map`, on local shards. A ring is a mesh axis of R devices;
shift s sends from device i to device (i + s) % R. Trip counts are Python ints, because the size of
a ring is known when it is traced. The loop knows nothing about matmuls and nothing about how a
block moves; both are arguments.

```
ring_gather   every device sees every block                              the ring behind an all-gather
ring_reduce   every device ends with the sum over devices for its rows   the ring behind a reduce-scatter
ring_visit    every block visits every device, and the sum of what they make of it returns to its owner
```
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

type Index = int | jax.Array  # a Python int or a traced one
type Block = Any  # what travels: a pytree of arrays
type Carry = Any  # what stays on the device: a pytree of arrays
type State = Any  # what a loop carries for a channel: a pytree of arrays
type Counted = tuple[Index, list[State], Carry]  # the number of the hop, and its states
type Update = Callable[[Block], Block] | None


class Transport(Protocol):
    """What moves blocks around a ring. It is hashable: a `Ring` that holds one is a static
    argument.

    `flaxasync.transport` has the implementations.
    """

    def open(self, block: Block, axis_name: str, *, shift: int) -> "Channel":
        """Returns a channel on which `block` makes its hops, each to the device `shift` positions
        onward.
        """

    def check_unroll(self, unroll: int) -> None:
        """Raises ValueError where a loop body of `unroll` turns is not safe."""


class Channel(Protocol):
    """The path of one block through the loop. `turn` has the parity of the hop's number and no
    further meaning.
    """

    def start(self) -> State:
        """Begins sending the block, and returns the state."""

    def read(self, state: State, turn: int) -> Block:
        """Returns the block that this device holds, which is being sent."""

    def tie(self, state: State, values: PyTree) -> tuple[State, Any]:
        """Keeps the computation of `values` between the start and the done."""

    def hop(self, state: State, update: Update, turn: int) -> State:
        """Waits for the next block, updates it, begins sending it, and returns the state."""

    def finish(self, state: State, update: Update, turn: int) -> Block:
        """Waits for the last block, updates it, and returns it."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """How blocks travel along one mesh axis. Hashable: it is a static argument of the VJP rules."""

    axis_name: str
    # what moves a block; None means one collective operation instead of a ring
    transport: Transport | None
    # or 2 to send one half-block in each direction, which halves the bytes of a hop on each link
    directions: int = 1
    unroll: int = 2  # turns in one loop body; see `staggered_loop`


def permutation(size: int, shift: int) -> list[tuple[int, int]]:
    """Returns the (source, destination) pairs that send each block `shift` devices onward, as
    `lax.ppermute` takes.
    """
    return [(source, (source + shift) % size) for source in range(size)]


def gathered_owner(index: Index, hop: Index, *, size: int, shift: int) -> Index:
    """Returns whose block device `index` holds after `hop` hops of a ring in which blocks travel
    unchanged.
    """
    return (index - shift * hop) % size


def reduced_owner(index: Index, hop: Index, *, size: int, shift: int) -> Index:
    """Returns the owner of the partial sum to which device `index` adds at `hop`.

    A partial sum makes size - 1 hops and must end at its owner, so at `hop` it still has size - 1 -
    hop to go.
    """
    return (index - shift * (hop + 1)) % size


def shifts(directions: int, rows: int) -> tuple[int, ...]:
    """Returns the shift of each half-block of a block with `rows` rows; a block of one row is not
    halved.
    """
    if directions == 2 and rows >= 2:
        return 1, -1
    return (1,)


def split_rows(rows: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Splits `rows` consecutive rows into (first row, row count) of each part. Counts differ by one
    row at most.

    >>> split_rows(7, 2)
    ((0, 4), (4, 3))
    """
    edges = [-(-rows * part // parts) for part in range(parts + 1)]
    return tuple((start, stop - start) for start, stop in itertools.pairwise(edges))


def staggered_loop(
    ring: Ring,
    blocks: tuple[Block, ...],
    carry: Carry,
    window: Callable[[Index, tuple[Block, ...], Carry], tuple[tuple[Block, ...], Carry]],
    *,
    shifts: tuple[int, ...],
    hops: int,
    merge: Callable[[Block, Block], Block] | None = None,
) -> tuple[tuple[Block, ...], Carry]:
    """Sends `blocks` along the ring `hops` times, and runs `window` while each transfer is under
    way.

    ```
    blocks, futures = start(blocks)                           prologue
    for hop in range(hops):                                   fori_loop(unroll=2), except for its first and last turn
        addends, carry = window(hop, blocks, carry)           the blocks that this device holds, while they travel
        blocks = merge(done(blocks, futures), addends)
        blocks, futures = start(blocks)                       not after the last hop: epilogue
    ```

    Each feature of this loop removes one hazard of asynchronous transfers (docs/async.md shows the
    compiled programs):

    * The start is in the turn before its done, so that a whole turn is between the two.
    * The window is tied to the blocks in flight at its beginning and at its end (`Channel.tie`). A
      loop of value futures, or of two Refs, that reads its block without ties can give wrong
      results: nothing says that it reads before the done, so XLA may copy the block while it is in
      flight. And ties keep compute in its window.
    * `blocks` is a result of the start and an operand of the done, so that the memory which the
      window reads is alive.
    * `unroll=2`: The two buffers swap roles in every turn, and a loop's carry has a fixed buffer
      for each role. With one turn in a body, XLA would have to copy one of them while it is being
      written. A single turn is written without a loop, because a loop of one turn has one turn in
      its body.
    * The last turn is outside the loop, so that every transfer that is started is also waited for.
    * The first turn is outside the loop, so that XLA sees that a carry of zeros is zeros, and never
      stores it.

    One block in each direction is in flight, whatever `unroll` is. The loop runs its body twice or
    more, so with two turns in it there is a loop from six hops on:
    rings of seven devices or more have one, and smaller rings are written out, as are all of
    `ring_visit` below nine devices.

    Args:
      ring: How blocks travel; it has a transport. Turns that do not fill a body of `unroll` turns
        are written out after the loop.
      blocks: One pytree for each direction; all of its arrays travel together.
      carry: A pytree that `window` updates.
      window: `(hop, blocks, carry) -> (addends, carry)`. `hop` is an int or, in the loop, a traced
        one. `addends` has the structure of `blocks`, and `merge` adds it to the blocks that arrive;
        without `merge` it is unused.
      shifts: The shift of each of `blocks`, such as +1 or -1.
      hops: How many transfers to make, at least 0. A block that is to visit every device makes R -
        1.
      merge: `(arrived, addend) -> block`, called for one block at a time. By default what arrived
        travels on as it is.

    Returns:
      The blocks after the last hop, which no window has used yet, and the carry.

    Raises:
      ValueError: The transport's buffers would be copied in a loop body of `unroll` turns.
    """
    assert ring.transport is not None
    ring.transport.check_unroll(ring.unroll)
    if hops == 0:
        return blocks, carry
    channels = [
        ring.transport.open(block, ring.axis_name, shift=shift)
        for block, shift in zip(blocks, shifts, strict=True)
    ]

    def run_window(
        hop: Index, states: list[State], carry: Carry, turn: int
    ) -> tuple[list[State], list[Update], Carry]:
        """Runs the window, tied between the start that made `states` and the done that takes
        them.
        """
        with jax.named_scope("window"):
            states, hop = _tie(channels, states, hop)
            blocks = tuple(
                channel.read(state, turn) for channel, state in zip(channels, states, strict=True)
            )
            addends, carry = window(hop, blocks, carry)
            if merge is None:
                states, carry = _tie(channels, states, carry)
                return states, [None] * len(channels), carry
            states, (addends, carry) = _tie(channels, states, (addends, carry))
        return states, [_merging(merge, addend) for addend in addends], carry

    def turns(_: Index, counted: Counted, first: int = 1, count: int = ring.unroll) -> Counted:
        """Makes `count` turns; the number of the first one has the parity of `first`."""
        hop, states, carry = counted
        for turn in range(first, first + count):
            following = hop + 1
            states, updates, carry = run_window(hop, states, carry, turn)
            with jax.named_scope("hop"):
                turned = zip(channels, states, updates, strict=True)
                states = [channel.hop(state, update, turn) for channel, state, update in turned]
            hop = following
        return hop, states, carry

    with jax.named_scope("hop"):
        counted: Counted = (0, [channel.start() for channel in channels], carry)
    if hops > 1:
        counted = turns(0, counted, first=0, count=1)
    # Where the loop would run its body only once, all turns are written without a loop. Turns after
    # the loop take their number from the loop's counter. With a constant, their compute would
    # depend on nothing in the loop, and XLA would hoist it out of the ring and keep its results.
    middle = max(hops - 2, 0)  # turns between the first one and the last one
    bodies = middle // ring.unroll
    if bodies < 2:
        bodies = 0
    else:
        counted = lax.fori_loop(0, bodies, turns, (jnp.int32(1), *counted[1:]))
    in_loop = bodies * ring.unroll
    _, states, carry = turns(0, counted, first=1 + in_loop, count=middle - in_loop)
    states, updates, carry = run_window(hops - 1, states, carry, hops - 1)
    with jax.named_scope("hop"):
        ends = zip(channels, states, updates, strict=True)
        finished = [channel.finish(state, update, hops - 1) for channel, state, update in ends]
    return tuple(finished), carry


def ring_gather(
    ring: Ring,
    x: Block,
    carry: Carry,
    use: Callable[[Block, Index, Carry], Carry],
    *,
    axis: int = -2,
) -> Carry:
    """Calls `use` with every device's rows of `x`, one block at a time, while the next blocks
    travel.

    Args:
      ring: How the blocks travel.
      x: This device's rows: m of them on dimension `axis`. Device i has rows i * m .. (i + 1) * m
        of the gathered x. It may be a pytree, whose arrays all have their rows on the same
        dimension, counted from the front.
      carry: A pytree that `use` updates.
      use: `(block, row, carry) -> carry`, where `block` holds consecutive rows of the gathered x
        that begin at `row`.
      axis: The dimension of rows, of the first array if there are several.

    Returns:
      The carry, after every row of the gathered x was used once.
    """
    first = jax.tree.leaves(x)[0]
    dim = axis % first.ndim
    rows = first.shape[dim]
    if ring.transport is None:
        gather = functools.partial(lax.all_gather, axis_name=ring.axis_name, axis=dim, tiled=True)
        return use(jax.tree.map(gather, x), 0, carry)
    size = lax.axis_size(ring.axis_name)
    index = lax.axis_index(ring.axis_name)
    block_shifts = shifts(ring.directions if size > 1 else 1, rows)
    row_ranges = split_rows(rows, len(block_shifts))

    def rows_of(start: int, count: int) -> Block:
        part = functools.partial(
            lax.slice_in_dim, start_index=start, limit_index=start + count, axis=dim
        )
        return jax.tree.map(part, x)

    def window(
        hop: Index, blocks: tuple[Block, ...], carry: Carry
    ) -> tuple[tuple[Block, ...], Carry]:
        for block, shift, (offset, _) in zip(blocks, block_shifts, row_ranges, strict=True):
            owner = gathered_owner(index, hop, size=size, shift=shift)
            carry = use(block, owner * rows + offset, carry)
        return blocks, carry

    blocks = tuple(rows_of(start, count) for start, count in row_ranges)
    blocks, carry = staggered_loop(ring, blocks, carry, window, shifts=block_shifts, hops=size - 1)
    return window(size - 1, blocks, carry)[1]


def ring_reduce(
    ring: Ring,
    rows: int,
    produce: Callable[[Index, int], jax.Array],
    dtype: jnp.dtype,
    *,
    axis: int = -2,
) -> jax.Array:
    """Sums what all devices produce for this device's rows, while the partial sums travel.

    Args:
      ring: How the partial sums travel.
      rows: m, the number of rows that each device owns. Device i owns rows i * m .. (i + 1) * m.
      produce: `(row, count) -> addend`, this device's addend for `count` of all R * m rows,
        beginning at `row`.
      dtype: The dtype of the partial sums while they travel. Each addition is done in the dtype of
        the addend.
      axis: The dimension of rows in an addend.

    Returns:
      The sum over all devices for this device's m rows, in `dtype`.
    """
    size = lax.axis_size(ring.axis_name)
    index = lax.axis_index(ring.axis_name)
    if ring.transport is None:
        addend = produce(0, size * rows).astype(dtype)
        return lax.psum_scatter(
            addend, ring.axis_name, scatter_dimension=axis % addend.ndim, tiled=True
        )
    block_shifts = shifts(ring.directions if size > 1 else 1, rows)
    row_ranges = split_rows(rows, len(block_shifts))

    def addends(hop: Index) -> tuple[jax.Array, ...]:
        owners = (reduced_owner(index, hop, size=size, shift=shift) for shift in block_shifts)
        return tuple(
            produce(owner * rows + first, n)
            for owner, (first, n) in zip(owners, row_ranges, strict=True)
        )

    def merge(arrived: jax.Array, addend: jax.Array) -> jax.Array:
        return (arrived.astype(addend.dtype) + addend).astype(dtype)

    reduced, _ = staggered_loop(
        ring,
        tuple(addend.astype(dtype) for addend in addends(0)),
        None,
        lambda hop, blocks, carry: (addends(hop + 1), carry),
        shifts=block_shifts,
        hops=size - 1,
        merge=merge,
    )
    if len(reduced) == 1:
        return reduced[0]
    return lax.concatenate(reduced, dimension=axis % reduced[0].ndim)


def ring_visit(
    ring: Ring,
    blocks: tuple[Block, ...],
    carry: Carry,
    visit: Callable[[Index, tuple[Block, ...], Carry], tuple[tuple[Block, ...], Carry]],
    last: Callable[[Carry], tuple[tuple[Block, ...], Carry]],
    *,
    add: Callable[[Block, Block], Block],
    shifts: tuple[int, ...],
    hops: int,
) -> tuple[tuple[Block, ...], Carry]:
    """Sends blocks to `hops` other devices each, and returns to every owner the sum of what they
    made of its block.

    ```
    turn          0          1         2 .. H-1       H           H+1               (H hops)
    travels       block      block     block, sum     sum         sum, to its owner
    visited       own        arrived   arrived        arrived     own, the rest
    ```

    The sum for a block needs what a turn computes, so it leaves one turn later than the block
    itself. Work with a device's own block is split between the first turn and the last one, so that
    every transfer has work beside it.

    Args:
      ring: How blocks travel; it has a transport.
      blocks: This device's blocks, one for each of `shifts`.
      carry: A pytree that `visit` and `last` update.
      visit: `(hop, blocks, carry) -> (addends, carry)` for the blocks that this device holds after
        `hop` hops; its own if that is the int 0.
      last: `carry -> (addends, carry)`, the rest of the work with its own blocks.
      add: `(arrived sum, addend) -> sum`, which travels on. The first addend of another device's
        block travels as it is, and the addends of `last` and of hop 0 are added to the sum that
        returns.
      shifts: The shift of each block.
      hops: How many other devices a block visits, 1 or more.

    Returns:
      The sum for each of this device's blocks, and the carry.
    """
    onward = functools.partial(staggered_loop, ring, shifts=shifts)

    def alone(hop: int) -> Callable[..., Any]:
        """Returns a window beside which no sum travels: (addends, carry) is its carry."""
        return lambda _, blocks, carry: (blocks, visit(hop, blocks, carry))

    def arrived(
        hop: Index, travelling: tuple[Block, ...], carry: Carry
    ) -> tuple[tuple[Block, ...], Carry]:
        return visit(2 + hop, tuple(block for _, block in travelling), carry)

    def merge(travelling: Block, addend: Block) -> Block:
        # they leave together
        return lax.optimization_barrier((add(travelling[0], addend), travelling[1]))

    blocks, (own_sums, carry) = onward(blocks, carry, alone(0), hops=1)
    if hops == 1:
        sums, carry = visit(1, blocks, carry)
    else:
        blocks, (sums, carry) = onward(blocks, carry, alone(1), hops=1)
    if hops > 2:
        pairs = tuple(zip(sums, blocks, strict=True))
        pairs, carry = onward(pairs, carry, arrived, hops=hops - 2, merge=merge)
        sums, blocks = zip(*pairs, strict=True)
    if hops > 1:
        sums, carry = onward(
            sums, carry, lambda _, __, carry: visit(hops, blocks, carry), hops=1, merge=add
        )
    size = lax.axis_size(ring.axis_name)
    home = tuple(-hops * shift % size for shift in shifts)
    sums, (rest, carry) = onward(
        sums, carry, lambda _, sums, carry: (sums, last(carry)), shifts=home, hops=1
    )
    return tuple(map(add, map(add, sums, own_sums), rest)), carry


def _tie(channels: list[Channel], states: list[State], values: PyTree) -> tuple[list[State], Any]:
    tied = []
    for channel, state in zip(channels, states, strict=True):
        state, values = channel.tie(state, values)
        tied.append(state)
    return tied, values


def _merging(merge: Callable[[Block, Block], Block], addend: Block) -> Callable[[Block], Block]:
    return lambda block: merge(block, addend)
