"""What the parts of a simulation share: the program, the chips, the devices, and what happens next."""

import heapq
import math
from collections import Counter
from collections.abc import Callable

from flaxasync.check.estimate.timeline import Slice
from flaxasync.check.player.addresses import Addresses
from flaxasync.check.player.basic_blocks import Code
from flaxasync.check.player.chip_grid import ChipGrid, Coords
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.dump import Dump
from flaxasync.check.player.errors import PlayerError
from flaxasync.check.player.launch import first_bundle, prepare_memory
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.recorder import Recorder
from flaxasync.check.player.vector_clocks import VectorClocks


class EventQueue:
    """The events that have not happened yet.

    Events at the same time happen in the order in which they were queued, so that a simulation is the same every time.
    """

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._queued = 0

    @property
    def next(self) -> float:
        """The time of the next event; infinity if there is none."""
        return self._events[0][0] if self._events else math.inf

    def at(self, time: float, answer: Callable[[], None]) -> None:
        """Queues an event."""
        self._queued += 1
        heapq.heappush(self._events, (time, self._queued, answer))

    def pop(self) -> tuple[float, Callable[[], None]]:
        """Removes the next event, and returns its time and what happens then."""
        time, _, answer = heapq.heappop(self._events)
        return time, answer


class State:
    """The state of a simulation of a program on a grid of chips, whose partitions are on the chips `coords`."""

    def __init__(
        self, dump: Dump, grid: ChipGrid, coords: tuple[Coords, ...], chip: PlayedChip, accept: frozenset[str]
    ):
        self.dump, self.grid, self.chip = dump, grid, chip
        self.addresses = Addresses(chip.hbm_unit)
        for program in dump.programs.values():
            self.addresses.add(program)
        self.codes = {n: Code(p, self.addresses, chip, accept) for n, p in dump.programs.items()}
        cores = [coords[:device].count(chip) for device, chip in enumerate(coords)]
        # The number of each partition's chip (and core), as programs address it.
        self.chips = [grid.chip_id(chip) * grid.cores + core for chip, core in zip(coords, cores, strict=True)]
        self.prepared = prepare_memory(dump, self.addresses, self.chips)
        self.slices: list[Slice] = []  # of all devices, in the order in which they ended
        top = self.codes[dump.top.name]
        self.machines = []
        for device, number in enumerate(self.chips):
            machine = Machine(device, coords[device], self.addresses, top, Recorder(device, chip, self.slices))
            machine.position, machine.parameters = first_bundle(top), self.prepared.parameters
            machine.scalars = self.prepared.scalars(device, *divmod(number, grid.cores))
            self.machines.append(machine)
        self.clocks = VectorClocks(len(coords))
        self.queue = EventQueue()  # of all that happens next, except the ends of transfers
        self.notes: Counter[str] = Counter()  # what the simulation could not know, and how often
        self._by_number = dict(zip(self.chips, self.machines, strict=True))

    def addressed(self, chip: int, core: int, sender: Machine) -> Machine:
        """Returns the device that a program addresses by chip and core."""
        number = chip * self.grid.cores + core % self.grid.cores
        if number not in self._by_number:
            raise PlayerError(
                f"{sender.kernel} on device {sender.device} addresses chip {chip}, which {self.grid.name} lacks: "
                "name the topology that the program was compiled for"
            )
        return self._by_number[number]
