"""All devices of one program as one simulation: a queue of events, semaphores, transfers, calls.

Each device runs alone until it asks something of the world; that is answered in the order of time over all devices.
Events at the same time are answered in the order in which they were asked, so a run is the same every time.

Beside time, each device carries what it has heard of the others (a vector clock of instructions entered, which signals
and transfers pass on). A kernel that writes into another device without having heard that it has entered the same
kernel is a race even where the clock happens to be kind.
"""

import heapq
import re
from collections import Counter
from collections.abc import Callable

from flaxasync.check.player import collective_tables
from flaxasync.check.player.addresses import Addresses
from flaxasync.check.player.basic_blocks import Action, Code
from flaxasync.check.player.bundle_text import MARK_END, MARK_RUN, MARK_START
from flaxasync.check.player.chip_grid import Topology
from flaxasync.check.player.chips import PlayedChip
from flaxasync.check.player.diagnostics import Verdicts
from flaxasync.check.player.dump import Dump
from flaxasync.check.player.errors import PlayerError, RaceError, UnknownOperationError
from flaxasync.check.player.launch import Launch
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.network import INFINITY, Flow, Network
from flaxasync.check.player.recorder import Recorder
from flaxasync.check.player.ring_model import Ring, collective_of
from flaxasync.check.player.scalar_operations import signed
from flaxasync.check.player.transfers import (
    CHIP_MASK,
    CHIP_SHIFT,
    CORE_OF_SIGNAL,
    FLAG_MASK,
    Spans,
    Transfer,
    read_transfer,
)
from flaxasync.check.player.waiting import Waiting

_CALLED = re.compile(r"%(\S+) = ")


class Mesh:
    """The devices of a dump on a topology, ready to run once.

    Args:
      dump: the program.
      grid: the topology.
      coords: the chip of each partition.
      chip: the kind of chip.
      accept: operations that are taken to cost no more than their slot.
    """

    def __init__(
        self, dump: Dump, grid: Topology, coords: tuple[tuple[int, ...], ...], chip: PlayedChip, accept: frozenset[str]
    ):
        self.dump, self.grid, self.chip = dump, grid, chip
        self.addresses = Addresses(chip.hbm_unit)
        for program in dump.programs.values():
            self.addresses.add(program)
        self.codes = {n: Code(p, self.addresses, chip, accept=accept) for n, p in dump.programs.items()}
        self.network = Network({"hbm": chip.hbm / chip.clock, "link": chip.link / chip.clock})
        self.recorder = Recorder(len(coords))
        self.spans = Spans(self.addresses)
        self.notes: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._asked = 0
        self._queues: list[list[tuple[Action, tuple]]] = [[] for _ in coords]
        self._waiting: list[Waiting | None] = [None] * len(coords)
        self._rings: dict[tuple, Ring] = {}
        self.launch = Launch(dump, self.addresses, grid, coords)
        self.verdicts = Verdicts(dump, self.addresses, self.recorder)
        top = self.codes[dump.top.name]
        self.machines = [self.launch.machine(device, top) for device in range(len(coords))]
        self._by_chip = {m.chip_id * grid.cores + m.core: m for m in self.machines}
        # What each device knows of every device's progress, and what each semaphore passes on.
        self._heard = [[0] * len(coords) for _ in coords]
        self._told: list[dict[int, list[int]]] = [{} for _ in coords]

    def run(self) -> None:
        """Runs all devices to the end.

        Raises:
          ProtocolError: the program hangs, halts, races, leaves its buffers, or leaves a semaphore behind.
        """
        for machine in self.machines:
            self._resume(machine)
        while self._events or self.network.next < INFINITY:
            if self.network.next <= (self._events[0][0] if self._events else INFINITY):
                self.network.finish()
                continue
            now, _, answer = heapq.heappop(self._events)
            self.network.advance(now)
            answer(now)
        if any(not m.finished for m in self.machines):
            raise self.verdicts.deadlock(self.machines, self._waiting)
        if (left := self.verdicts.left_at_the_end(self.machines)) is not None:
            raise left

    # Devices.

    def _at(self, time: float, answer: Callable[[float], None]) -> None:
        self._asked += 1
        heapq.heappush(self._events, (time, self._asked, answer))

    def _resume(self, machine: Machine) -> None:
        """Lets a device run to its next question, and queues that for its time."""
        while not (asked := machine.advance()):
            if not machine.stack:
                machine.finished = True
                self.recorder.run_until(machine.device, machine.now, machine.busy)
                return
            machine.leave()
        self._queues[machine.device] = asked
        self._at(machine.now, lambda now: self._answer(machine))

    def _answer(self, machine: Machine) -> None:
        """Answers the questions of one bundle, until one has to wait."""
        queue = self._queues[machine.device]
        while queue:
            action, values = queue[0]
            if not self._act(machine, action, values):
                return
            queue.pop(0)
        self._resume(machine)

    def _released(self, machine: Machine) -> None:
        """Goes on after a wait."""
        self._queues[machine.device].pop(0)
        self._answer(machine)

    def _releaser(self, machine: Machine) -> Callable[[float], None]:
        return lambda now: self._released(machine)

    def _act(self, machine: Machine, action: Action, values: tuple) -> bool:
        """Does one thing that a device asked for; False when the device has to wait."""
        operation = action.operation
        unit = operation.unit
        if unit == "vtrace":
            self._mark(machine, values[0])
        elif unit == "dma" and operation.name != "dma.done.wait":
            self._start_transfer(machine, action, values)
        elif unit in ("dma", "vwait"):
            return self._wait(machine, action, values)
        elif operation.name == "vsyncadd":
            self._raise(machine, values[0], signed(values[1]), machine.now, "sync", self._heard[machine.device])
        elif unit == "vsyncpa":
            self._scope(machine, values[0], values[1])
        elif operation.name == "vsyncmov":
            machine.flag_values.append(machine.flags[values[0]] & 0xFFFFFFFF)
        elif operation.name == "vsyncset":
            machine.flags[values[0]] = signed(values[1])
        elif operation.name == "vsyncadd.remote":
            self._signal(machine, values)
        elif unit == "shalt":
            self._halt(machine, action)
        elif unit == "inlined_call":
            return self._call(machine, action, values)
        else:
            raise UnknownOperationError(
                f"{machine.kernel}: {operation.name} is unknown to the player; at {machine.place(action.index)}"
            )
        return True

    def _mark(self, machine: Machine, mark: int) -> None:
        if (mark & 0x0FFFFFFF) == MARK_RUN:
            return
        books = (machine.device, machine.now, machine.issue, machine.stall, machine.busy)
        if mark < MARK_END:
            name = self.dump.top_name(mark - MARK_START)
            self.recorder.open(books[0], name, *books[1:])
            self._heard[machine.device][machine.device] += 1
        elif self.recorder.depth(machine.device):
            self.recorder.close(*books)

    # Semaphores.

    def _raise(self, machine: Machine, flag: int, amount: int, now: float, cause: str, told: list[int] | None) -> None:
        """Adds to a semaphore of a device, and releases the device if it waited for that."""
        machine.flags[flag] = value = signed(machine.flags[flag] + amount)
        if told is not None and amount > 0:
            known = self._told[machine.device].setdefault(flag, [0] * len(told))
            known[:] = map(max, known, told)
        waiting = self._waiting[machine.device]
        if waiting is None or waiting.flag != flag or not waiting.over(value):
            return
        self._waiting[machine.device] = None
        name = waiting.action.operation.comment or waiting.action.operation.name
        self.recorder.wait(machine.device, machine.now, max(now, machine.now), name, cause, machine.busy)
        machine.wait_until(now)
        self._hear(machine, flag)
        self._at(machine.now, lambda now: self._released(machine))

    def _hear(self, machine: Machine, flag: int) -> None:
        if (told := self._told[machine.device].get(flag)) is not None:
            heard = self._heard[machine.device]
            heard[:] = map(max, heard, told)

    def _wait(self, machine: Machine, action: Action, values: tuple) -> bool:
        operation = action.operation
        order = "ge" if operation.unit == "dma" else operation.name.split(".")[1]
        waiting = Waiting(values[0], order, signed(values[1]), action)
        if waiting.over(machine.flags[waiting.flag]):
            self._hear(machine, waiting.flag)
            return True
        self._waiting[machine.device] = waiting
        return False

    def _signal(self, machine: Machine, values: tuple) -> None:
        target = self._device((values[0] >> CHIP_SHIFT) & CHIP_MASK, values[0] >> CORE_OF_SIGNAL & 1, machine)
        flag, amount = values[0] & FLAG_MASK, signed(values[1])
        told = list(self._heard[machine.device])
        delay = self.chip.cycles(self.chip.sync_latency) if target is not machine else 0.0
        self._at(machine.now + delay, lambda now: self._raise(target, flag, amount, now, "sync", told))

    def _scope(self, machine: Machine, flag: int, end: int) -> None:
        """Begins or ends the life of a semaphore: it is zero at both."""
        if end and machine.flags[flag]:
            raise self.verdicts.left_in_scope(machine, flag)
        machine.flags[flag] = 0

    def _device(self, chip: int, core: int, machine: Machine) -> Machine:
        number = chip * self.grid.cores + core % self.grid.cores
        if number not in self._by_chip:
            raise PlayerError(
                f"{machine.kernel} on device {machine.device} addresses chip {chip}, which {self.grid.name} lacks: "
                "name the topology that the program was compiled for"
            )
        return self._by_chip[number]

    # Transfers.

    def _start_transfer(self, machine: Machine, action: Action, values: tuple) -> None:
        phase = self.verdicts.phase(machine)
        transfer = read_transfer(action.operation, values, machine.code.program.place(action.index), phase)
        if transfer is None:
            return
        target = machine if transfer.chip < 0 else self._device(transfer.chip, transfer.core, machine)
        size = transfer.granules * self.chip.granule
        if transfer.target == "smem":
            self._fill_scalars(machine, transfer)
        if target is not machine:
            self._check_entered(machine, target, transfer, phase)
        spans = self.spans.claim(transfer, machine.device, target.device, phase)
        uses: dict = {}
        if transfer.source == "hbm":
            uses["hbm", machine.device] = 1.0
        if transfer.target == "hbm":
            uses["hbm", target.device] = uses.get(("hbm", target.device), 0.0) + 1.0
        route = self.grid.route(machine.coords, target.coords)
        uses |= dict.fromkeys(route, 1.0)
        kind = f"{transfer.source} to {'remote ' if target is not machine else ''}{transfer.target}"
        self.recorder.move(machine.device, kind, size)
        lane = f"link to {target.device}" if target is not machine else "memory"
        told = list(self._heard[machine.device])
        name = self.recorder.phase(machine.device)

        def done(now: float, flow: Flow) -> None:
            style = "transfer" if target is not machine else "copy"
            self.recorder.transfer(machine.device, lane, name, style, flow.started, now)
            self.spans.release(spans)
            remote = target is not machine
            latency = self.chip.cycles(self.chip.remote_latency if remote else self.chip.local_latency)
            if transfer.sent >= 0:
                self._raise(machine, transfer.sent, transfer.raised, now, "send" if remote else "memory", None)
            cause = "receive" if remote else "memory"
            self._at(
                now + latency, lambda now: self._raise(target, transfer.received, transfer.raised, now, cause, told)
            )

        self.network.start(machine.now, size, tuple(uses.items()), done)

    def _check_entered(self, machine: Machine, target: Machine, transfer: Transfer, phase: str) -> None:
        """Raises RaceError when a kernel writes into a device that it has not heard from since both entered it."""
        instruction = self.dump.instructions.get(phase)
        if instruction is None or instruction.opcode != "custom-call":
            return
        heard = self._heard[machine.device]
        if heard[target.device] < heard[machine.device]:
            raise RaceError(
                f"{phase}: device {machine.device} writes into device {target.device} "
                f"({transfer.name}, {transfer.place}) without having heard that it has entered the kernel: "
                f"a barrier with the receiver is missing{self.verdicts.made(machine)}"
            )

    def _fill_scalars(self, machine: Machine, transfer: Transfer) -> None:
        """Writes what a transfer brings into scalar memory: the few tables whose contents can be told.

        Raises:
          UnknownOperationError: an asynchronous collective reads its table, which the dump lacks.
        """
        buffer = self.addresses.at_granule("hbm", transfer.source_address)
        words = transfer.granules * self.chip.granule // 4
        first = (transfer.source_address - self.addresses.granules(buffer)[0]) * self.chip.granule // 4 if buffer else 0
        contents = self.launch.table(buffer)
        if contents is None and buffer is not None and "constant" in buffer.label:
            name = self.recorder.phase(machine.device)
            contents = collective_tables.contents(self.dump.collective(name), machine.code.program, self.launch.chips)
            if contents is None and self.dump.is_half(name):
                raise UnknownOperationError(collective_tables.refusal(self.dump.collective(name), name, transfer.place))
        if contents is None:
            what = buffer.label if buffer else "an unknown place"
            self.notes[f"{self.recorder.phase(machine.device)}: scalars read from {what} are taken as 0"] += 1
            contents = []
        for n in range(words):
            machine.smem[transfer.target_address + n] = contents[first + n] if first + n < len(contents) else 0

    # Calls, collectives, the end.

    def _call(self, machine: Machine, action: Action, values: tuple) -> bool:
        comment = action.operation.comment
        if "late-" in comment:
            return True
        match = _CALLED.match(comment)
        name = match[1] if match else comment.strip()
        program, dumped_as = self.dump.program_of(name)
        instruction = self.dump.collective(name)
        collective = collective_of(instruction, self.dump.devices)
        in_step = self.chip.cores > 1  # two cores share a collective, and one is played
        if collective is not None and (
            in_step or not collective_tables.playable(instruction, program, self.dump.devices)
        ):
            return self._join_ring(machine, name, collective)
        if dumped_as != name:
            self.notes["an instruction is played with the bundles of another: libtpu dumps identical ones once"] += 1
        machine.call(self.codes[program.name], values)
        return True

    def _join_ring(self, machine: Machine, name: str, collective: Ring) -> bool:
        """Enters a collective that is timed by a ring model; the last device of the group to come releases all."""
        group = collective.group_of(machine.device)
        ring = self._rings.setdefault((name, group), collective.fresh())
        ring.arrived[machine.device] = machine.now
        self.recorder.mark_analytic(machine.device)
        if len(ring.arrived) < len(group):
            return False
        del self._rings[name, group]
        end = machine.now + ring.cycles(group, self.chip)
        for device in group:
            other = self.machines[device]
            self.recorder.wait(device, other.now, end, name, "collective", other.busy)
            self.recorder.move(device, "collective (ring model)", ring.volume(group))
            other.wait_until(end)
            self._heard[device] = [max(values) for values in zip(*(self._heard[d] for d in group), strict=True)]
            if other is not machine:
                self._at(end, self._releaser(other))
        self._at(end, lambda now: self._released(machine))
        return False

    def _halt(self, machine: Machine, action: Action) -> None:
        if "Megacore" in action.operation.comment:
            self.notes["the two cores of a chip are taken to keep step: core 0 is played"] += 1
            return
        raise self.verdicts.halted(machine, action)
