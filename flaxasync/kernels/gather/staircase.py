"""The order of work of all_gather_matmul where the gathered x stays in vector memory: a staircase, made before it runs.

HBM cannot bring all of w again for each group of rows that arrives, so tiles of w wait in vector memory for the groups
to come. An item is the product of one tile of w and one or more groups of rows. The order is made from rates:

```
columns  0 1 2 3 4 5        rows of this table are groups, in the order of their arrival; letters say in which order
group 0  a b d f . .        items are multiplied: tiles of w are fetched one after the other, and each is used at once
group 1  c c d f . .        for all groups that have arrived; each group that arrives is used for all tiles that are
group 2  e e e f . .        there. A tile that has had all groups makes room for the next.
```

Where room is short, a tile that has had all groups that are here makes room earlier, and is fetched again for the rest.
While nothing else is there to do, a tile is multiplied in pieces of its columns as they come. Rates only decide the
order: who uses a piece of a tile, or a group, first waits for it.
"""

import dataclasses

AHEAD = 2  # tiles of w that may be on their way
MARGIN = 0.05  # of the time of a tile: one that has been due for less may not be there


@dataclasses.dataclass(frozen=True)
class Item:
    """Some columns of one tile of w times some groups of rows, and what is done before."""

    column: int  # which tile
    group: int
    span: int  # groups
    slot: int  # where the tile lies
    begin: int  # first piece of the tile
    end: int  # the piece after the last
    awaited: int  # from this piece on, they are waited for
    whole: int  # 1: all pieces at once
    receives: int = 0  # the group that is waited for and sent onward before; 0 is none
    fetches: int = -1  # the tile that is fetched before; -1 is none
    into: int = 0  # slot of that tile


@dataclasses.dataclass(frozen=True)
class Rates:
    """Seconds, predicted.

    Attributes:
      multiply: of a tile and a group at peak.
      product: what one product takes beyond that.
      load: of a tile of w.
      latency: of a transfer.
      store: of the result of a tile and a group.
      trip: of a group over a link.
      hop_latency: of the same.
      entry: of the barrier.
      own: of a group of the own rows, from HBM.
    """

    multiply: float
    product: float
    load: float
    latency: float
    store: float
    trip: float
    hop_latency: float
    entry: float
    own: float


@dataclasses.dataclass(frozen=True)
class Order:
    items: tuple[Item, ...]
    loads: tuple[int, ...]  # tiles that are fetched before the first item, into slots 0, 1, ...
    seconds: float


class _Tile:
    """A tile of w in vector memory, or on its way."""

    def __init__(self, slot: int, begin: float, ready: float, left: dict[int, int]):
        self.slot, self.begin, self.ready = slot, begin, ready
        self.left = left  # group -> first piece that is to be done
        self.awaited = 0  # pieces that have been waited for

    def piece_ready(self, piece: int, pieces: int) -> float:
        return self.ready - (self.ready - self.begin) * (pieces - 1 - piece) / pieces


class _Planner:
    def __init__(
        self, groups: int, own: int, columns: int, slots: int, pieces: int, spans: tuple[int, ...], rates: Rates
    ) -> None:
        self.groups, self.own, self.pieces, self.spans, self.rates = groups, own, pieces, spans, rates
        self.left = {column: dict.fromkeys(range(groups), 0) for column in range(columns)}
        self.tiles: dict[int, _Tile] = {}
        self.free, self.waiting = list(range(slots)), list(range(columns))
        self.memory = rates.own  # when HBM has nothing left to do
        self.now = 0.0  # time of the core
        self.received = 0  # the last group that is here
        self.link = rates.entry  # when the link has nothing left to do
        self.arrivals = [rates.own + rates.latency]  # of groups

    def order(self) -> Order:
        items = []
        loads = tuple(self.waiting[: min(AHEAD, len(self.free))])
        for column in loads:
            self.load(column)
            while len(self.arrivals) < self.own:  # the other own rows come after the first tile
                self.memory += self.rates.own
                self.arrivals.append(self.memory + self.rates.latency)
        self.now = max(self.rates.entry, self.arrivals[0])
        self.send()
        while any(self.left.values()):
            receives = self.receive()
            fetches, into = self.fetch()
            items.append(dataclasses.replace(self.next(), receives=receives, fetches=fetches, into=into))
        return Order(tuple(items), loads, self.now + self.rates.store + self.rates.latency)

    @property
    def arrival(self) -> float:
        """Of the next group."""
        last = self.received + 1 == self.groups
        return float("inf") if last else self.arrivals[self.received + 1]

    def send(self) -> None:
        self.link = max(self.link, self.now) + self.rates.trip
        self.arrivals.append(self.link + self.rates.hop_latency)

    def load(self, column: int) -> int:
        begin = max(self.memory, self.now)
        self.memory = begin + self.rates.load
        slot = self.free.pop(0)
        self.tiles[column] = _Tile(slot, begin, self.memory + self.rates.latency, self.left[column])
        self.waiting.remove(column)
        return slot

    def receive(self) -> int:
        """The next group, if it is here or nothing can be done before it comes."""
        if self.arrival == float("inf"):
            return 0
        if self.arrival > self.now:
            soonest = min((self._able(tile) for tile in self.tiles.values() if self._here(tile)), default=float("inf"))
            if soonest <= self.arrival:
                return 0
            self.now = self.arrival
        self.received += 1
        if self.received < self.groups - self.own:
            self.send()
        return self.received

    def fetch(self) -> tuple[int, int]:
        """A tile that is fetched now: the one with the most to do. Makes room where the core will need it."""
        if not self.waiting or sum(tile.ready > self.now for tile in self.tiles.values()) >= AHEAD:
            return -1, 0
        if not self.free:
            self.evict()
        if not self.free:
            return -1, 0
        column = max(self.waiting, key=lambda c: (sum(g <= self.received for g in self.left[c]), -c))
        return column, self.load(column)

    def evict(self) -> None:
        done = [c for c, tile in self.tiles.items() if not self._here(tile) and tile.ready <= self.now]
        work = sum(len(self._here(tile)) for tile in self.tiles.values()) * self.rates.multiply
        if done and work < 1.5 * self.rates.load:
            self.free.append(self.tiles.pop(done[0]).slot)
            self.waiting.append(done[0])

    def next(self) -> Item:
        """The most groups that are ready for one tile, else the next pieces to come."""
        ready = [
            (-self._span(tile)[1], tile.ready, c)
            for c, tile in self.tiles.items()
            if self._here(tile) and (tile.awaited == self.pieces or tile.ready + MARGIN * self.rates.load <= self.now)
        ]
        if ready:
            column = min(ready)[2]
            tile = self.tiles[column]
            group, span = self._span(tile)
            begin, end = tile.left[group], self.pieces
        else:
            column = min((self._able(tile), c) for c, tile in self.tiles.items() if self._here(tile))[1]
            tile = self.tiles[column]
            group, span = min(tile.left), 1
            begin = tile.left[group]
            end = begin + 1
            while end < self.pieces and tile.piece_ready(end, self.pieces) <= self.arrival:
                end += 1
        whole = end - begin == self.pieces and (bool(ready) or self._whole_is_sooner(tile))
        item = Item(column, group, span, tile.slot, begin, end, max(begin, tile.awaited), int(whole))
        self._spend(tile, item)
        return item

    def _whole_is_sooner(self, tile: _Tile) -> bool:
        """Whether a tile on its way is done sooner in one product, which has to wait longer, than in pieces."""
        piece, end = self.rates.multiply / self.pieces + self.rates.product, self.now
        for i in range(self.pieces):
            end = max(end, tile.piece_ready(i, self.pieces)) + piece
        return max(self.now, tile.ready) + self.rates.multiply + self.rates.product <= end

    def _spend(self, tile: _Tile, item: Item) -> None:
        rates = self.rates
        if item.whole:
            self.now = max(self.now, tile.ready) + item.span * rates.multiply + rates.product
        else:
            for piece in range(item.begin, item.end):
                self.now = max(self.now, tile.piece_ready(piece, self.pieces))
                self.now += rates.multiply / self.pieces + rates.product
        self.memory = max(self.memory, self.now) + item.span * rates.store * (item.end - item.begin) / self.pieces
        tile.awaited = max(tile.awaited, item.end)
        for group in range(item.group, item.group + item.span):
            tile.left[group] = item.end
            if item.end == self.pieces:
                del tile.left[group]
        if not tile.left:
            self.free.append(tile.slot)
            del self.tiles[item.column]

    def _here(self, tile: _Tile) -> list[int]:
        return [group for group in tile.left if group <= self.received]

    def _span(self, tile: _Tile) -> tuple[int, int]:
        """The longest run of whole groups of which an item can be made: first group, groups. Else the first group."""
        whole = {group for group in self._here(tile) if tile.left[group] == 0}
        for span in sorted(self.spans, reverse=True):
            for group in sorted(whole):
                if whole.issuperset(range(group, group + span)):
                    return group, span
        return min(tile.left), 1

    def _able(self, tile: _Tile) -> float:
        """When the next piece of a tile can be multiplied."""
        return tile.piece_ready(tile.left[min(tile.left)], self.pieces)


def staircase(
    groups: int, own: int, columns: int, slots: int, pieces: int, spans: tuple[int, ...], rates: Rates
) -> Order:
    """Returns the order of all items.

    Args:
      groups: of rows.
      own: of these, of the device's own rows.
      columns: tiles of columns.
      slots: tiles of w that have room, two or more.
      pieces: of a tile, that arrive one after the other.
      spans: numbers of groups that an item may have; 1 is one of them.
      rates: of the chip.
    """
    return _Planner(groups, own, columns, slots, pieces, spans, rates).order()
