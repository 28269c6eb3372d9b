"""How tokens and experts come together without a ring: a row travels only to devices that have an
expert it chose.

Each device sends to the one that is s positions onward, for every shift s, the rows that chose an
expert there, in order, and the tiles of their assignments. A row that chose several experts of a
device travels there once, and one sum of what they return comes back. Blocks of opposite shifts
arrive together and are multiplied together, while the next ones, and the sums of those before,
travel.

```
block        x [n, D], tiles [T, t]               of this device, sorted as for a ring
sent         x [m, D], tiles [T', t]              for each shift; m and T' are bounds that hold for every routing
returned     y [m, D], or dx [m, D], dweights     added to the rows and tiles that were sent
```

Shapes are static, and without a capacity all rows may choose one device: m is then n. On TPUs
direct copies (`flaxasync.transport.counted_rows`) then move as many of them as there are. With a
capacity, m is the rows that the experts of a device take, if those are fewer, and XLA's permutes
move all of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from flaxasync.kernels.engine.operands import LANES
from flaxasync.ops.experts.assignments import Assignments
from flaxasync.ops.experts.local import BlockGradients, ExpertBlock, Experts
from flaxasync.ops.experts.packing import pack, unpack
from flaxasync.ring import Index, permutation
from flaxasync.transport import counted_rows
from flaxasync.transport.transfers import Transfer, Transfers, meanwhile


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Rows are exchanged over this mesh axis. Hashable, in place of a `flaxasync.ring.Ring`."""

    axis_name: str
    direct: bool = False  # whether kernels move as many rows as there are; TPU only


class Bounds(NamedTuple):
    """The most that a device sends to another one, for any routing."""

    rows: int  # m
    tiles: int  # T'


class Routes(NamedTuple):
    """Where the rows of a block go, device after device."""

    rows: Array  # [T * t + m]: the rows for device 0, in order, then those for device 1, and so on
    first_rows: Array  # [R]: where those of each device begin
    row_counts: Array  # [R]
    # [T + T', t]: where the row of an assignment is among those that travel with it; m for padding
    places: Array
    weights: Array  # [T + T', t]
    first_tiles: Array  # [R]: where the tiles of each device begin


def exchange(
    experts: Experts, way: Exchange, block: ExpertBlock, carry: PyTree, work: Callable[..., Any]
) -> tuple[Any, Any]:
    """Returns the sum of what all devices make of the block of this device, and the carry of this
    device's work.

    Args:
      work: `(blocks, carry) -> (result of each block, carry)`, as for a ring.
    """
    devices = lax.axis_size(way.axis_name)
    n, _ = block.x.shape
    me = lax.axis_index(way.axis_name)
    limits = bounds(experts, block, devices, way.direct)
    routes = find_routes(block.assignments, n, devices, limits)
    if way.direct:
        counts = lax.all_gather(routes.row_counts, way.axis_name)
    else:
        counts = None
    targets = {shift: (me + shift) % devices for shift in range(1, devices)}
    rows = {shift: rows_for(routes, limits, target, n) for shift, target in targets.items()}
    # By shift s: `held` came from device me - s, to which `returning` sends what was made of it.
    # What arrives instead, `results`, is what device me + s made of this device's rows.
    results: dict[int, PyTree] = {}
    returning: dict[int, Moving] = {}
    held: dict[int, ExpertBlock] = {0: block}
    for shifts in (*_arrive_together(devices), ()):
        with jax.named_scope("send_rows"):
            sent = {
                s: _block_for(block, routes, limits, targets[s], rows[s], devices) for s in shifts
            }
            coming = {s: _start(way, block, one, s, counts) for s, one in sent.items()}
        moving = [one.transfers for one in (*coming.values(), *returning.values())]
        found, carry = meanwhile(moving, work, tuple(held.values()), carry)
        results |= {s: one.done() for s, one in returning.items()}
        made = dict(zip(held, found, strict=True))
        if 0 in made:  # of this device's own block, in the first turn
            results[0] = made.pop(0)
        with jax.named_scope("return_sums"):
            returning = {s: _start(way, block, one, -s, counts) for s, one in made.items()}
        held = {s: one.done() for s, one in coming.items()}
    results |= {s: one.done() for s, one in returning.items()}
    first_tiles = {s: routes.first_tiles[target] for s, target in targets.items()}
    with jax.named_scope("add_sums"):
        return _added(experts, results, rows, first_tiles), carry


@dataclasses.dataclass
class Moving:
    """A block, or what was made of one, on its way; `done` returns what arrives."""

    transfers: Transfers  # of what was sent; in rows and the rest of it, packed, if it is direct
    like: PyTree  # what is sent

    def done(self) -> Any:
        arrived: PyTree = self.transfers.done()[0]
        if self.transfers.begun[0].future is None:
            return arrived
        return _joined(self.like, arrived)


def _start(
    way: Exchange, block: ExpertBlock, sent: PyTree, shift: int, counts: Array | None
) -> Moving:
    """Begins to send a block, or what was made of one, to the device `shift` positions onward.

    Rows of another device that were multiplied return by the shift that is opposite: as many as had
    come.
    """
    devices = lax.axis_size(way.axis_name)
    me = lax.axis_index(way.axis_name)
    if counts is None:
        packed = pack(sent, block.x.shape[1], block.x.dtype)
        arrived = unpack(lax.ppermute(packed, way.axis_name, permutation(devices, shift)), sent)
        return Moving(Transfers([Transfer(arrived)], "arrive"), sent)
    there = (me + shift) % devices
    behind = (me - shift) % devices
    going, coming = (
        (counts[me, there], counts[behind, me])
        if shift > 0
        else (counts[there, me], counts[me, behind])
    )
    rows, rest = _split(sent)
    leaving = [going] * len(rows)
    arriving = [coming] * len(rows)
    # as rows of words that all travel; by no permute, whose order beside kernels is not certain
    if rest is not None:
        words = pack(rest, LANES, rows[0].dtype)
        rows.append(jnp.pad(words, ((0, -words.shape[0] % LANES), (0, 0))))
        leaving, arriving = (
            [*numbers, jnp.int32(rows[-1].shape[0])] for numbers in (leaving, arriving)
        )
    x, future = counted_rows.start(way.axis_name, shift, rows, leaving, arriving)
    return Moving(Transfers([Transfer(x, future)], "arrive"), sent)


def _split(tree: PyTree) -> tuple[list[Array], Any]:
    """Returns the arrays that have a row for each row that travels, and the rest."""
    if isinstance(tree, ExpertBlock):
        return [tree.x] + ([] if tree.dy is None else [tree.dy]), tree.assignments
    if isinstance(tree, BlockGradients):
        return ([tree.dx], tree.dweights)
    return ([tree], None)


def _joined(like: PyTree, arrived: Sequence[Array]) -> Any:
    """Returns what was split, with the arrays that arrived in place of those of `like`."""
    _, rest = _split(like)
    if rest is None:
        return arrived[0]
    unpacked = unpack(arrived[-1], rest)
    if isinstance(like, ExpertBlock):
        return ExpertBlock(arrived[0], unpacked, *arrived[1:-1])
    return BlockGradients(arrived[0], unpacked)


def _added(
    experts: Experts,
    results: dict[int, PyTree],
    rows: dict[int, Array],
    first_tiles: dict[int, Array],
) -> Any:
    """Returns what this device made of its own block, with what came back added."""
    own = results.pop(0)
    of_rows, *of_tiles = zip(*map(jax.tree.leaves, results.values()), strict=True)
    own_rows, *own_tiles = jax.tree.leaves(own)
    named = lax.concatenate([rows[shift] for shift in results], 0)
    sums = experts.products.add_rows(own_rows, lax.concatenate(of_rows, 0), named)
    tiles = [
        _add_tiles(whole, parts, [first_tiles[shift] for shift in results])
        for whole, parts in zip(own_tiles, of_tiles, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(own), [sums, *tiles])


def bounds(experts: Experts, block: ExpertBlock, devices: int, direct: bool = False) -> Bounds:
    """Returns the most rows and tiles that a device sends to another one."""
    n, _ = block.x.shape
    tiles, t = block.assignments.rows.shape
    local = experts.count // devices
    # by one expert
    if experts.capacity is None:
        taken = n
    else:
        taken = min(n, experts.parts * experts.capacity)
    rows = min(n, local * taken)
    if direct or t % LANES == 0:  # kernels copy and add rows in whole tiles
        rows = -(-rows // LANES) * LANES
    return Bounds(rows, min(tiles, local * (-(-taken // t))))


def find_routes(assignments: Assignments, n: int, devices: int, limits: Bounds) -> Routes:
    """Finds which rows of a block go to which device: by sorts, which take a TPU less time than
    scatters.
    """
    tiles, t = assignments.rows.shape
    tile_counts = jnp.sum(assignments.tiles.reshape(devices, -1), axis=1, dtype=jnp.int32)
    tile_ends = jnp.cumsum(tile_counts, dtype=jnp.int32)
    every_device = lax.iota(jnp.int32, devices)[:, None]  # [R, 1]
    device_of_tile = jnp.sum(  # [T]; R for tiles that are not in use
        lax.iota(jnp.int32, tiles)[:, None] >= tile_ends[None], axis=1, dtype=jnp.int32
    )
    # Assignments by device, then by row, and padding (row n) behind those of its device.
    # From here to `place`: [T * t], in the order of the sorted keys. `slots` says where each was.
    keys = (device_of_tile[:, None] * (n + 1) + assignments.rows).reshape(-1)
    keys, slots = lax.sort((keys, lax.iota(jnp.int32, tiles * t)), num_keys=1)
    device = keys // (n + 1)
    row = keys % (n + 1)
    # whether a row is named first for its device: it travels there once
    is_first = (row < n) & (keys != jnp.pad(keys, (1, 0), constant_values=-1)[:-1])
    row_counts = jnp.sum(is_first[None] & (device[None] == every_device), axis=1, dtype=jnp.int32)
    first_rows = jnp.cumsum(row_counts, dtype=jnp.int32) - row_counts
    # first_rows[device]
    first_row = jnp.sum(
        jnp.where(device[None] == every_device, first_rows[:, None], 0), axis=0, dtype=jnp.int32
    )
    place = jnp.cumsum(is_first, dtype=jnp.int32) - 1 - first_row
    # in the order of the tiles again
    _, places = lax.sort((slots, jnp.where(row < n, place, limits.rows)), num_keys=1)
    # the rows of device 0, of device 1, ...: the first namings, ahead of all else
    rows = lax.sort(jnp.where(is_first, keys, devices * (n + 1))) % (n + 1)
    more = ((0, limits.tiles), (0, 0))
    return Routes(
        rows=jnp.pad(rows, (0, limits.rows)),
        first_rows=first_rows,
        row_counts=row_counts,
        places=jnp.pad(places.reshape(tiles, t), more),
        weights=jnp.pad(assignments.weights, more),
        first_tiles=tile_ends - tile_counts,
    )


def rows_for(routes: Routes, limits: Bounds, target: Index, n: int) -> Array:
    """Returns the rows [m] that go to a device; n behind the last one."""
    rows = lax.dynamic_slice_in_dim(routes.rows, routes.first_rows[target], limits.rows)
    return jnp.where(lax.iota(jnp.int32, limits.rows) < routes.row_counts[target], rows, n)


def _block_for(
    block: ExpertBlock, routes: Routes, limits: Bounds, target: Index, rows: Array, devices: int
) -> ExpertBlock:
    """Returns what goes to a device. The tiles behind its own are of other devices; it does not
    count them.
    """
    places, weights = (
        lax.dynamic_slice_in_dim(x, routes.first_tiles[target], limits.tiles)
        for x in (routes.places, routes.weights)
    )
    tiles = block.assignments.tiles
    of_target = lax.iota(jnp.int32, tiles.size) // (tiles.size // devices) == target

    def take(x: Array) -> Array:
        return x.at[rows].get(mode="fill", fill_value=0)

    if block.dy is None:
        dy = None
    else:
        dy = take(block.dy)
    return ExpertBlock(
        take(block.x), Assignments(places, weights, jnp.where(of_target, tiles, 0)), dy
    )


def _add_tiles(own: Array, parts: tuple[Array, ...], firsts: list[Array]) -> Array:
    """Adds to values in the tiles of a block those that came back, which are zeros behind the tiles
    of a device.
    """
    whole = jnp.pad(own, ((0, parts[0].shape[0]), (0, 0)))
    for part, first in zip(parts, firsts, strict=True):
        old = lax.dynamic_slice_in_dim(whole, first, part.shape[0])
        whole = lax.dynamic_update_slice_in_dim(whole, old + part, first, 0)
    return whole[: own.shape[0]]


def _arrive_together(devices: int) -> list[tuple[int, ...]]:
    """Returns the shifts whose blocks are multiplied together: opposite ones, the farthest first.

    What the last ones return travels alone, so those are the nearest.
    """
    return [tuple({shift, devices - shift}) for shift in range(devices // 2, 0, -1)]
