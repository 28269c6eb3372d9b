"""One device: its registers, scalar memory and semaphores. It runs alone until its next external operation."""

import dataclasses
from collections import Counter, deque

from flaxasync.check.player import matrix_unit
from flaxasync.check.player.addresses import LATE, Addresses
from flaxasync.check.player.basic_blocks import Code, ExternalOperation
from flaxasync.check.player.errors import PlayerError

MAX_BLOCKS = (
    20_000_000  # basic blocks that a device may run: far more than any program has, and fewer than infinitely many
)


@dataclasses.dataclass(slots=True)
class Frame:
    """The state of a caller, which is restored when the callee returns."""

    code: Code
    position: int
    pending_branch: tuple[int, int] | None
    kernel: str


class Machine:
    """The state of one device. Times are in cycles.

    Attributes:
      device: The number of the partition.
      chip_id: The number of its chip.
      core: The number of its core on the chip.
      coords: The coordinates of its chip.
      now: The time of the core.
      registers: The scalar registers.
      predicates: The predicate registers.
      smem: The words of scalar memory that were written, by address.
      semaphores: The semaphores, by number.
      semaphore_values: The queue from which a program reads the values of semaphores.
      divided: The queue of quotients and remainders.
      core_values: The queue of values from the other core of the chip.
      units: The state of the matrix units, as in `matrix_unit.Cost`.
      code: The program that runs.
      position: The index of its next bundle.
      pending_branch: The target of a branch that is under way, and its last delay slot; None if there is none.
      stack: The callers.
      kernel: The name of the program that runs.
      finished: Whether the device has run to the end.
      issue: Cycles in which a bundle was issued.
      stall: Cycles in which a bundle waited for a matrix unit.
      busy: Cycles in which the busiest matrix unit multiplied.
      notes: What the simulation could not know, and how often.
      parameters: The address of each parameter of the program.
      pointers: Addresses that the runtime leaves in scalar memory, by the compiler's words for them.
    """

    def __init__(self, device: int, chip_id: int, core: int, coords: tuple[int, ...], addresses: Addresses, code: Code):
        self.device, self.chip_id, self.core, self.coords = device, chip_id, core, coords
        self.now = 0.0
        self.registers = [0] * 64
        self.predicates = [False] * 32
        self.smem: dict[int, int] = {}
        self.semaphores: Counter[int] = Counter()
        self.semaphore_values: deque[int] = deque()
        self.divided: deque[int] = deque()
        self.core_values: deque[int] = deque()
        self.units = matrix_unit.IDLE
        self.code, self.position = code, 0
        self.pending_branch: tuple[int, int] | None = None
        self.stack: list[Frame] = []
        self.kernel = code.program.name
        self.finished = False
        self.issue = self.stall = self.busy = 0
        self.notes: Counter[str] = Counter()
        self.parameters: dict[int, int] = {}
        self.pointers: dict[str, int] = {}
        self._addresses = addresses
        self._blocks_run = 0
        self._start = 0  # the first bundle of the block that runs, for messages

    def advance(self) -> list[tuple[ExternalOperation, tuple]]:
        """Runs until the next bundle with external operations.

        Returns:
          These operations, each with the values of its operands. The list is empty if the program, or the callee that
          runs, has ended.
        """
        registers, predicates = self.registers, self.predicates
        while self.position < self.code.length:
            self._blocks_run += 1
            if self._blocks_run > MAX_BLOCKS:
                raise PlayerError(
                    f"device {self.device} ran {MAX_BLOCKS} blocks without an end, now in {self.code.program.name} at "
                    f"{self.code.program.location(self.position)}"
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
            branch, external = block.run(registers, predicates, self)
            self.position = block.end + 1
            if branch is not None:
                self.pending_branch = self.branch(self.pending_branch, *branch)
            if self.pending_branch is not None and self.pending_branch[1] <= block.end:
                self.position, self.pending_branch = self.pending_branch[0], None
            if external:
                return [(block.external[number], values) for number, values in external]
        return []

    def wait_until(self, time: float) -> None:
        """Moves the core to a later time without issuing bundles."""
        waited = max(0.0, time - self.now)
        if waited:
            self.units = matrix_unit.aged(self.units, waited)
            self.now = time

    def call(self, code: Code, operands: tuple) -> None:
        """Enters another program, with its operands in the first registers."""
        self.stack.append(Frame(self.code, self.position, self.pending_branch, self.kernel))
        self.code, self.position, self.pending_branch = code, 0, None
        self.kernel = code.program.name
        for register, value in enumerate(operands):
            if value is not None:
                self.registers[register] = value

    def leave(self) -> None:
        """Returns to the caller."""
        frame = self.stack.pop()
        self.code, self.position, self.kernel = frame.code, frame.position, frame.kernel
        self.pending_branch = frame.pending_branch

    def location(self, index: int | None = None) -> str:
        """Returns the file and line of a bundle, by default of the first one of the block that runs."""
        return self.code.program.location(self._start if index is None else index)

    # The functions of basic blocks call these.

    def branch(self, pending: tuple[int, int] | None, target: int, slot: int) -> tuple[int, int]:
        """Takes a branch whose last delay slot is `slot`."""
        if pending is not None:
            raise PlayerError(f"{self.kernel}: a branch is taken while another is under way, at {self.location()}")
        return target, slot

    def load(self, address: int) -> int:
        """Returns a word of scalar memory that the program or the runtime wrote; 0 and a note for any other word."""
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
        """Returns the address of a parameter of the program."""
        return self.parameters[number]

    def pop_vector(self) -> int:
        """Returns 0 for a scalar that depends on vector data, which is not computed."""
        self.notes[f"{self.kernel}: a scalar that depends on vector data was taken as 0"] += 1
        return 0
