"""What `staircase` puts in order, and what it makes of it: sizes and rates, items and their order."""

import dataclasses

LEAVING = 16  # items whose results may be leaving at once; a power of two


@dataclasses.dataclass(frozen=True)
class Item:
    """Some columns of one tile of w times some groups of rows, and what is done before."""

    column: int  # which tile
    group: int
    span: int  # groups
    slot: int  # where the tile lies
    begin: int  # first piece of the tile
    end: int  # the piece after the last
    awaited: int  # from this piece on, they are waited for; -1: for all that come in one transfer
    whole: int  # 1: all pieces at once
    receives: int = 0  # the group that is waited for and sent onward before; 0 is none
    fetches: int = -1  # the tile that is fetched before; -1 is none
    into: int = 0  # slot of that tile
    at_once: int = 0  # 1: that tile comes in one transfer, as all of it is waited for at once
    place: int = 0  # of the result, in groups
    gone: int = 0  # so many items' results have left before
    goes: int = 0  # of these, the last ones, which are waited for before


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of what is put in order.

    Attributes:
      groups: of rows.
      own: of these, of the device's own rows.
      columns: tiles of columns.
      slots: tiles of w that have room, two or more.
      pieces: of a tile, that arrive one after the other.
      spans: numbers of groups that an item may have; 1 is one of them.
      together: of these, those that it may have where it is done in pieces; likewise.
      most: groups that one product takes, one of the spans.
      room: groups whose results have room, as many as the largest span or more.
    """

    groups: int
    own: int
    columns: int
    slots: int
    pieces: int
    spans: tuple[int, ...]
    together: tuple[int, ...]
    most: int
    room: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """Seconds, predicted.

    Attributes:
      multiply: of a tile and a group at peak.
      product: what one product takes beyond that.
      item: what an item takes beyond its products.
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
    item: float
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


@dataclasses.dataclass(frozen=True)
class Row(Item):
    """An item as the table has it: with a negative span where it is done in pieces."""

    awaits: int = 0  # 1: the tile, or pieces of it, are waited for before

    @classmethod
    def of(cls, item: Item, pieces: int) -> "Row":
        fields = dataclasses.asdict(item) | {"span": item.span if item.whole else -item.span}
        return cls(**fields, awaits=int(item.whole and item.awaited < pieces))
