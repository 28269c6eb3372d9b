"""What the parts of a simulation share: the program, the devices, what they know of each other, and
what happens next.

A simulation begins where the program begins on a TPU, after the host has prepared its parameters,
its outputs and the device assignment, and after a preamble that checks that all devices were
launched together.
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from flaxasync.check.estimate.timeline import Slice
from flaxasync.check.player.basic_blocks import BlockCode
from flaxasync.check.player.bundle_text import MARK_END, MARK_RUN, MARK_START, Operation
from flaxasync.check.player.chips import ChipGrid, Coords, PlayedChip
from flaxasync.check.player.dump import TOP, Dump
from flaxasync.check.player.errors import PlayerError
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.memory import Addresses, Buffer, padded_bytes
from flaxasync.check.player.result import EndedWait, Recorder

_PROFILE_COUNTERS = 0x180000  # an address beyond all scalar memory that a program uses

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
    """The state of a simulation of a program on a grid of chips, whose partitions are on these
    chips and cores.
    """

    def __init__(
        self,
        dump: Dump,
        grid: ChipGrid,
        places: tuple[tuple[Coords, int], ...],
        chip: PlayedChip,
        accept: frozenset[str],
    ):
        self.dump = dump
        self.grid = grid
        self.chip = chip
        self.addresses = Addresses(chip.hbm_unit)
        for program in dump.programs.values():
            self.addresses.add(program)
        self.codes = {
            n: BlockCode(p, self.addresses, chip, accept) for n, p in dump.programs.items()
        }
        # The number of each partition's chip (and core), as programs address it.
        self.chips = [grid.chip_id(chip) * grid.cores + core for chip, core in places]
        # the words of the buffers that the runtime has filled
        self.tables: dict[Buffer, list[int]] = {}
        parameters, pointers = self._prepare_memory()
        self.slices: list[Slice] = []  # of all devices, in the order in which they ended
        self.waits: list[EndedWait] = []  # likewise
        self.notes: Counter[str] = Counter()  # what the simulation could not know, and how often
        top = self.codes[TOP]
        self.machines: list[Machine] = []
        for device, number in enumerate(self.chips):
            chip_id, core = divmod(number, grid.cores)
            scalars = {"chip ID": chip_id, "core index": core, "partition id": device} | pointers
            machine = Machine(
                device=device,
                coords=places[device][0],
                addresses=self.addresses,
                code=top,
                position=first_bundle(top),
                parameters=parameters,
                scalars=scalars,
                recorder=Recorder(device, chip, self.slices, self.waits),
                notes=self.notes,
            )
            self.machines.append(machine)
        self.clocks = VectorClocks(len(places))
        # a heap: their times, their order, what happens
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._by_number = dict(zip(self.chips, self.machines, strict=True))

    def progress(self) -> str:
        """Says how far the simulation has come."""
        now = min(machine.now for machine in self.machines)
        where = next(machine.phase for machine in self.machines if machine.now == now)
        return (
            f"simulating {len(self.machines)} devices, {self.chip.seconds(now) * 1e3:.3f} ms of "
            f"the program, at {where}"
        )

    def at(self, time: float, answer: Callable[[], None]) -> None:
        """Queues an event. Events at the same time happen in the order in which they were
        queued.
        """
        heapq.heappush(self.events, (time, next(self._order), answer))

    def addressed(self, chip: int, core: int, sender: Machine) -> Machine:
        number = chip * self.grid.cores + core % self.grid.cores
        if number not in self._by_number:
            raise PlayerError(
                f"{sender.kernel} on device {sender.device} addresses chip {chip}, which "
                f"{self.grid.name} lacks: name the topology that the program was compiled for"
            )
        return self._by_number[number]

    def made_at(self, machine: Machine) -> str:
        """Returns the end of a message, with the line of Python that made the instruction which a
        device is in.
        """
        source = self.dump.source(machine.phase)
        if source:
            return f"; the operation was made at {source}"
        return ""

    def _prepare_memory(self) -> tuple[dict[int, int], dict[str, int]]:
        """Gives addresses, which are the same on every device, to what the host prepares.

        Returns the address of each parameter of the program, and the scalars that the runtime
        leaves in scalar memory, by the compiler's words for them.
        """

        def new(size: int, label: str) -> Buffer:
            return self.addresses.new("hbm", size, label)

        instructions = self.dump.module.entry.instructions
        parameters = {
            i.parameter_number: new(
                padded_bytes(i.shape), f"parameter {i.parameter_number} ({i.name})"
            ).address
            for i in instructions
            if i.parameter_number is not None
        }
        root = next(i for i in instructions if i.is_root)
        shapes = [root.shape]
        if root.opcode == "tuple" and root.operands:
            shapes = [self.dump.instructions[name].shape for name in root.operands]
        outputs = [
            new(padded_bytes(shape), f"output {n}").address for n, shape in enumerate(shapes)
        ]
        assignment = new(4 * len(self.chips), "the device assignment")
        table = new(4 * len(outputs), "the table of outputs")
        self.tables = {assignment: self.chips, table: outputs}
        # Nothing was fetched before the program began.
        scalars = dict.fromkeys(("replica id", "launch", "hbm offset", "spec success"), 0) | {
            "device assignment ptr": assignment.address,
            "output ptr": table.address if len(outputs) > 1 else outputs[0],
            "registry": _PROFILE_COUNTERS,
        }
        return parameters, scalars


def _begins(operation: Operation) -> bool:
    """Says whether an operation marks the begin of an instruction, or asks for a parameter."""
    if operation.unit == "vtrace" and operation.operands[0].isdigit():
        mark = int(operation.operands[0])
        return MARK_START <= mark < MARK_END and (mark & MARK_RUN) != MARK_RUN
    return operation.unit == "scalar_parameter_address"


def first_bundle(code: BlockCode) -> int:
    """Returns the bundle at which the program begins, after the last branch of the preamble."""
    first = 0
    for index, bundle in enumerate(code.program.bundles):
        for operation in bundle:
            if operation.unit == "sbr":
                first = index + code.chip.branch_delay + 1
            if _begins(operation):
                return first
    raise PlayerError(
        f"{code.program.path.name} has no instruction of a program: the dump was cut, or is of "
        "another version"
    )
