"""All devices of one program as one simulation.

Each device runs alone until its next external operation: a transfer, a semaphore, a call or a trace mark. These
operations are executed in the order of time over all devices. Operations at the same time are executed in the order in
which they were reached, so a simulation is the same every time.
"""

import re
from collections import Counter

from flaxasync.check.player.addresses import Addresses
from flaxasync.check.player.basic_blocks import Code, ExternalOperation
from flaxasync.check.player.bundle_text import MARK_END, MARK_RUN, MARK_START
from flaxasync.check.player.chip_grid import ChipGrid, Coords
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.collective_tables import can_be_simulated
from flaxasync.check.player.devices import Devices
from flaxasync.check.player.diagnostics import Diagnostics
from flaxasync.check.player.dump import Dump
from flaxasync.check.player.errors import UnknownOperationError
from flaxasync.check.player.event_queue import Answer, EventQueue
from flaxasync.check.player.launch import Launch
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.network import INFINITY
from flaxasync.check.player.recorder import Recorder
from flaxasync.check.player.ring_model import ModelledCollective, modelled_collective
from flaxasync.check.player.scalar_operations import signed
from flaxasync.check.player.semaphores import Semaphores
from flaxasync.check.player.transfer_engine import TransferEngine
from flaxasync.check.player.transfers import CHIP_MASK, CHIP_SHIFT, CORE_BIT_OF_SIGNAL, SEMAPHORE_MASK
from flaxasync.check.player.vector_clocks import VectorClocks

_CALLED = re.compile(r"%(\S+) = ")  # the name of the HLO instruction, in the comment of a call


class Simulation:
    """The devices of a dump on a topology, ready to run once.

    Attributes:
      dump: The program.
      grid: The topology.
      chip: The kind of chip.
      machines: The devices.
      recorder: The records of the simulation.
    """

    def __init__(
        self, dump: Dump, grid: ChipGrid, coords: tuple[Coords, ...], chip: PlayedChip, accept: frozenset[str]
    ):
        """Prepares a simulation.

        Args:
          dump: The program.
          grid: The topology.
          coords: The chip of each partition.
          chip: The kind of chip.
          accept: Names of unknown operations that are assumed to cost only their slot in a bundle.
        """
        self.dump, self.grid, self.chip = dump, grid, chip
        addresses = Addresses(chip.hbm_unit)
        for program in dump.programs.values():
            addresses.add(program)
        self._codes = {n: Code(p, addresses, chip, accept=accept) for n, p in dump.programs.items()}
        self.recorder = Recorder(len(coords))
        self._diagnostics = Diagnostics(dump, addresses, self.recorder)
        launch = Launch(dump, addresses, grid, coords)
        self._devices = Devices(launch, grid, self._codes[dump.top.name], self._diagnostics)
        self.machines = self._devices.machines
        self._queue = EventQueue()
        self._clocks = VectorClocks(len(coords))
        self._semaphores = Semaphores(len(coords), self._queue, self._clocks, self.recorder, self._go_on)
        self._engine = TransferEngine(
            dump, addresses, grid, chip, launch, self._devices, self._queue, self._clocks, self._semaphores,
            self.recorder, self._diagnostics,
        )  # fmt: skip
        self._network = self._engine.network
        self._pending: list[list[tuple[ExternalOperation, tuple]]] = [[] for _ in coords]
        self._collectives: dict[tuple, ModelledCollective] = {}  # those that have not begun, by name and group
        self._notes: Counter[str] = Counter()

    def run(self) -> None:
        """Runs all devices to the end.

        Raises:
          ProtocolError: The program hangs, halts, races, leaves its buffers, or ends with a semaphore that is not zero.
        """
        for machine in self.machines:
            self._advance(machine)
        while min(self._queue.next, self._network.next) < INFINITY:
            if self._network.next <= self._queue.next:
                self._network.finish()
                continue
            now, answer = self._queue.pop()
            self._network.advance(now)
            answer(now)
        if any(not m.finished for m in self.machines):
            raise self._diagnostics.deadlock(self.machines, self._semaphores.waits)
        if (left := self._diagnostics.left_at_the_end(self.machines)) is not None:
            raise left

    def notes(self) -> Counter[str]:
        """Returns what the simulation could not know, and how often."""
        return sum((m.notes for m in self.machines), self._notes + self._engine.notes)

    # The devices.

    def _advance(self, machine: Machine) -> None:
        """Lets a device run to its next external operations, and queues these for their time."""
        while not (operations := machine.advance()):
            if not machine.stack:
                machine.finished = True
                self.recorder.run_until(machine.device, machine.now, machine.busy)
                return
            machine.leave()
        self._pending[machine.device] = operations
        self._queue.at(machine.now, lambda now: self._execute_pending(machine))

    def _execute_pending(self, machine: Machine) -> None:
        """Executes the external operations of one bundle, until one of them has to wait."""
        pending = self._pending[machine.device]
        while pending:
            operation, values = pending[0]
            if not self._execute(machine, operation, values):
                return
            pending.pop(0)
        self._advance(machine)

    def _go_on(self, machine: Machine) -> None:
        """Lets a device go on after the operation for which it waited."""
        self._pending[machine.device].pop(0)
        self._execute_pending(machine)

    def _execute(self, machine: Machine, external: ExternalOperation, values: tuple) -> bool:
        """Executes one external operation. Returns False if the device has to wait for it."""
        operation = external.operation
        unit = operation.unit
        if unit == "vtrace":
            self._mark(machine, values[0])
        elif unit == "dma" and operation.name != "dma.done.wait":
            self._engine.start(machine, external, values)
        elif unit in ("dma", "vwait"):
            return self._semaphores.wait(machine, external, values)
        elif operation.name == "vsyncadd":
            message = self._clocks.known_to(machine.device)
            self._semaphores.add(machine, values[0], signed(values[1]), machine.now, "sync", message)
        elif unit == "vsyncpa":
            self._begin_or_end_of_life(machine, values[0], is_end=bool(values[1]))
        elif operation.name == "vsyncmov":
            machine.semaphore_values.append(machine.semaphores[values[0]] & 0xFFFFFFFF)
        elif operation.name == "vsyncset":
            machine.semaphores[values[0]] = signed(values[1])
        elif operation.name == "vsyncadd.remote":
            self._signal(machine, values)
        elif unit == "shalt":
            self._halt(machine, external)
        elif unit == "inlined_call":
            return self._call(machine, external, values)
        else:
            raise UnknownOperationError(
                f"{machine.kernel}: {operation.name} is unknown to the player; at {machine.location(external.index)}"
            )
        return True

    def _mark(self, machine: Machine, mark: int) -> None:
        """Begins or ends an instruction of the program."""
        if (mark & 0x0FFFFFFF) == MARK_RUN:
            return
        counts = machine.now, machine.issue, machine.stall, machine.busy
        if mark < MARK_END:
            instruction = self.dump.instruction_of_mark(mark - MARK_START)
            self.recorder.enter_phase(machine.device, instruction, *counts)
            self._clocks.enter(machine.device, instruction)
        elif self.recorder.depth(machine.device):
            self.recorder.leave_phase(machine.device, *counts)

    def _begin_or_end_of_life(self, machine: Machine, semaphore: int, *, is_end: bool) -> None:
        """Begins or ends the lifetime of a semaphore. Its value must be zero at the end, and is zero at the beginning.

        Raises:
          LeftoverSemaphoreError: The value is not zero at the end.
        """
        if is_end and machine.semaphores[semaphore]:
            raise self._diagnostics.left_in_scope(machine, semaphore)
        machine.semaphores[semaphore] = 0

    def _signal(self, machine: Machine, values: tuple) -> None:
        """Signals a semaphore of a device, which may be another one."""
        chip, core = (values[0] >> CHIP_SHIFT) & CHIP_MASK, values[0] >> CORE_BIT_OF_SIGNAL & 1
        target = self._devices.addressed(chip, core, machine)
        semaphore, amount = values[0] & SEMAPHORE_MASK, signed(values[1])
        message = self._clocks.known_to(machine.device)
        links = len(self.grid.route(machine.coords, target.coords))
        delay = self.chip.cycles(self.chip.route_latency(links, signal=True)) if target is not machine else 0.0
        self._queue.at(
            machine.now + delay, lambda now: self._semaphores.add(target, semaphore, amount, now, "sync", message)
        )

    def _halt(self, machine: Machine, external: ExternalOperation) -> None:
        if "Megacore" in external.operation.comment:
            self._notes["the two cores of a chip are taken to keep step: core 0 is simulated"] += 1
            return
        raise self._diagnostics.halted(machine, external)

    # Calls and collectives.

    def _call(self, machine: Machine, external: ExternalOperation, values: tuple) -> bool:
        """Enters the bundles of an HLO instruction, or a collective that is timed by the ring model."""
        comment = external.operation.comment
        if "late-" in comment:
            return True  # the runtime's set-up or tear-down
        match = _CALLED.match(comment)
        name = match[1] if match else comment.strip()
        program, dumped_as = self.dump.program_of(name)
        instruction = self.dump.collective(name)
        collective = modelled_collective(instruction, self.dump.devices)
        # Two cores of a chip share the work of a collective, and only one core is simulated.
        cores_share = self.chip.cores > 1
        if collective is not None and (cores_share or not can_be_simulated(instruction, program, self.dump.devices)):
            return self._join(machine, name, collective)
        if dumped_as != name:
            self._notes[
                "an instruction is simulated with the bundles of another: libtpu dumps identical ones once"
            ] += 1
        if instruction is not None and instruction.opcode == "custom-call":
            self._engine.find_constants(instruction, values)
        machine.call(self._codes[program.name], values)
        return True

    def _join(self, machine: Machine, name: str, collective: ModelledCollective) -> bool:
        """Joins a collective that is timed by the ring model. It begins when the last device of the group joins."""
        group = collective.group_of(machine.device)
        joined = self._collectives.setdefault((name, group), collective.fresh())
        joined.arrived.add(machine.device)
        self.recorder.mark_analytic(machine.device)
        if len(joined.arrived) < len(group):
            return False
        del self._collectives[name, group]
        end = machine.now + joined.cycles(group, self.chip)
        self._clocks.synchronize(group)
        for device in group:
            member = self.machines[device]
            self.recorder.wait(device, member.now, end, name, "collective", member.busy)
            self.recorder.count_bytes(device, "collective (ring model)", joined.sent_bytes(group))
            member.wait_until(end)
            if member is not machine:
                self._queue.at(end, self._goes_on(member))
        self._queue.at(end, self._goes_on(machine))
        return False

    def _goes_on(self, machine: Machine) -> Answer:
        return lambda now: self._go_on(machine)
