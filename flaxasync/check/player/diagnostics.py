"""What is wrong with a run, in words: names of semaphores, places in the dump, lines of the Python source."""

from collections.abc import Sequence

from flaxasync.check.player.addresses import Addresses
from flaxasync.check.player.basic_blocks import Action
from flaxasync.check.player.dump import Dump
from flaxasync.check.player.errors import (
    Blocked,
    DeadlockError,
    HaltError,
    LeftoverSemaphoreError,
    OutOfBoundsError,
    ProtocolError,
)
from flaxasync.check.player.machine import Machine
from flaxasync.check.player.recorder import Recorder
from flaxasync.check.player.waiting import Waiting

_SHOWN = 16  # leftover semaphores that a message lists


class Verdicts:
    """Words for one run."""

    def __init__(self, dump: Dump, addresses: Addresses, recorder: Recorder):
        self._dump, self._addresses, self._recorder = dump, addresses, recorder

    def phase(self, machine: Machine) -> str:
        """Returns the instruction that a device is in."""
        return self._recorder.phase(machine.device) or machine.kernel

    def made(self, machine: Machine) -> str:
        """Returns where in the Python source the operation comes from, as the end of a message."""
        source = self._dump.source(self.phase(machine))
        return f"; the operation was made at {source}" if source else ""

    def semaphore(self, flag: int) -> str:
        buffer = self._addresses.at("sflag", flag)
        if buffer is not None:
            index = f"[{flag - buffer.address}]" if buffer.size > 1 else ""
            return f"semaphore {flag}{index}, {buffer.label},"
        return f"semaphore {flag}, {self._addresses.fixed.get(('sflag', flag), 'unnamed')},"

    def halted(self, machine: Machine, action: Action) -> ProtocolError:
        """One of the program's own checks failed."""
        comment = action.operation.comment
        where = f"device {machine.device} in {self.phase(machine)}, {machine.place(action.index)}"
        first = comment.splitlines()[0] if comment else "no reason given"
        made = self.made(machine)
        if "BoundsCheck" in comment:
            return OutOfBoundsError(f"{where}: the program's own bounds check stops a transfer ({first}){made}")
        if "nonzero value" in comment:
            return LeftoverSemaphoreError(f"{where}: {first}{made}")
        return HaltError(f"{where}: the program halts: {first}{made}")

    def left_in_scope(self, machine: Machine, flag: int) -> LeftoverSemaphoreError:
        return LeftoverSemaphoreError(
            f"device {machine.device}: {self.semaphore(flag)} is {machine.flags[flag]} at the end of its life in "
            f"{machine.kernel}, {machine.place()}: a transfer or signal was not waited for{self.made(machine)}"
        )

    def left_at_the_end(self, machines: Sequence[Machine]) -> LeftoverSemaphoreError | None:
        left = [
            f"device {m.device}: {self.semaphore(flag)} is {value}"
            for m in machines
            for flag, value in sorted(m.flags.items())
            if value
        ]
        if not left:
            return None
        listed = "\n  ".join(left[:_SHOWN])
        return LeftoverSemaphoreError(f"semaphores are not zero at the end of the program:\n  {listed}")

    def deadlock(self, machines: Sequence[Machine], waiting: Sequence[Waiting | None]) -> DeadlockError:
        blocked = tuple(self._blocked(m, waiting[m.device]) for m in machines if not m.finished)
        return DeadlockError(blocked, tuple(m.device for m in machines if m.finished))

    def _blocked(self, machine: Machine, waiting: Waiting | None) -> Blocked:
        phase = self.phase(machine)
        source = self._dump.source(phase)
        if waiting is None:
            others = "the other devices of its group"
            return Blocked(machine.device, phase, others, 0, "to join", "", machine.place(), source)
        return Blocked(
            machine.device,
            phase,
            self.semaphore(waiting.flag),
            machine.flags[waiting.flag],
            waiting.needed_words,
            waiting.action.operation.comment,
            machine.place(waiting.action.index),
            source,
        )
