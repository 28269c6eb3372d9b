"""One device: registers, scalar memory and semaphores, and its run from one action on the outside world to the next."""

import dataclasses
from collections import Counter, deque

from flaxasync.check.player import matrix_unit
from flaxasync.check.player.addresses import LATE, Addresses
from flaxasync.check.player.basic_blocks import Action, Code
from flaxasync.check.player.errors import PlayerError

MAX_BLOCKS = 20_000_000  # blocks a device may run: far above any program, below for ever


@dataclasses.dataclass(slots=True)
class Frame:
    """A caller that waits for its callee."""

    code: Code
    position: int
    pending: tuple[int, int] | None
    kernel: str


class Machine:
    """The state of one device. Time is in cycles."""

    def __init__(self, device: int, chip_id: int, core: int, coords: tuple[int, ...], addresses: Addresses, code: Code):
        self.device, self.chip_id, self.core, self.coords = device, chip_id, core, coords
        self.now = 0.0
        self.registers = [0] * 64
        self.predicates = [False] * 32
        self.smem: dict[int, int] = {}
        self.flags: Counter[int] = Counter()
        self.flag_values: deque[int] = deque()
        self.divided: deque[int] = deque()
        self.core_values: deque[int] = deque()
        self.units = matrix_unit.IDLE
        self.code, self.position = code, 0
        self.pending: tuple[int, int] | None = None  # branch under way: target, last delay slot
        self.stack: list[Frame] = []
        self.kernel = code.program.name
        self.finished = False
        self.issue = self.stall = self.busy = 0
        self.notes: Counter[str] = Counter()
        self.parameters: dict[int, int] = {}
        self.pointers: dict[str, int] = {}  # what the runtime leaves in scalar memory, by the compiler's words for it
        self._addresses = addresses
        self._runs = 0
        self._start = 0  # of the block that runs, for messages

    def advance(self) -> list[tuple[Action, tuple]]:
        """Runs until the program asks something of the world.

        Returns:
          What it asks, with operand values; nothing when the program (or the callee) has ended.
        """
        registers, predicates = self.registers, self.predicates
        while self.position < self.code.length:
            self._runs += 1
            if self._runs > MAX_BLOCKS:
                raise PlayerError(
                    f"device {self.device} ran {MAX_BLOCKS} blocks without an end, now in {self.code.program.name} at "
                    f"{self.code.program.place(self.position)}"
                )
            block = self.code.block(self.position)
            self._start = self.position
            units = self.units
            cost = block.costs.get(units)
            if cost is None:
                cost = block.costs[units] = (
                    matrix_unit.cost(block.bundles, block.work, units, self.code.chip.latency)
                    if block.work
                    else matrix_unit.Cost(block.bundles, matrix_unit.aged(units, block.bundles), 0, 0)
                )
            self.units = cost.state
            self.now += cost.cycles
            self.issue += block.bundles
            self.stall += cost.stall
            self.busy += cost.busy
            branch, events = block.run(registers, predicates, self)
            self.position = block.end + 1
            if branch is not None:
                self.pending = self.branch(self.pending, *branch)
            if self.pending is not None and self.pending[1] <= block.end:
                self.position, self.pending = self.pending[0], None
            if events:
                return [(block.actions[number], values) for number, values in events]
        return []

    def wait_until(self, time: float) -> float:
        """Moves on to a later time without issuing; returns how long that was."""
        waited = max(0.0, time - self.now)
        if waited:
            self.units = matrix_unit.aged(self.units, waited)
            self.now = time
        return waited

    def call(self, code: Code, operands: tuple) -> None:
        """Enters another program. Its operands are already in the first registers."""
        self.stack.append(Frame(self.code, self.position, self.pending, self.kernel))
        self.code, self.position, self.pending = code, 0, None
        self.kernel = code.program.name
        for register, value in enumerate(operands):
            if value is not None:
                self.registers[register] = value

    def leave(self) -> None:
        """Returns to the caller."""
        frame = self.stack.pop()
        self.code, self.position, self.pending, self.kernel = frame.code, frame.position, frame.pending, frame.kernel

    def place(self, index: int | None = None) -> str:
        return self.code.program.place(self._start if index is None else index)

    # What the generated code of a block calls.

    def branch(self, pending: tuple[int, int] | None, target: int, slot: int) -> tuple[int, int]:
        """Takes a branch, whose last delay slot is `slot`."""
        if pending is not None:
            raise PlayerError(f"{self.kernel}: a branch is taken while another is under way, at {self.place()}")
        return target, slot

    def load(self, address: int) -> int:
        address &= 0xFFFFFFFF
        value = self.smem.get(address)
        if value is not None:
            return value
        tag = self._addresses.fixed.get(("smem", address), "")
        for words, meaning in (
            ("chip ID", self.chip_id),
            ("core index", self.core),
            ("partition id", self.device),
            ("replica id", 0),
            ("launch", 0),
            ("hbm offset", 0),
            ("spec success", 0),  # nothing was fetched before the program began
            *self.pointers.items(),
        ):
            if words in tag:
                return meaning
        buffer = self._addresses.at("smem", address)
        if address < 0x100000 >> 2 and not (buffer and buffer.label.startswith(LATE)):
            where = tag or (buffer.label if buffer else f"address {address:#x}")
            self.notes[f"{self.kernel}: scalar memory read before it was written, taken as 0: {where}"] += 1
        return 0

    def parameter(self, number: int) -> int:
        return self.parameters[number]

    def pop_vector(self) -> int:
        self.notes[f"{self.kernel}: a scalar that depends on vector data was taken as 0"] += 1
        return 0
