"""Executes transfers: checks them, moves their bytes over HBM and links, and raises their semaphores at the end."""

from collections import Counter
from collections.abc import Sequence

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.shapes import VMEM
from flaxasync.check.player.addresses import Addresses, Buffer
from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.chip_grid import ChipGrid
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.collective_tables import refusal, table_of
from flaxasync.check.player.devices import Devices
from flaxasync.check.player.diagnostics import Diagnostics
from flaxasync.check.player.dump import Dump
from flaxasync.check.player.errors import UnknownOperationError
from flaxasync.check.player.event_queue import EventQueue
from flaxasync.check.player.launch import Launch
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.memory_claims import Claim, MemoryClaims
from flaxasync.check.player.network import Flow, Network, Use
from flaxasync.check.player.recorder import Recorder
from flaxasync.check.player.semaphores import Semaphores
from flaxasync.check.player.transfers import Transfer, read_transfer
from flaxasync.check.player.vector_clocks import VectorClocks

UNKNOWN_SCALARS = "scalars read from"
"""How the note of a kernel begins that reads scalars whose values the dump does not say."""


class TransferEngine:
    """The DMA engines of all devices.

    Attributes:
      network: The transfers under way.
      notes: What the simulation could not know, and how often.
    """

    def __init__(
        self,
        dump: Dump,
        addresses: Addresses,
        grid: ChipGrid,
        chip: PlayedChip,
        launch: Launch,
        devices: Devices,
        queue: EventQueue,
        clocks: VectorClocks,
        semaphores: Semaphores,
        recorder: Recorder,
        diagnostics: Diagnostics,
    ):
        self.network = Network({"hbm": chip.hbm / chip.clock, "link": chip.link / chip.clock})
        self.notes: Counter[str] = Counter()
        self._claims = MemoryClaims(addresses)
        self._dump, self._addresses, self._grid, self._chip = dump, addresses, grid, chip
        self._constants: dict[Buffer, list[int]] = {}
        self._launch, self._devices, self._queue, self._clocks = launch, devices, queue, clocks
        self._semaphores, self._recorder, self._diagnostics = semaphores, recorder, diagnostics

    def start(self, machine: Machine, operation: ExternalOperation, values: tuple) -> None:
        """Starts a transfer.

        Raises:
          RaceError: It uses memory that another transfer uses, or its target is not known to have entered the kernel.
          OutOfBoundsError: It leaves its buffer.
          UnknownOperationError: The player does not know its form, or it reads a table that the dump lacks.
        """
        phase = self._diagnostics.phase(machine)
        location = machine.code.program.location(operation.index)
        transfer = read_transfer(operation.operation, values, location, phase)
        if transfer is None:
            return
        target = machine
        if transfer.chip >= 0:
            target = self._devices.addressed(transfer.chip, transfer.core, machine)
        if transfer.target == "smem":
            self._fill_scalar_memory(machine, transfer)
        if target is not machine:
            self._check_entered(machine, target, transfer, phase)
        claims = self._claims.claim(transfer, machine.device, target.device, phase)
        self._flow(machine, target, transfer, claims)

    def find_constants(self, kernel: Instruction, addresses: Sequence[int | None]) -> None:
        """Notes which buffers hold the constants among the operands of a kernel that is called."""
        for name, address in zip(kernel.operands, addresses, strict=False):
            words = self._dump.words_of(name)
            if words is not None and address is not None:
                space = "vmem" if self._dump.instructions[name].shape.memory_space == VMEM else "hbm"
                buffer = self._addresses.at(space, address)
                if buffer is not None:
                    self._constants[buffer] = words

    def _flow(self, machine: Machine, target: Machine, transfer: Transfer, claims: list[Claim]) -> None:
        """Moves the bytes of a transfer, and raises its semaphores at the end."""
        remote = target is not machine
        size = transfer.granules * self._chip.granule
        self._recorder.count_bytes(
            machine.device, f"{transfer.source} to {'remote ' if remote else ''}{transfer.target}", size
        )
        lane = f"link to {target.device}" if remote else "memory"
        name = self._recorder.phase(machine.device)
        message = self._clocks.known_to(machine.device)
        links = len(self._grid.route(machine.coords, target.coords))
        latency = self._chip.cycles(self._chip.route_latency(links) if remote else self._chip.local_latency)

        def done(now: float, flow: Flow) -> None:
            self._recorder.transfer(machine.device, lane, name, "transfer" if remote else "copy", flow.started, now)
            self._claims.release(claims)
            if transfer.sent >= 0:
                cause = "send" if remote else "memory"
                self._semaphores.add(machine, transfer.sent, transfer.raised, now, cause, None)
            self._queue.at(now + latency, received)

        def received(now: float) -> None:
            cause = "receive" if remote else "memory"
            self._semaphores.add(target, transfer.received, transfer.raised, now, cause, message)

        self.network.start(machine.now, size, self._uses(machine, target, transfer), done)

    def _uses(self, machine: Machine, target: Machine, transfer: Transfer) -> tuple[Use, ...]:
        """Returns the HBM and the links that each byte of a transfer uses."""
        uses: dict = {}
        if transfer.source == "hbm":
            uses["hbm", machine.device] = 1.0
        if transfer.target == "hbm":
            uses["hbm", target.device] = uses.get(("hbm", target.device), 0.0) + 1.0
        uses |= dict.fromkeys(self._grid.route(machine.coords, target.coords), 1.0)
        return tuple(uses.items())

    def _check_entered(self, machine: Machine, target: Machine, transfer: Transfer, phase: str) -> None:
        """Raises RaceError if a kernel writes into a device that is not known to have entered the kernel."""
        instruction = self._dump.instructions.get(phase)
        if instruction is None or instruction.opcode != "custom-call":
            return
        if not self._clocks.knows_to_have_entered(machine.device, target.device, phase):
            raise self._diagnostics.not_entered(machine, target, transfer)

    def _fill_scalar_memory(self, machine: Machine, transfer: Transfer) -> None:
        """Writes the words that a transfer brings into scalar memory: those of constants and of known tables, or 0.

        Raises:
          UnknownOperationError: An asynchronous collective reads its table, which the dump lacks.
        """
        buffer = self._addresses.at_granule(transfer.source, transfer.source_address)
        granule = self._chip.granule
        words = transfer.granules * granule // 4
        first = (transfer.source_address - self._addresses.granules(buffer)[0]) * granule // 4 if buffer else 0
        contents = self._constants.get(buffer) if buffer else None
        if contents is None:
            contents = self._launch.words_of(buffer)
        name = self._recorder.phase(machine.device)
        if contents is None and buffer is not None and "constant" in buffer.label:
            collective = self._dump.collective(name)
            contents = table_of(collective, machine.code.program, self._launch.chips)
            if contents is None and self._dump.is_half_of_collective(name):
                raise UnknownOperationError(refusal(collective, name, transfer.location))
        if contents is None:
            what = buffer.label if buffer else "an unknown place"
            self.notes[f"{name}: {UNKNOWN_SCALARS} {what} are taken as 0"] += 1
            contents = []
        for n in range(words):
            machine.smem[transfer.target_address + n] = contents[first + n] if first + n < len(contents) else 0
