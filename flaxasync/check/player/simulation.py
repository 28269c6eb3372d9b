"""All devices of one program as one simulation.

Each device runs alone until its next external operation: a transfer, a semaphore, a call or a trace
mark. These operations are executed in the order of time over all devices. Operations at the same
time are executed in the order in which they were reached, so a simulation is the same every time.
"""

import functools
import heapq
import math
import re

from flaxasync.check.player import errors
from flaxasync.check.player.basic_blocks import ExternalOperation
from flaxasync.check.player.bundle_text import MARK_END, MARK_RUN, MARK_START
from flaxasync.check.player.collectives import (
    ModelledCollective,
    can_be_simulated,
    modelled_collective,
)
from flaxasync.check.player.dump import TOP
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.result import RING_MODEL, SIGNAL
from flaxasync.check.player.scalar_operations import signed
from flaxasync.check.player.semaphores import SEMAPHORE_MASK, Semaphores
from flaxasync.check.player.state import State
from flaxasync.check.player.transfers import CHIP_MASK, TransferEngine

# where the operand of a remote signal names the chip, and the core on it
_CHIP_SHIFT = 17
_CORE_BIT = 14
_CALLED = re.compile(r"%(\S+) = ")  # the name of the HLO instruction, in the comment of a call


class Simulation:
    """The devices of a program, ready to run once."""

    def __init__(self, state: State):
        self._state = state
        self._semaphores = Semaphores(state, self._go_on)
        self._engine = TransferEngine(state, self._semaphores)
        self._pending: list[list[tuple[ExternalOperation, tuple]]] = [[] for _ in state.machines]
        # those that have not begun, by name and group
        self._collectives: dict[tuple, ModelledCollective] = {}

    def run(self) -> None:
        """Runs all devices to the end, or until `state.stop_at`. ProtocolError says which rule of
        the machine the program breaks.
        """
        state = self._state
        network = self._engine.network
        for machine in state.running:
            self._advance(machine)
        while state.events or network.next < math.inf:
            now = min(state.next_event, network.next)
            if now > state.stop_at:
                return
            if now == network.next:
                network.finish()
            else:
                _, _, answer = heapq.heappop(state.events)
                network.advance(now)
                answer()
        if any(not m.finished for m in state.running):
            raise self._semaphores.deadlock()
        self._semaphores.end_program()

    def _advance(self, machine: Machine) -> None:
        """Lets a device run to its next external operations, and queues these for their time."""
        while not (operations := machine.advance()):
            if not machine.stack:
                machine.finished = True
                machine.recorder.run_until(machine.now)
                return
            machine.leave()
        self._pending[machine.device] = operations
        self._state.at(machine.now, functools.partial(self._execute_pending, machine))

    def _execute_pending(self, machine: Machine) -> None:
        """Executes the external operations of one bundle, until one of them has to wait."""
        pending = self._pending[machine.device]
        while pending:
            external, values = pending[0]
            if not self._execute(machine, external, values):
                return
            pending.pop(0)
        self._advance(machine)

    def _go_on(self, machine: Machine) -> None:
        """Lets a device go on after the operation for which it waited."""
        self._pending[machine.device].pop(0)
        self._execute_pending(machine)

    def _execute(self, machine: Machine, external: ExternalOperation, values: tuple) -> bool:
        """Executes one external operation. Returns False if the device has to wait for it."""
        name = external.operation.name
        unit = external.operation.unit
        if unit == "vtrace":
            self._mark(machine, values[0])
        elif unit == "vwait" or name == "dma.done.wait":
            return self._semaphores.wait(machine, external, values)
        elif unit == "dma":
            self._engine.start(machine, external, values)
        elif name == "vsyncadd":
            message = self._state.clocks.known_to(machine.device)
            self._semaphores.add(
                machine, values[0], signed(values[1]), machine.now, SIGNAL, message
            )
        elif name == "vsyncadd.remote":
            self._signal(machine, values)
        elif unit == "vsyncpa":  # the life of a semaphore begins, or ends
            if values[1]:
                self._semaphores.end_scope(machine, values[0])
            machine.semaphores[values[0]] = 0
        elif name == "vsyncmov":
            machine.semaphore_values.append(machine.semaphores[values[0]] & 0xFFFFFFFF)
        elif name == "vsyncset":
            machine.semaphores[values[0]] = signed(values[1])
        elif unit == "shalt":
            if "Megacore" not in external.operation.comment:
                raise self._halted(machine, external)
            self._state.notes[
                "the two cores of a chip are taken to keep step: core 0 is simulated"
            ] += 1
        elif unit == "inlined_call":
            return self._call(machine, external, values)
        else:
            raise errors.UnknownOperationError(
                f"{machine.kernel}: {name} is unknown to the player; at "
                f"{machine.location(external.index)}"
            )
        return True

    def _mark(self, machine: Machine, mark: int) -> None:
        if (mark & MARK_RUN) == MARK_RUN:
            return
        if mark < MARK_END:
            number = mark - MARK_START
            instruction = self._state.dump.programs[TOP].marks.get(number, f"instruction {number}")
            machine.recorder.enter_phase(instruction, machine.now)
            self._state.clocks.enter(machine.device, instruction)
        else:
            machine.recorder.leave_phase(machine.now)

    def _signal(self, machine: Machine, values: tuple) -> None:
        state = self._state
        chip_id = (values[0] >> _CHIP_SHIFT) & CHIP_MASK
        core = values[0] >> _CORE_BIT & 1
        target = state.addressed(chip_id, core, machine)
        semaphore = values[0] & SEMAPHORE_MASK
        amount = signed(values[1])
        message = state.clocks.known_to(machine.device)
        links = len(state.grid.route(machine.coords, target.coords))
        now = machine.now
        if target is not machine:
            now += state.chip.cycles(state.chip.route_latency(links, signal=True))
        receiver = state.receiver(target)
        state.at(
            now, lambda: self._semaphores.add(receiver, semaphore, amount, now, SIGNAL, message)
        )

    def _halted(self, machine: Machine, external: ExternalOperation) -> errors.ProtocolError:
        comment = external.operation.comment
        if comment:
            first = comment.splitlines()[0]
        else:
            first = "no reason given"
        where = f"device {machine.device} in {machine.phase}, {machine.location(external.index)}"
        kind: type[errors.ProtocolError] = errors.HaltError
        what = f"the program halts: {first}"
        if "BoundsCheck" in comment:
            kind = errors.OutOfBoundsError
            what = f"the program's own bounds check stops a transfer ({first})"
        elif "nonzero value" in comment:
            kind = errors.LeftoverSemaphoreError
            what = first
        return kind(f"{where}: {what}{self._state.made_at(machine)}")

    def _call(self, machine: Machine, external: ExternalOperation, values: tuple) -> bool:
        """Enters the bundles of an HLO instruction, or a collective that is timed by the ring
        model.
        """
        comment = external.operation.comment
        if "late-" in comment:
            return True  # the runtime's set-up or tear-down
        match = _CALLED.match(comment)
        name = comment.strip()
        if match:
            name = match[1]
        dump = self._state.dump
        cores = self._state.chip.cores
        devices = dump.module.num_partitions
        program = dump.program_of(name)
        instruction = dump.collective(name)
        collective = modelled_collective(instruction, devices)
        # Two cores of a chip share the work of a collective, and only one core is simulated.
        if collective is not None and (
            cores > 1 or not can_be_simulated(instruction, program, devices)
        ):
            self._join(machine, name, collective)
            return False
        if instruction is not None and instruction.opcode == "custom-call":
            self._engine.find_constants(instruction, values)
        machine.call(self._state.prepared.codes[program.name], values)
        return True

    def _join(self, machine: Machine, name: str, collective: ModelledCollective) -> None:
        """Joins a collective that is timed by the ring model. It begins when the last device of the
        group joins.
        """
        group = next((g for g in collective.groups if machine.device in g), (machine.device,))
        self._state.reach(group, machine.now)
        joined = self._collectives.setdefault((name, group), collective)
        joined.arrived += 1
        machine.recorder.mark_analytic()
        if joined.arrived < len(group):
            return
        del self._collectives[name, group]
        end = machine.now + joined.cycles(group, self._state.chip)
        self._state.clocks.synchronize(group)
        # this device, which arrived last, is the last one to go on
        for member in (self._state.machines[device] for device in group):
            member.recorder.wait(member.now, end, name, "collective", RING_MODEL)
            member.recorder.bytes[RING_MODEL] += joined.sent_bytes(group)
            member.wait_until(end)
            if member is not machine:
                self._state.at(end, functools.partial(self._go_on, member))
        self._state.at(end, functools.partial(self._go_on, machine))
