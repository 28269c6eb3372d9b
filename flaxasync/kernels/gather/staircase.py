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
While nothing else is there to do, a tile is multiplied in pieces of its columns as they come; one that is waited for as
a whole comes in one transfer. Results leave from places in a circle, and an item waits for those whose places it takes.
Rates only decide the order: who uses a piece of a tile, a group or a place, waits for it first.
"""

import dataclasses
from collections import deque

from flaxasync.kernels.gather.items import LEAVING, Item, Order, Rates, Sizes

AHEAD = (2, 3)  # tiles of w that may be on their way; what is sooner done is taken
MARGINS = (0.0, 0.05)  # of the time of a tile: one that has been due for less may not be there; likewise


class _Tile:
    """A tile of w in vector memory, or on its way."""

    def __init__(self, slot: int, begin: float, ready: float, left: dict[int, int]):
        self.slot, self.begin, self.ready = slot, begin, ready
        self.left = left  # group -> first piece that is to be done
        self.awaited = 0  # pieces that have been waited for

    def piece_ready(self, piece: int, pieces: int) -> float:
        return self.ready - (self.ready - self.begin) * (pieces - 1 - piece) / pieces


class _Planner:
    def __init__(self, sizes: Sizes, rates: Rates, ahead: int, margin: float) -> None:
        self.sizes, self.rates, self.ahead, self.margin = sizes, rates, ahead, margin
        self.left = {column: dict.fromkeys(range(sizes.groups), 0) for column in range(sizes.columns)}
        self.tiles: dict[int, _Tile] = {}
        self.free, self.waiting = list(range(sizes.slots)), list(range(sizes.columns))
        self.leaving: deque[tuple[int, int, float]] = deque()  # results: place, groups, when they have left
        self.place, self.gone = 0, 0  # of the next result; items whose results have left
        self.memory = sizes.own * rates.own  # when HBM has nothing left to do
        self.now = 0.0  # time of the core
        self.received = sizes.own - 1  # the last group that is here
        self.link = rates.entry  # when the link has nothing left to do
        self.arrivals = [(group + 1) * rates.own + rates.latency for group in range(sizes.own)]  # of groups

    def order(self) -> Order:
        items = []
        loads = tuple(self.waiting[: min(self.ahead, len(self.free))])
        for column in loads:
            self.load(column)
        for group in range(self.sizes.own):
            self.now = max(self.rates.entry, self.arrivals[group])
            self.send()
        while any(self.left.values()):
            receives = self.receive()
            fetches, into = self.fetch()
            items.append(dataclasses.replace(self.next(), receives=receives, fetches=fetches, into=into))
        return Order(self.at_once(items), loads, max(time for _, _, time in self.leaving))

    def at_once(self, items: list[Item]) -> tuple[Item, ...]:
        """Lets tiles come in one transfer whose first item waits for all of them."""
        for number, item in enumerate(items):
            if item.fetches >= 0 and self.sizes.pieces > 1:
                first = next(i for i in range(number, len(items)) if items[i].column == item.fetches)
                if items[first].whole:
                    items[number] = dataclasses.replace(items[number], at_once=1)
                    items[first] = dataclasses.replace(items[first], awaited=-1)
        return tuple(items)

    @property
    def arrival(self) -> float:
        """Of the next group."""
        last = self.received + 1 == self.sizes.groups
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
        if self.received < self.sizes.groups - self.sizes.own:
            self.send()
        return self.received

    def fetch(self) -> tuple[int, int]:
        """A tile that is fetched now: the one with the most to do. Makes room where the core will need it."""
        if not self.waiting or sum(tile.ready > self.now for tile in self.tiles.values()) >= self.ahead:
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
        soon = self.now - self.margin * self.rates.load
        ready = [
            (-self._span(tile)[1], tile.ready, c)
            for c, tile in self.tiles.items()
            if self._whole(tile) and (tile.awaited == self.sizes.pieces or tile.ready <= soon)
        ]
        if ready:
            column = min(ready)[2]
            tile = self.tiles[column]
            group, span = self._span(tile)
            item = Item(column, group, span, tile.slot, 0, self.sizes.pieces, tile.awaited, 1)
        else:
            item = self._pieces()
        place, gone, goes = self._put(item.span)
        item = dataclasses.replace(item, place=place, gone=gone, goes=goes)
        self._spend(self.tiles[item.column], item)
        return item

    def _pieces(self) -> Item:
        """The next pieces of one tile, for all groups that have come as far; until something else can be done."""
        runs = sorted(
            (max(self.now, tile.piece_ready(begin, self.sizes.pieces)), -span, c, group, begin)
            for c, tile in self.tiles.items()
            for group, span, begin in self._runs(tile)
        )
        _, negative, column, group, begin = runs[0]
        tile, span, end, now = self.tiles[column], -negative, begin + 1, runs[0][0]
        others = min((run[0] for run in runs[1:]), default=float("inf"))
        while end < self.sizes.pieces:
            now += span * self.rates.multiply / self.sizes.pieces + self.rates.product
            come = tile.piece_ready(end, self.sizes.pieces)
            if come > now and come > min(others, self.arrival):
                break
            now = max(now, come)
            end += 1
        whole = end - begin == self.sizes.pieces and (self.sizes.pieces == 1 or self._whole_is_sooner(tile, span))
        return Item(column, group, span, tile.slot, begin, end, max(begin, tile.awaited), int(whole))

    def _whole_is_sooner(self, tile: _Tile, span: int) -> bool:
        """Whether a tile on its way is done sooner in one product, which has to wait longer, than in pieces."""
        piece, end = span * self.rates.multiply / self.sizes.pieces + self.rates.product, self.now
        for i in range(self.sizes.pieces):
            end = max(end, tile.piece_ready(i, self.sizes.pieces)) + piece
        return max(self.now, tile.ready) + span * self.rates.multiply + self.rates.product <= end

    def _put(self, span: int) -> tuple[int, int, int]:
        """The place of a result, around in a circle; waits for results that were there."""
        first = self.place if self.place + span <= self.sizes.room else 0
        met = [place < first + span and first < place + groups for place, groups, _ in self.leaving]
        goes = max(max((i + 1 for i, meets in enumerate(met) if meets), default=0), len(met) + 1 - LEAVING)
        for _ in range(goes):
            self.now = max(self.now, self.leaving.popleft()[2])
        self.place, self.gone = first + span, self.gone + goes
        return first, self.gone, goes

    def _spend(self, tile: _Tile, item: Item) -> None:
        rates = self.rates
        self.now += rates.item
        if item.whole:
            self.now = max(self.now, tile.ready)
            groups = min(item.span, self.sizes.most)
            for _ in range(item.span // groups):
                self.now += groups * rates.multiply + rates.product
                self.memory = max(self.memory, self.now) + groups * rates.store
        else:
            for piece in range(item.begin, item.end):
                self.now = max(self.now, tile.piece_ready(piece, self.sizes.pieces))
                self.now += item.span * rates.multiply / self.sizes.pieces + rates.product
                self.memory = max(self.memory, self.now) + item.span * rates.store / self.sizes.pieces
        self.leaving.append((item.place, item.span, self.memory + rates.latency))
        tile.awaited = max(tile.awaited, item.end)
        for group in range(item.group, item.group + item.span):
            tile.left[group] = item.end
            if item.end == self.sizes.pieces:
                del tile.left[group]
        if not tile.left:
            self.free.append(tile.slot)
            del self.tiles[item.column]

    def _here(self, tile: _Tile) -> list[int]:
        return [group for group in tile.left if group <= self.received]

    def _whole(self, tile: _Tile) -> bool:
        """Whether a group is here of which no piece has been done."""
        return any(tile.left[group] == 0 for group in self._here(tile))

    def _span(self, tile: _Tile) -> tuple[int, int]:
        """The longest run of whole groups of which an item can be made: first group, groups."""
        whole = {group for group in self._here(tile) if tile.left[group] == 0}
        return self._longest(whole, self.sizes.spans)

    def _longest(self, groups: set[int], spans: tuple[int, ...]) -> tuple[int, int]:
        """The longest of some spans that some groups have side by side: first group, groups."""
        runs = ((g, span) for span in sorted(spans, reverse=True) for g in sorted(groups))
        return next((g, span) for g, span in runs if groups.issuperset(range(g, g + span)))

    def _runs(self, tile: _Tile) -> list[tuple[int, int, int]]:
        """Groups that have come as far: for each piece, the longest run of which an item can be made."""
        far: dict[int, set[int]] = {}
        for group in self._here(tile):
            far.setdefault(tile.left[group], set()).add(group)
        return [(*self._longest(groups, self.sizes.together), begin) for begin, groups in far.items()]

    def _able(self, tile: _Tile) -> float:
        """When the next piece of a tile can be multiplied."""
        return min(tile.piece_ready(tile.left[group], self.sizes.pieces) for group in self._here(tile))


def staircase(sizes: Sizes, rates: Rates) -> Order:
    """Returns the order of all items that is soonest done by the chip's rates, of a few."""
    orders = (_Planner(sizes, rates, ahead, margin).order() for ahead in AHEAD for margin in MARGINS)
    return min(orders, key=lambda order: order.seconds)
