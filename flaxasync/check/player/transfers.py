"""Transfers: decodes a DMA operation, checks the memory that it uses, and moves its bytes over HBM
and links.

| operation | operands |
|---|---|
| dma.A_to_B | source, granules, destination, destination semaphore [, source stride, destination stride, step] |
| dma.general | source, granules, destination, destination semaphore, source semaphore, strides, override, semaphore |

The override of a dma.general names the chip of the destination, and its comment names the memory
spaces. A transfer raises its semaphores by its number of granules, or by one if a bit in the number
of the source semaphore says so. libtpu 0.0.52 sets this bit in XLA's permutes and waits for one,
where libtpu 0.0.51 waits for the granules.

A transfer may not leave the buffer in which it begins. While it is under way, no other transfer may
write what it reads, or read or write what it writes. Loads and stores of the vector unit are not
checked, and neither are the addresses of strided transfers.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Sequence

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.bundle_text import Operation
from flaxasync.check.player.collectives import refusal, table_of
from flaxasync.check.player.errors import OutOfBoundsError, RaceError, UnknownOperationError
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.memory import FIRST_HBM_GRANULE, GRANULE, SPACES, Addresses, Buffer
from flaxasync.check.player.network import Flow, Network
from flaxasync.check.player.semaphores import SEMAPHORE_MASK, Semaphores
from flaxasync.check.player.state import State

# begins the note of a kernel that reads scalars whose values the dump lacks
UNKNOWN_SCALARS = "scalars read from"
# the bits of an override, or of the operand of a remote signal, that hold the number of a chip
CHIP_MASK = 0x3FFF
_CORE_BIT = 13  # the bit of the destination semaphore that names the core of the chip
_REMOTE = 0x4000  # the bit of the override that is set if the destination is on another chip
# the bit of the source semaphore that is set if both ends are raised by one
_COUNTED_ONCE = 0x10000
_SPACES = re.compile(r"(hbm|vmem|smem)[-_]to[-_](hbm|vmem|smem)")


@dataclasses.dataclass(slots=True)
class Transfer:
    """One DMA. Addresses and sizes are in granules; addresses in scalar memory are in words."""

    source: str  # the memory space that is read
    target: str  # the memory space that is written
    source_address: int
    target_address: int
    granules: int
    received: int  # the semaphore that is raised at the destination
    name: str
    location: str  # in the dump
    phase: str  # the instruction of the program that started it
    strided: bool  # whether it skips addresses
    raised: int  # by how much each semaphore is raised
    sent: int = -1  # the semaphore that is raised at the source, if any is
    chip_id: int = -1  # the number of the destination's chip, unless it is the same one
    core: int = 0  # the core on that chip


def read_transfer(
    operation: Operation, values: tuple, location: str, phase: str
) -> Transfer | None:
    """Decodes a DMA. Returns None for a transfer to the host, for which no program waits."""
    if "host" in operation.name:
        return None
    general = operation.name == "dma.general"
    match = _SPACES.search(operation.comment if general else operation.name)
    if not match and not general:  # the addresses of a dma.general show the spaces, too
        raise UnknownOperationError(
            f"{phase}: transfer {operation.name!r} is unknown to the player; at {location}"
        )
    if None in values[: 7 if general else 4]:
        raise UnknownOperationError(
            f"{phase}: the operands of {operation.name} cannot be read: {operation.operands}; at "
            f"{location}"
        )
    read, granules, write, received = values[:4]
    source, target = match.groups() if match else (_space(read), _space(write))
    transfer = Transfer(
        source=source,
        target=target,
        source_address=read,
        target_address=write,
        granules=granules,
        received=received & SEMAPHORE_MASK,
        name=operation.name,
        location=location,
        phase=phase,
        strided=len(values) > 4,
        raised=granules,
    )
    if general:
        sent, strides, override = values[4:7]
        transfer.core = received >> _CORE_BIT & 1
        # the address of their descriptor, which is null for a plain transfer
        transfer.strided = strides > 0
        if override & _REMOTE:
            transfer.chip_id = override & CHIP_MASK
            transfer.sent = sent & SEMAPHORE_MASK
        if sent & _COUNTED_ONCE:
            transfer.raised = 1
    return transfer


def _space(address: int) -> str:
    """Infers the memory space of an address, which the text does not name."""
    if address >= FIRST_HBM_GRANULE:
        return "hbm"
    return "vmem"


@dataclasses.dataclass(slots=True, eq=False)
class Claim:
    """A range of one device's memory that a transfer under way is using, from granule `first` up to
    granule `stop`.
    """

    device: int
    space: str
    first: int
    stop: int
    does: str  # "reads" or "writes"
    transfer: Transfer


class MemoryClaims:
    """All memory that transfers are using at the current time."""

    def __init__(self, addresses: Addresses):
        self._addresses = addresses
        self._active: dict[tuple[int, str], list[Claim]] = {}

    def claim(self, transfer: Transfer, source: int, target: int) -> list[Claim]:
        """Claims the memory of a transfer from device `source` to device `target`, after a check of
        both rules.
        """
        size = transfer.granules
        read = transfer.source_address
        write = transfer.target_address
        both = (
            Claim(source, transfer.source, read, read + size, "reads", transfer),
            Claim(target, transfer.target, write, write + size, "writes", transfer),
        )
        claims = [claim for claim in both if claim.space != "smem" and size > 0]
        for claim in claims:
            self._check_bounds(claim)
        if transfer.strided:
            return []
        for claim in claims:
            self._check_races(claim)
        for claim in claims:
            self._active.setdefault((claim.device, claim.space), []).append(claim)
        return claims

    def release(self, claims: list[Claim]) -> None:
        for claim in claims:
            self._active[claim.device, claim.space].remove(claim)

    def _check_bounds(self, claim: Claim) -> None:
        transfer = claim.transfer
        buffer = self._addresses.at_granule(claim.space, claim.first)
        past = "outside every buffer"
        if buffer is not None:
            over = claim.stop - self._addresses.granules(buffer)[1]
            if over <= 0 or transfer.strided:
                return
            past = f"{over * GRANULE} bytes past the end of {buffer.label}"
        raise OutOfBoundsError(
            f"{transfer.phase}: {transfer.name} of {transfer.granules * GRANULE} bytes on device "
            f"{claim.device} {claim.does} {past}; at {transfer.location}"
        )

    def _check_races(self, claim: Claim) -> None:
        for other in self._active.get((claim.device, claim.space), ()):
            overlap = claim.first < other.stop and other.first < claim.stop
            if overlap and "writes" in (claim.does, other.does):
                buffer = self._addresses.at_granule(claim.space, claim.first)
                mine = claim.transfer
                earlier = other.transfer
                raise RaceError(
                    f"device {claim.device}: {mine.name} in {mine.phase} ({mine.location}) "
                    f"{claim.does} {buffer.label if buffer else claim.space} while {earlier.name} "
                    f"of {earlier.phase} ({earlier.location}) still {other.does} it"
                )


class TransferEngine:
    """The DMA engines of all devices."""

    def __init__(self, state: State, semaphores: Semaphores):
        chip = state.chip
        self.network = Network({"hbm": chip.hbm / chip.clock, "link": chip.link / chip.clock})
        self._state = state
        self._semaphores = semaphores
        self._claims = MemoryClaims(state.addresses)
        self._constants: dict[Buffer, list[int]] = {}
        self._words_of = functools.cache(state.dump.words_of)

    def start(self, machine: Machine, external: ExternalOperation, values: tuple) -> None:
        transfer = read_transfer(
            external.operation, values, machine.location(external.index), machine.phase
        )
        if transfer is None:
            return
        target = machine
        if transfer.chip_id >= 0:
            target = self._state.addressed(transfer.chip_id, transfer.core, machine)
        if transfer.target == "smem":
            self._fill_scalar_memory(machine, transfer)
        receiver = self._state.receiver(target)
        if receiver is not machine:
            self._check_entered(machine, receiver, transfer)
        claims = self._claims.claim(transfer, machine.device, receiver.device)
        self._flow(machine, target, transfer, claims)

    def find_constants(self, kernel: Instruction, addresses: Sequence[int | None]) -> None:
        """Notes which buffers hold the constants among the operands of a kernel that is called."""
        instructions = self._state.dump.instructions
        for name, address in zip(kernel.operands, addresses, strict=False):
            words = self._words_of(name)
            if words is not None and address is not None:
                space = SPACES.get(instructions[name].shape.memory_space, "hbm")
                buffer = self._state.addresses.at(space, address)
                if buffer is not None:
                    self._constants[buffer] = words

    def _flow(
        self, machine: Machine, target: Machine, transfer: Transfer, claims: list[Claim]
    ) -> None:
        state = self._state
        recorder = machine.recorder
        add = self._semaphores.add
        size = transfer.granules * GRANULE
        # of the moment in which it starts: when it ends, the device may be elsewhere and know more
        phase = recorder.phase
        message = state.clocks.known_to(machine.device)
        receiver = state.receiver(target)
        route = state.grid.route(machine.coords, target.coords)
        senders = 1
        if target is machine:
            kind = f"{transfer.source} to {transfer.target}"
            lane = "memory"
            latency = state.chip.cycles(state.chip.sheet.memory_latency)
        else:
            kind = f"{transfer.source} to remote {transfer.target}"
            lane = f"link to {target.device}"
            latency = state.chip.cycles(state.chip.route_latency(len(route)))
            senders = self._senders(machine, transfer)
        recorder.bytes[kind] += senders * size

        def done(now: float, flow: Flow) -> None:
            recorder.transfer(lane, flow.started, now, phase)
            self._claims.release(claims)
            if transfer.sent >= 0:
                add(machine, transfer.sent, transfer.raised, now, kind, None)
            arrived = now + latency
            state.at(
                arrived,
                lambda: add(receiver, transfer.received, transfer.raised, arrived, kind, message),
            )

        ends = [(transfer.source, machine.device), (transfer.target, receiver.device)]
        memory = Counter(end for end in ends if end[0] == "hbm")
        links = [(link, senders) for link in route]
        self.network.start(machine.now, size, (*memory.items(), *links), done)

    def _senders(self, machine: Machine, transfer: Transfer) -> int:
        """Returns how many cores of the device send as much at this time, over the same links."""
        instruction = self._state.dump.instructions.get(transfer.phase)
        if instruction is None or instruction.opcode != "custom-call":
            return 1
        if not machine.code.program.cores_meet:
            return 1
        return self._state.chip.cores

    def _check_entered(self, machine: Machine, target: Machine, transfer: Transfer) -> None:
        instruction = self._state.dump.instructions.get(transfer.phase)
        if instruction is None or instruction.opcode != "custom-call":
            return
        if not self._state.clocks.knows_to_have_entered(
            machine.device, target.device, transfer.phase
        ):
            raise RaceError(
                f"{transfer.phase}: device {machine.device} writes into device {target.device} "
                f"({transfer.name}, {transfer.location}) without having heard that it has entered "
                f"the kernel: a barrier with the receiver is missing{self._state.made_at(machine)}"
            )

    def _fill_scalar_memory(self, machine: Machine, transfer: Transfer) -> None:
        """Writes the words that a transfer brings into scalar memory: those of constants and of
        known tables, or 0.
        """
        state = self._state
        name = machine.recorder.phase
        buffer = state.addresses.at_granule(transfer.source, transfer.source_address)
        what = "an unknown place"
        first = 0
        contents = None
        if buffer is not None:
            what = buffer.label
            first = (transfer.source_address - state.addresses.granules(buffer)[0]) * GRANULE // 4
            contents = self._constants.get(buffer) or state.prepared.memory.tables.get(buffer)
            if contents is None and "constant" in buffer.label:
                collective = state.dump.collective(name)
                contents = table_of(collective, machine.code.program, state.prepared.numbers)
                if contents is None and state.dump.is_half_of_collective(name):
                    raise UnknownOperationError(refusal(collective, name, transfer.location))
        if contents is None:
            state.notes[f"{name}: {UNKNOWN_SCALARS} {what} are taken as 0"] += 1
            contents = []
        count = transfer.granules * GRANULE // 4
        words = contents[first : first + count]
        for n, word in enumerate(words + [0] * (count - len(words))):
            machine.smem[transfer.target_address + n] = word
