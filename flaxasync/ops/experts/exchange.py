"""How tokens and experts come together without a ring: a row travels only to devices that have an expert it chose.

Each device sends to the one that is s positions onward, for every shift s, the rows that chose an expert there, in
order, and the tiles of their assignments. A row that chose several experts of a device travels there once, and one sum
of what they return comes back. Blocks of opposite shifts arrive together and are multiplied together.

```
block        x [n, D], tiles [T, t]               of this device, sorted as for a ring
sent         x [m, D], tiles [T', t]              for each shift; m and T' are bounds that hold for every routing
returned     y [m, D], or dx [m, D], dweights     added to the rows and tiles that were sent
```

Shapes are static, and without a capacity all rows may choose one device: m is then n. With a capacity it is the rows
that the experts of a device take, if those are fewer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync.kernels.engine.operands import LANES
from flaxasync.ops.experts.assignments import Assignments
from flaxasync.ops.experts.local import Block, Experts
from flaxasync.ops.experts.packing import pack, unpack
from flaxasync.ring import Index, permutation


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Rows are exchanged over this mesh axis. Hashable, in place of a `flaxasync.ring.Ring`."""

    axis_name: str


class Bounds(NamedTuple):
    """The most that a device sends to another one, for any routing."""

    rows: int  # m
    tiles: int  # T'


class Routes(NamedTuple):
    """Where the rows of a block go, device after device."""

    rows: Array  # [T * t + m]: the rows for device 0, in order, then those for device 1, and so on
    first_rows: Array  # [R]: where those of each device begin
    row_counts: Array  # [R]
    places: Array  # [T + T', t]: where the row of an assignment is among those that travel with it; m for padding
    weights: Array  # [T + T', t]
    first_tiles: Array  # [R]: where the tiles of each device begin


def exchange(
    experts: Experts, axis_name: str, block: Block, carry: Any, work: Callable[[tuple[Block, ...], Any], Any]
) -> tuple[Any, Any]:
    """Returns the sum of what all devices make of the block of this device, and the carry of this device's work.

    Args:
      work: `(blocks, carry) -> (result of each block, carry)`, as for a ring.
    """
    devices, (n, features), dtype = lax.axis_size(axis_name), block.x.shape, block.x.dtype
    limits, me = bounds(experts, block, devices), lax.axis_index(axis_name)
    routes = find_routes(block.assignments, n, devices, limits)
    targets = {shift: (me + shift) % devices for shift in range(1, devices)}
    sent_rows = {shift: rows_for(routes, limits, target, n) for shift, target in targets.items()}
    sent = {
        shift: _block_for(block, routes, limits, target, sent_rows[shift], devices) for shift, target in targets.items()
    }

    def send(tree: Any, shift: int) -> Array:
        return lax.ppermute(pack(tree, features, dtype), axis_name, permutation(devices, shift))

    with jax.named_scope("send_rows"):
        arrived = {shift: unpack(send(sent[shift], shift), sent[shift]) for shift in _order(devices)}
    (own,), carry = work((block,), carry)
    returned: dict[int, Any] = {}
    for shifts in _arrive_together(devices):
        found, carry = work(tuple(arrived[shift] for shift in shifts), carry)
        with jax.named_scope("return_sums"):
            returned |= {s: unpack(send(one, -s), one) for s, one in zip(shifts, found, strict=True)}
    with jax.named_scope("add_sums"):
        shifts = tuple(returned)
        of_rows, *of_tiles = zip(*map(jax.tree.leaves, returned.values()), strict=True)
        own_rows, *own_tiles = jax.tree.leaves(own)
        rows = lax.concatenate([sent_rows[shift] for shift in shifts], 0)
        sums = experts.products.add_rows(own_rows, lax.concatenate(of_rows, 0), rows)
        for parts in of_tiles:
            firsts = [routes.first_tiles[targets[shift]] for shift in shifts]
            own_tiles = [_add_tiles(own_tiles[0], parts, firsts)]
    return jax.tree.unflatten(jax.tree.structure(own), [sums, *own_tiles]), carry


def bounds(experts: Experts, block: Block, devices: int) -> Bounds:
    """Returns the most rows and tiles that a device sends to another one."""
    (n, _), (tiles, t), local = block.x.shape, block.assignments.rows.shape, experts.count // devices
    taken = n if experts.capacity is None else min(n, experts.parts * experts.capacity)  # by one expert
    rows = min(n, local * taken)
    if t % LANES == 0:  # kernels multiply, and add rows in whole tiles
        rows = -(-rows // LANES) * LANES
    return Bounds(rows, min(tiles, local * (-(-taken // t))))


def find_routes(assignments: Assignments, n: int, devices: int, limits: Bounds) -> Routes:
    """Finds which rows of a block go to which device: by sorts, which take a TPU less time than scatters."""
    tiles, t = assignments.rows.shape
    of_device = jnp.sum(assignments.tiles.reshape(devices, -1), axis=1, dtype=jnp.int32)
    last_tiles, each = jnp.cumsum(of_device, dtype=jnp.int32), lax.iota(jnp.int32, devices)[:, None]
    device = jnp.sum(lax.iota(jnp.int32, tiles)[:, None] >= last_tiles, axis=1, dtype=jnp.int32)
    keys = (device[:, None] * (n + 1) + assignments.rows).reshape(-1)  # by device, then by row, and padding behind them
    keys, slots = lax.sort((keys, lax.iota(jnp.int32, tiles * t)), num_keys=1)
    device, row = keys // (n + 1), keys % (n + 1)
    is_first = (row < n) & (keys != jnp.pad(keys, (1, 0), constant_values=-1)[:-1])  # of the choices of a row
    counts = jnp.sum(is_first & (device == each), axis=1, dtype=jnp.int32)
    first_rows = jnp.cumsum(counts, dtype=jnp.int32) - counts
    before = jnp.sum(jnp.where(device == each, first_rows[:, None], 0), axis=0, dtype=jnp.int32)
    places = jnp.where(row < n, jnp.cumsum(is_first, dtype=jnp.int32) - 1 - before, limits.rows)
    _, places = lax.sort((slots, places), num_keys=1)
    rows = lax.sort(jnp.where(is_first, keys, devices * (n + 1))) % (n + 1)
    more = ((0, limits.tiles), (0, 0))
    return Routes(
        jnp.pad(rows, (0, limits.rows)), first_rows, counts, jnp.pad(places.reshape(tiles, t), more),
        jnp.pad(assignments.weights, more), last_tiles - of_device,
    )  # fmt: skip


def rows_for(routes: Routes, limits: Bounds, target: Index, n: int) -> Array:
    """Returns the rows [m] that go to a device; n behind the last one."""
    rows = lax.dynamic_slice_in_dim(routes.rows, routes.first_rows[target], limits.rows)
    return jnp.where(lax.iota(jnp.int32, limits.rows) < routes.row_counts[target], rows, n)


def _block_for(block: Block, routes: Routes, limits: Bounds, target: Index, rows: Array, devices: int) -> Block:
    """Returns what goes to a device. The tiles behind its own are of other devices; it does not count them."""
    places, weights = (
        lax.dynamic_slice_in_dim(x, routes.first_tiles[target], limits.tiles) for x in (routes.places, routes.weights)
    )
    tiles = block.assignments.tiles
    of_target = lax.iota(jnp.int32, tiles.size) // (tiles.size // devices) == target

    def take(x: Array) -> Array:
        return x.at[rows].get(mode="fill", fill_value=0)

    dy = None if block.dy is None else take(block.dy)
    return Block(take(block.x), Assignments(places, weights, jnp.where(of_target, tiles, 0)), dy)


def _add_tiles(own: Array, parts: tuple[Array, ...], firsts: list[Array]) -> Array:
    """Adds to values in the tiles of a block those that came back, which are zeros behind the tiles of a device."""
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


def _order(devices: int) -> list[int]:
    """Returns all shifts, in the order in which they are sent."""
    return [shift for shifts in _arrive_together(devices) for shift in shifts]
