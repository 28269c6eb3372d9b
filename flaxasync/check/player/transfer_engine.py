"""Executes transfers: checks them, moves their bytes over HBM and links, and raises their semaphores at the end."""

from collections import Counter
from collections.abc import Sequence

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.shapes import VMEM
from flaxasync.check.player import diagnostics
from flaxasync.check.player.addresses import GRANULE, Buffer
from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.collective_tables import refusal, table_of
from flaxasync.check.player.errors import UnknownOperationError
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.memory_claims import Claim, MemoryClaims
from flaxasync.check.player.network import Flow, Network
from flaxasync.check.player.semaphores import Semaphores
from flaxasync.check.player.state import State
from flaxasync.check.player.transfers import Transfer, read_transfer

UNKNOWN_SCALARS = "scalars read from"
"""How the note of a kernel begins that reads scalars whose values the dump does not say."""


class TransferEngine:
    """The DMA engines of all devices."""

    def __init__(self, state: State, semaphores: Semaphores):
        chip = state.chip
        self.network = Network({"hbm": chip.hbm / chip.clock, "link": chip.link / chip.clock})
        self._state, self._semaphores = state, semaphores
        self._claims = MemoryClaims(state.addresses)
        self._constants: dict[Buffer, list[int]] = {}

    def start(self, machine: Machine, operation: ExternalOperation, values: tuple) -> None:
        """Starts a transfer, after a check of its memory and of its target."""
        transfer = read_transfer(operation.operation, values, machine.location(operation.index), machine.phase)
        if transfer is None:
            return
        target = machine
        if transfer.chip >= 0:
            target = self._state.addressed(transfer.chip, transfer.core, machine)
        if transfer.target == "smem":
            self._fill_scalar_memory(machine, transfer)
        if target is not machine:
            self._check_entered(machine, target, transfer)
        self._flow(machine, target, transfer, self._claims.claim(transfer, machine.device, target.device))

    def find_constants(self, kernel: Instruction, addresses: Sequence[int | None]) -> None:
        """Notes which buffers hold the constants among the operands of a kernel that is called."""
        dump = self._state.dump
        for name, address in zip(kernel.operands, addresses, strict=False):
            words = dump.words_of(name)
            if words is not None and address is not None:
                space = "vmem" if dump.instructions[name].shape.memory_space == VMEM else "hbm"
                buffer = self._state.addresses.at(space, address)
                if buffer is not None:
                    self._constants[buffer] = words

    def _flow(self, machine: Machine, target: Machine, transfer: Transfer, claims: list[Claim]) -> None:
        """Moves the bytes of a transfer, and raises its semaphores at the end."""
        state, recorder = self._state, machine.recorder
        remote = target is not machine
        size = transfer.granules * GRANULE
        recorder.counts.bytes[f"{transfer.source} to {'remote ' if remote else ''}{transfer.target}"] += size
        lane, name = f"link to {target.device}" if remote else "memory", recorder.phase
        message = state.clocks.known_to(machine.device)
        route = state.grid.route(machine.coords, target.coords)
        latency = state.chip.cycles(state.chip.route_latency(len(route)) if remote else state.chip.local_latency)

        def done(now: float, flow: Flow) -> None:
            recorder.transfer(lane, flow.started, now, name)
            self._claims.release(claims)
            if transfer.sent >= 0:
                cause = "send" if remote else "memory"
                self._semaphores.add(machine, transfer.sent, transfer.raised, now, cause, None)
            arrived, cause = now + latency, "receive" if remote else "memory"
            add = self._semaphores.add
            state.queue.at(arrived, lambda: add(target, transfer.received, transfer.raised, arrived, cause, message))

        ends = [(transfer.source, machine.device), (transfer.target, target.device)]
        uses = Counter(end for end in ends if end[0] == "hbm") | Counter(route)
        self.network.start(machine.now, size, tuple(uses.items()), done)

    def _check_entered(self, machine: Machine, target: Machine, transfer: Transfer) -> None:
        """Raises RaceError if a kernel writes into a device that is not known to have entered the kernel."""
        instruction = self._state.dump.instructions.get(transfer.phase)
        if instruction is None or instruction.opcode != "custom-call":
            return
        if not self._state.clocks.knows_to_have_entered(machine.device, target.device, transfer.phase):
            raise diagnostics.not_entered(self._state, machine, target, transfer)

    def _fill_scalar_memory(self, machine: Machine, transfer: Transfer) -> None:
        """Writes the words that a transfer brings into scalar memory: those of constants and of known tables, or 0."""
        state, name = self._state, machine.recorder.phase
        buffer = state.addresses.at_granule(transfer.source, transfer.source_address)
        contents = self._constants.get(buffer) or state.prepared.tables.get(buffer) if buffer else None
        if contents is None and buffer is not None and "constant" in buffer.label:
            collective = state.dump.collective(name)
            contents = table_of(collective, machine.code.program, state.chips)
            if contents is None and state.dump.is_half_of_collective(name):
                raise UnknownOperationError(refusal(collective, name, transfer.location))
        if contents is None:
            what = buffer.label if buffer else "an unknown place"
            state.notes[f"{name}: {UNKNOWN_SCALARS} {what} are taken as 0"] += 1
            contents = []
        first = (transfer.source_address - state.addresses.granules(buffer)[0]) * GRANULE // 4 if buffer else 0
        for n in range(transfer.granules * GRANULE // 4):
            machine.smem[transfer.target_address + n] = contents[first + n] if first + n < len(contents) else 0
