"""One device: its registers, scalar memory and semaphores. It runs alone until its next external
operation.
"""

import dataclasses
from collections import Counter, deque
from typing import NamedTuple

from flaxasync.check.player import matrix_unit
from flaxasync.check.player.basic_blocks import BlockCode, ExternalOperation
from flaxasync.check.player.chips import Coords
from flaxasync.check.player.errors import PlayerError, UnsimulatedError
from flaxasync.check.player.memory import LATE, Addresses
from flaxasync.check.player.result import Recorder
from flaxasync.check.player.routing import RoutingTable

MAX_BLOCKS = 20_000_000  # basic blocks that a device may run: far more than any program has
# no word from here on is reported as read before it was written
_END_OF_SMALL_MEMORY = 0x100000 >> 2


class Branch(NamedTuple):
    """A branch under way: the bundle that it goes to, and its last delay slot."""

    target: int
    slot: int


class Frame(NamedTuple):
    """The state of a caller, which is restored when the callee returns."""

    code: BlockCode
    position: int
    branch: Branch | None


@dataclasses.dataclass(eq=False)
class Machine:
    """The state of one device. Times are in cycles."""

    device: int
    coords: Coords
    addresses: Addresses
    code: BlockCode  # the program that runs,
    position: int  # and its next bundle
    parameters: dict[int, int]  # the address of each parameter of the program
    # what the runtime leaves in scalar memory, by the compiler's words for it
    scalars: dict[str, int]
    recorder: Recorder
    notes: Counter[str]  # what the simulation could not know, and how often
    routing: RoutingTable | None = None  # None if programs address chips by their numbers
    now: float = 0.0  # the time of the core
    stack: list[Frame] = dataclasses.field(default_factory=list)  # the callers
    finished: bool = False
    semaphores: Counter[int] = dataclasses.field(default_factory=Counter)  # by number

    # What the functions of basic blocks read and write.
    registers: list[int] = dataclasses.field(default_factory=lambda: [0] * 64)
    predicates: list[bool] = dataclasses.field(default_factory=lambda: [False] * 32)
    # the written words of scalar memory, by address
    smem: dict[int, int] = dataclasses.field(default_factory=dict)
    # The queues from which a program pops values of semaphores, results of divisions, and values
    # from the other core.
    semaphore_values: deque[int] = dataclasses.field(default_factory=deque)
    divided: deque[int] = dataclasses.field(default_factory=deque)
    core_values: deque[int] = dataclasses.field(default_factory=deque)

    _units: tuple = matrix_unit.IDLE
    _branch: Branch | None = None
    _blocks_run: int = 0
    _start: int = 0  # the first bundle of the block that runs, for messages

    @property
    def kernel(self) -> str:
        return self.code.program.name

    @property
    def phase(self) -> str:
        return self.recorder.phase or self.kernel

    def advance(self) -> list[tuple[ExternalOperation, tuple]]:
        """Runs until the next bundle with external operations, and returns them and their operands;
        [] at the end.
        """
        registers = self.registers
        predicates = self.predicates
        issue = stall = busy = 0
        external: list[tuple[int, tuple]] | None = None
        while external is None and self.position < self.code.length:
            self._blocks_run += 1
            if self._blocks_run > MAX_BLOCKS:
                raise UnsimulatedError(
                    f"device {self.device} ran {MAX_BLOCKS} blocks without an end, now in "
                    f"{self.kernel} at {self.code.program.location(self.position)}"
                )
            block = self.code.block(self.position)
            self._start = self.position
            cost = block.costs.get(self._units) or block.time(self._units, self.code.chip.latency)
            self._units = cost.state
            self.now += cost.cycles
            issue += block.bundles
            stall += cost.stall
            busy += cost.busy
            branch, external = block.run(registers, predicates, self)
            self.position = block.end + 1
            if branch is not None:
                self._branch = self.branch(self._branch, branch.target, branch.slot)
            if self._branch is not None and self._branch.slot <= block.end:
                self.position = self._branch.target
                self._branch = None
        cycles = self.recorder.cycles
        cycles["issue"] += issue
        cycles["stall"] += stall
        cycles["busy"] += busy
        return [(block.external[number], values) for number, values in external or ()]

    def wait_until(self, time: float) -> None:
        if time > self.now:
            self._units = matrix_unit.aged(self._units, time - self.now)
            self.now = time

    def call(self, code: BlockCode, operands: tuple) -> None:
        """Enters another program, with its operands in the first registers."""
        self.stack.append(Frame(self.code, self.position, self._branch))
        self.code = code
        self.position = 0
        self._branch = None
        for register, value in enumerate(operands):
            if value is not None:
                self.registers[register] = value

    def leave(self) -> None:
        self.code, self.position, self._branch = self.stack.pop()

    def location(self, index: int | None = None) -> str:
        """Returns the file and line of a bundle, by default of the first one of the block that
        runs.
        """
        return self.code.program.location(self._start if index is None else index)

    # The functions of basic blocks call these.

    def branch(self, pending: Branch | None, target: int, slot: int) -> Branch:
        """Takes a branch whose last delay slot is `slot`."""
        if pending is not None:
            raise PlayerError(
                f"{self.kernel}: a branch is taken while another is under way, at {self.location()}"
            )
        return Branch(target, slot)

    def load(self, address: int) -> int:
        """Returns a word of scalar memory that the program or the runtime wrote; 0 and a note for
        any other word.
        """
        address &= 0xFFFFFFFF
        value = self.smem.get(address)
        if value is not None:
            return value
        if self.routing is not None and self.routing.holds(address):
            return self.routing.word(address)
        tag = self.addresses.fixed.get(("smem", address), "")
        for words, meaning in self.scalars.items():
            if words in tag:
                return meaning
        buffer = self.addresses.at("smem", address)
        if address < _END_OF_SMALL_MEMORY and not (buffer and buffer.label.startswith(LATE)):
            where = tag or (buffer.label if buffer else f"address {address:#x}")
            self.notes[
                f"{self.kernel}: scalar memory read before it was written, taken as 0: {where}"
            ] += 1
        return 0

    def pop_vector(self) -> int:
        """Returns 0 for a scalar that depends on vector data, which is not computed."""
        self.notes[f"{self.kernel}: a scalar that depends on vector data was taken as 0"] += 1
        return 0
