"""The static schedule of the resident form of all_gather_matmul: which products a device computes,
in which order.

A task multiplies some consecutive arrivals of x by one tile of w. While the kernel is traced,
`schedule` simulates one device with the rates of its chip and lists the tasks; the kernel reads
them from a table.

Few tiles of w have room in vector memory, and x arrives while the first of them are multiplied. So
the tiles are visited in turn, as often as it takes. A visit lasts while arrivals are there that the
tile has not been multiplied by. It ends early if they are fewer than one product takes and another
tile has enough of them. The tiles of the next visits are fetched meanwhile, each in the place of
the one whose next visit is the farthest away.
"""

import dataclasses
import math

# tiles of w that should be in vector memory: this visit's and those of the next two
FETCH_AHEAD = 3


@dataclasses.dataclass(frozen=True)
class Task:
    """Consecutive arrivals times one tile of w, and what is done before."""

    column: int  # the tile of w, by its number among the tiles of columns
    w_slot: int  # the slot where it lies
    awaits: int  # 1 if the tile has to be waited for, else 0
    first: int  # the first arrival
    count: int  # number of arrivals, a power of two
    receives: int  # number of arrivals that are waited for, and sent onward, before
    received: int  # the first of them
    fetches: int  # the tile of w that is fetched before; -1 for none
    fetch_slot: int  # the slot that it is fetched into
    # the tile on its way into that slot, which was fetched too early and not used; -1 for none
    unused: int
    out_slot: int  # the slot of the result of the first arrival; the others follow
    # number of these slots, from the first on, whose former results have to leave before
    waits: int


@dataclasses.dataclass(frozen=True)
class TaskSizes:
    arrivals: int  # arrivals of x
    own: int  # of these, the device's own rows
    columns: int  # tiles of w
    w_slots: int  # slots for tiles of w, two or more
    # arrivals that one product takes, at most; a power of two. A task has up to twice as many
    most: int
    out_slots: int  # slots for the results of one arrival, twice `most` or more


@dataclasses.dataclass(frozen=True)
class TaskRates:
    """What everything takes, in seconds."""

    multiply: float  # the products of one arrival and a tile of w, at the peak rate
    product: float  # what each product takes beyond that
    task: float  # what each task takes beyond its products
    load: float  # the transfer of a tile of w from HBM
    own: float  # the transfer of one arrival of the device's own rows from HBM
    store: float  # the transfer of the result of one arrival to HBM
    latency: float  # latency of a transfer from or to HBM
    hop: float  # the transfer of one arrival over a link
    hop_latency: float  # latency of one hop
    entry: float  # the barrier at the kernel's entry


@dataclasses.dataclass(frozen=True)
class TaskSchedule:
    tasks: tuple[Task, ...]
    # tiles of w that are fetched before the first task, into the first slots
    loads: tuple[int, ...]
    seconds: float  # when the last result has left, by the rates

    @property
    def fetches(self) -> int:
        return len(self.loads) + sum(task.fetches >= 0 for task in self.tasks)


def schedule(sizes: TaskSizes, rates: TaskRates) -> TaskSchedule:
    return _Device(sizes, rates).run()


@dataclasses.dataclass
class _Fetched:
    """A tile of w in vector memory, or on its way there."""

    slot: int
    ready: float
    awaited: bool = False


class _Device:
    def __init__(self, sizes: TaskSizes, rates: TaskRates):
        self.sizes = sizes
        self.rates = rates
        self.now = 0.0
        # when all transfers from and to HBM are done that were started
        self.memory_free = sizes.own * rates.own
        self.links_free = rates.entry  # the same of the links
        self.arrival_times = [
            (number + 1) * rates.own + rates.latency for number in range(sizes.own)
        ]
        self.received = 0
        self.done = [0] * sizes.columns  # arrivals that each tile of w has been multiplied by
        self.fetched: dict[int, _Fetched] = {}
        self.free_slots = list(range(sizes.w_slots))
        self.leaving: dict[int, float] = {}  # when the result in an out slot has left
        self.next_out_slot = 0
        self.visit = 0

    def run(self) -> TaskSchedule:
        loads = tuple(self._upcoming()[:2])
        for column in loads:
            self._load(column)
        for number in range(self.sizes.own):
            self.now = max(self.now, self.arrival_times[number], self.rates.entry)
            self._receive()
        tasks = []
        received = self.sizes.own
        while min(self.done) < self.sizes.arrivals:
            column = self._next_column()
            tasks.append(self._task(column, received))
            received += tasks[-1].receives
            self._receive()
            self.visit += self._ends_visit(column)
        return TaskSchedule(tuple(tasks), loads, max(self.now, *self.leaving.values()))

    def _next_column(self) -> int:
        """Returns the tile of w of this visit. Waits for an arrival if no tile has anything to be
        multiplied by.
        """
        while True:
            self._receive()
            column = self.visit % self.sizes.columns
            if self.done[column] < self.received:
                return column
            if min(self.done) < self.received:
                self.visit += 1
            else:
                self.now = max(self.now, self.arrival_times[self.received])

    def _task(self, column: int, received: int) -> Task:
        """Returns the next task of a visit, and spends its time."""
        rates = self.rates
        most = self.sizes.most
        first = self.done[column]
        receives = self.received - received
        # The kernel fetches before it multiplies. The tile of this visit stays where it is, since
        # it is the first of `_upcoming`.
        fetches, fetch_slot, unused = self._fetch()
        tile = self.fetched[column]
        awaits = not tile.awaited
        tile.awaited = True
        self.now = max(self.now + rates.task, tile.ready)
        count = 2 ** int(math.log2(min(self.received - first, 2 * most)))
        out_slot, waits = self._take_out_slots(count)
        self.now += count * rates.multiply + math.ceil(count / most) * rates.product
        self.memory_free = max(self.memory_free, self.now) + count * rates.store
        self.leaving |= dict.fromkeys(
            range(out_slot, out_slot + count), self.memory_free + rates.latency
        )
        self.done[column] += count
        if self.done[column] == self.sizes.arrivals:
            self.free_slots.append(self.fetched.pop(column).slot)
        return Task(
            column,
            tile.slot,
            int(awaits),
            first,
            count,
            receives,
            received,
            fetches,
            fetch_slot,
            unused,
            out_slot,
            waits,
        )

    def _ends_visit(self, column: int) -> bool:
        left = self.received - self.done[column]
        enough = (
            self.received - self.done[other] >= self.sizes.most and tile.ready <= self.now
            for other, tile in self.fetched.items()
            if other != column
        )
        return left == 0 or (
            left < self.sizes.most and self.received < self.sizes.arrivals and any(enough)
        )

    def _receive(self) -> None:
        """Receives what has arrived, and sends it onward, but for what came in the last hop."""
        while (
            self.received < len(self.arrival_times)
            and self.arrival_times[self.received] <= self.now
        ):
            self.received += 1
            if self.received <= self.sizes.arrivals - self.sizes.own:
                self.links_free = max(self.links_free, self.now) + self.rates.hop
                self.arrival_times.append(self.links_free + self.rates.hop_latency)

    def _upcoming(self) -> list[int]:
        """Returns the tiles of w that are not finished, in the order of their next visits."""
        columns = self.sizes.columns
        order = ((self.visit + number) % columns for number in range(columns))
        return [column for column in order if self.done[column] < self.sizes.arrivals]

    def _fetch(self) -> tuple[int, int, int]:
        """Fetches the first tile of the next visits that is not there: `fetches`, `fetch_slot`,
        `unused` of a task.
        """
        upcoming = self._upcoming()
        soon = upcoming[: min(self.sizes.w_slots, FETCH_AHEAD)]
        missing = [column for column in soon if column not in self.fetched]
        others = [column for column in self.fetched if column not in soon]
        if not missing or not (self.free_slots or others):
            return -1, 0, -1
        unused = -1
        if not self.free_slots:
            farthest = max(others, key=upcoming.index)
            tile = self.fetched.pop(farthest)
            self.free_slots.append(tile.slot)
            if not tile.awaited:
                unused = farthest
                self.now = max(self.now, tile.ready)
        return missing[0], self._load(missing[0]), unused

    def _load(self, column: int) -> int:
        """Starts the transfer of a tile of w; returns its slot."""
        slot = self.free_slots.pop(0)
        self.memory_free = max(self.memory_free, self.now) + self.rates.load
        self.fetched[column] = _Fetched(slot, self.memory_free + self.rates.latency)
        return slot

    def _take_out_slots(self, count: int) -> tuple[int, int]:
        """Waits for and returns the next out slots, around in a circle: `out_slot` and `waits` of a
        task.
        """
        first = self.next_out_slot
        if first + count > self.sizes.out_slots:
            first = 0
        self.next_out_slot = first + count
        former = [slot for slot in range(first, first + count) if slot in self.leaving]
        for slot in former:
            self.now = max(self.now, self.leaving.pop(slot))
        return first, len(former)
