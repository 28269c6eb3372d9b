"""What all_gather_matmul decides while it is traced, where the gathered x stays in vector memory: sizes and order.

Products of a group, tiles of w and how many of them wait in vector memory: all that has room is put in order with the
chip's rates, and the soonest done is taken. `resident` is what a device then does.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from flaxasync.kernels.gather.columns import Columns
from flaxasync.kernels.gather.hops import Parts
from flaxasync.kernels.gather.items import Order, Rates, Sizes
from flaxasync.kernels.gather.staircase import staircase
from flaxasync.kernels.tiles import LANES, RESERVED, Tiles, chip_in_use, largest_side, sublanes

TILES = Tiles(512, 0x7FFFFFFF, 1280)
ROOM = 3072  # rows whose results may be leaving at once: in HBM they stand behind tiles of w
ITEMS = 256  # that the table has room for
ARRIVALS = 384  # that have a semaphore each, of the 512 that a kernel may have
CYCLES = 13_500  # of one product in the code, about one instruction each
PER_ITEM, PER_PRODUCT = 180, 240  # cycles that each takes beside multiplications at peak, as played on v6e
NEAR_BEST = 1.005  # fewer tiles of w in vector memory, where that costs no more
ENTRY, LATENCY = 1.5e-6, 0.5e-6  # s: the barrier; a transfer from HBM
CHUNKS = (1, 2, 4)  # that a block may be cut into
CHUNK = 128  # rows of a group that chunks keep, or more
SPANS = (1, 2, 4, 8)
PIECE = 2 * LANES  # columns of w that can be waited for alone


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is held, and the order of work.

    Attributes:
      groups: of rows, as they arrive.
      batches, rows: of one product, within a group.
      down: products in the rows of one batch.
      products: of a group.
      k: contracted at once.
      depth: tiles of k.
      columns: tiles of columns.
      slots: tiles of w in vector memory.
      pieces: of a tile of w, waited for one by one.
      spans: numbers of groups that an item may take.
      together: of these, those that it may take where it is done in pieces of a tile.
      most: groups that one product takes; items of more loop over it.
      room: groups whose results have room.
      parts: of a group.
      order: of all items.
      vmem_bytes: that all of this takes.
    """

    groups: int
    batches: int
    rows: int
    down: int
    products: int
    k: int
    depth: int
    columns: Columns
    slots: int
    pieces: int
    spans: tuple[int, ...]
    together: tuple[int, ...]
    most: int
    room: int
    parts: Parts
    order: Order
    vmem_bytes: int

    @property
    def m(self) -> int:
        return self.batches * self.rows

    @property
    def elements_read(self) -> int:
        """Elements of x and w from HBM."""
        tiles = len(self.order.loads) + sum(item.fetches >= 0 for item in self.order.items)
        k = self.k * self.depth
        return self.products * self.m * k + tiles * k * self.columns.n


def plan(whole: Parts, size: int, k: int, widths: Sequence[int], tiles: Tiles, dtype: Any) -> Plan | None:
    """Returns the fastest plan by the chip's rates; None if the gathered x has no room.

    Of plans that are about as fast, it is the one with the fewest tiles of w in vector memory. Never are all tiles of w
    there, unless it has no more than two: one that has had all groups makes room for one that is still in HBM.
    """
    unit = CHUNK // whole.count if whole.along_rows else CHUNK
    chunks = [c for c in CHUNKS if c == 1 or (whole.rows % (c * unit) == 0)]
    plans = [
        plan
        for c in chunks
        for plan in _plans(dataclasses.replace(whole, chunks=c, rows=whole.rows // c), size, k, widths, tiles, dtype)
    ]
    if not plans:
        return None
    best = min(plan.order.seconds for plan in plans)
    near = [plan for plan in plans if plan.order.seconds <= NEAR_BEST * best]
    return min(near, key=lambda plan: (plan.slots, plan.order.seconds))


def _plans(parts: Parts, size: int, k: int, widths: Sequence[int], tiles: Tiles, dtype: Any) -> list[Plan]:
    """Plans for all numbers of slots that have room."""
    chip, itemsize = chip_in_use(), jnp.dtype(dtype).itemsize
    (all_batches, all_rows), unit = parts.group, sublanes(dtype)
    group = all_batches * all_rows
    if group <= tiles.m:  # one product for all parts: the fewer and larger, the less of them is filling and draining
        batches, rows = all_batches, all_rows
    else:
        rows = largest_side(parts.rows, tiles.m, unit)
        batches = largest_side(parts.batches, max(1, tiles.m // rows), 1) if rows == parts.rows else 1
    m = batches * rows
    columns = Columns.of(widths, tiles.n, PIECE if max(widths) >= PIECE else LANES)
    n = columns.n
    most = CYCLES * chip.flops / (2 * m * n * chip.clock)
    depth = next(d for d in range(1, k // LANES + 1) if k % (d * LANES) == 0 and (k // d <= most or k == d * LANES))
    alone, groups = m == group, size * parts.chunks
    one = max(s for s in SPANS if s == 1 or (alone and s * m <= tiles.m and s * (k // depth) <= most))
    spans = tuple(s for s in SPANS if s <= (2 * one if alone else 1))
    pieces = n // PIECE if alone and all(w % n == 0 for w in widths) and n % PIECE == 0 else 1
    together = tuple(s for s in spans if s <= min(parts.chunks, one)) if pieces > 1 else ()
    room = max(spans[-1], ROOM // group, 2)
    fixed = itemsize * (groups * group * k + room * group * n) + 4 * spans[-1] * m * n * (1 + (depth > 1))
    tile = itemsize * k * n
    most_slots = (chip.vmem_bytes - RESERVED - fixed) // tile
    if groups * columns.count > ITEMS or parts.count * (groups - parts.chunks) > ARRIVALS:
        return []
    hbm = chip.hbm_bandwidth * chip.hbm_efficiency
    rates = Rates(
        multiply=2 * group * k * n / chip.flops,
        product=(group // m) * depth * PER_PRODUCT / chip.clock,
        item=PER_ITEM / chip.clock,
        load=tile / hbm,
        latency=LATENCY,
        store=group * n * itemsize / hbm,
        trip=group // parts.count * k * itemsize / chip.link_bandwidth,
        hop_latency=chip.hop_latency,
        entry=ENTRY,
        own=group * k * itemsize / hbm,
    )

    def made(slots: int) -> Plan:
        sizes = Sizes(groups, parts.chunks, columns.count, slots, pieces, spans, together or spans, one, room)
        order = staircase(sizes, rates)
        return Plan(
            groups, batches, rows, max(1, parts.rows // rows), group // m, k // depth, depth, columns, slots, pieces,
            spans, together, one, room, parts, order, fixed + slots * tile,
        )  # fmt: skip

    return [made(slots) for slots in range(2, min(most_slots, max(2, columns.count - 1)) + 1)]
