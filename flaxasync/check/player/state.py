"""What the parts of a simulation share: the program, the devices, what they know of each other, and
what happens next.
"""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from flaxasync.check.estimate.timeline import Slice
from flaxasync.check.player import routing
from flaxasync.check.player.chips import Coords
from flaxasync.check.player.dump import TOP
from flaxasync.check.player.errors import PlayerError
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.prepared import REGISTRY, REGISTRY_TAG, PreparedProgram
from flaxasync.check.player.result import EndedWait, Recorder

# The seconds for which a part goes on after it was found to be too small, so that more of its
# neighbours are found as well: devices signal all their neighbours when they begin a kernel.
_FIRST_SIGNALS = 10e-6

# for each device, the number of instructions that it is known to have entered
type Progress = list[int]


class VectorClocks:
    """What each device knows about the progress of the others.

    The progress of a device is the number of instructions that it has entered. Signals and
    transfers carry what their sender knows. A kernel that writes into another device must know that
    the other one has entered the same kernel. If it does not, the write is a race, even if the
    timing of this simulation happens to be harmless. Devices that take different branches of a
    program have entered different numbers of instructions when they are in the same one.
    """

    def __init__(self, devices: int):
        self._known: list[Progress] = [[0] * devices for _ in range(devices)]
        self._entered: list[dict[str, list[int]]] = [defaultdict(list) for _ in range(devices)]

    def enter(self, device: int, instruction: str) -> None:
        self._known[device][device] += 1
        self._entered[device][instruction].append(self._known[device][device])

    def known_to(self, device: int) -> Progress:
        """Returns what a device knows at this moment, for a message to carry."""
        return list(self._known[device])

    def learn(self, device: int, message: Progress) -> None:
        """Adds to what a device knows the message that it received."""
        known = self._known[device]
        known[:] = map(max, known, message)

    def synchronize(self, devices: Sequence[int]) -> None:
        """Lets each of some devices know what any of them knows, because they have met in a
        collective.
        """
        everything = [
            max(values) for values in zip(*(self._known[d] for d in devices), strict=True)
        ]
        for device in devices:
            self._known[device] = list(everything)

    def knows_to_have_entered(self, device: int, other: int, instruction: str) -> bool:
        """Says whether a device knows that another one has entered the instruction as often as it
        has itself.
        """
        times = len(self._entered[device][instruction])
        others = self._entered[other][instruction]
        return len(others) >= times and self._known[device][other] >= others[times - 1]


class State:
    """The state of a simulation of a program.

    Only the devices of `part` run, where one is given, and what they send to others has no effect.
    The simulation of a part is not continued beyond the time `stop_at`, in cycles, which is a
    little later than that at which one of its devices first sends to one outside: a larger part is
    needed then.

    A `mirrored` state has a part of one device, and takes all others to do the same as it does: it
    receives what it sends.
    """

    def __init__(
        self,
        prepared: PreparedProgram,
        part: Collection[int] | None = None,
        *,
        mirrored: bool = False,
    ):
        self.prepared = prepared
        self.dump = prepared.dump
        self.grid = prepared.grid
        self.chip = prepared.chip
        self.addresses = prepared.addresses
        self.slices: list[Slice] = []  # of all devices, in the order in which they ended
        self.waits: list[EndedWait] = []  # likewise
        self.notes: Counter[str] = Counter()  # what the simulation could not know, and how often
        self.machines = [self._machine(device) for device in range(len(prepared.places))]
        self.running = self.machines
        if part is not None:
            self.running = [self.machines[device] for device in sorted(part)]
        self._part = None if part is None else frozenset(part)
        self.mirrored = mirrored
        self.reached: set[int] = set()  # devices to which others sent something, or which they met
        self.passed: set[Coords] = set()  # chips on the routes of transfers and signals
        self.stop_at = math.inf
        self.clocks = VectorClocks(len(self.machines))
        # a heap: their times, their order, what happens
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._by_number = dict(zip(prepared.numbers, self.machines, strict=True))

    def _machine(self, device: int) -> Machine:
        prepared = self.prepared
        chip_id, core = divmod(prepared.numbers[device], self.grid.cores)
        names = {"chip ID": chip_id, "core index": core, "partition id": device}
        machine = Machine(
            device=device,
            coords=prepared.places[device][0],
            addresses=self.addresses,
            code=prepared.codes[TOP],
            position=prepared.begin,
            parameters=prepared.memory.parameters,
            scalars=names | prepared.memory.scalars,
            recorder=Recorder(device, self.chip, self.slices, self.waits),
            notes=self.notes,
        )
        for register, value in prepared.constants.items():
            machine.registers[register] = value
        self._give_routing_table(machine, chip_id)
        return machine

    def progress(self) -> str:
        """Says how far the simulation has come."""
        now = min(machine.now for machine in self.running)
        where = next(machine.phase for machine in self.running if machine.now == now)
        return (
            f"simulating {len(self.running)} devices, {self.chip.seconds(now) * 1e3:.3f} ms of "
            f"the program, at {where}"
        )

    @property
    def next_event(self) -> float:
        """The time of the next event; infinity if there is none."""
        if self.events:
            return self.events[0][0]
        return math.inf

    def at(self, time: float, answer: Callable[[], None]) -> None:
        """Queues an event. Events at the same time happen in the order in which they were
        queued.
        """
        heapq.heappush(self.events, (time, next(self._order), answer))

    def addressed(self, chip_id: int, core: int, sender: Machine) -> Machine:
        if sender.routing is not None:
            chip_id = sender.routing.chip(chip_id)
        number = chip_id * self.grid.cores + core % self.grid.cores
        if number not in self._by_number:
            raise PlayerError(
                f"{sender.kernel} on device {sender.device} addresses chip {chip_id}, which "
                f"{self.grid.name} lacks: name the topology that the program was compiled for"
            )
        target = self._by_number[number]
        self.reach([target.device], sender.now)
        self.passed.update(end for _, _, end in self.grid.route(sender.coords, target.coords))
        return target

    def receiver(self, target: Machine) -> Machine:
        """Returns the device whose memory and semaphores stand for those of a target."""
        if self.mirrored:
            return self.running[0]
        return target

    def reach(self, devices: Iterable[int], now: float) -> None:
        """Notes that a device sends something to others, or meets them."""
        self.reached.update(devices)
        if self._part is None or self.mirrored:
            return
        if not self.reached <= self._part:
            self.stop_at = min(self.stop_at, now + self.chip.cycles(_FIRST_SIGNALS))

    def _give_routing_table(self, machine: Machine, chip_id: int) -> None:
        """Gives a device its routing table, if the program reads one, and the pointer to it."""
        top = self.dump.programs[TOP]
        buffers = {
            declaration.tag: self.addresses.of(top, name)
            for name, declaration in top.declarations.items()
            if declaration.tag in (REGISTRY_TAG, routing.TAG)
        }
        if len(buffers) < 2:
            return
        table = buffers[routing.TAG]
        machine.routing = routing.RoutingTable(table, chip_id, math.prod(self.grid.shape))
        # Its pointer is the last one of the registry.
        machine.smem[REGISTRY + buffers[REGISTRY_TAG].size - 1] = table.address

    def made_at(self, machine: Machine) -> str:
        """Returns the end of a message, with the line of Python that made the instruction which a
        device is in.
        """
        source = self.dump.source(machine.phase)
        if source:
            return f"; the operation was made at {source}"
        return ""
