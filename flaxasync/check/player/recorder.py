"""The records of a simulation: stretches of time on lanes, the phases of the program, and bytes by kind."""

import dataclasses
from collections import Counter

# What a device can wait for.
CAUSES = {
    "memory": "a transfer within its own chip",
    "receive": "bytes from another device",
    "send": "its own bytes to have left for another device",
    "sync": "a signal of another device",
    "collective": "a collective of XLA that is timed by a ring model",
}


@dataclasses.dataclass(slots=True)
class Stretch:
    """What one lane of a device does for a stretch of time. Times are in cycles.

    Attributes:
      device: The device.
      lane: "core", "memory" or "link to N".
      name: The instruction, or what was waited for.
      kind: "run", "wait", "transfer" or "copy".
      start: When it begins.
      end: When it ends.
      cause: A key of CAUSES if the core waits; the instruction if it is a transfer.
      busy: Cycles of it in which a matrix unit multiplied.
    """

    device: int
    lane: str
    name: str
    kind: str
    start: float
    end: float
    cause: str = ""
    busy: int = 0


@dataclasses.dataclass(slots=True)
class PhaseTime:
    """The time of one device in one instruction of the program, for one execution of it, in cycles.

    Attributes:
      device: The device.
      name: The instruction.
      start: When it began.
      end: When it ended.
      depth: The number of instructions (loops) around it.
      issue: Cycles in which a bundle was issued.
      stall: Cycles in which a bundle waited for a matrix unit.
      busy: Cycles in which the busiest matrix unit multiplied.
      waits: Cycles of waiting, by cause.
      analytic: Whether a collective in it was timed by the ring model.
      bytes: Bytes that its transfers moved, by kind.
    """

    device: int
    name: str
    start: float
    end: float
    depth: int
    issue: int
    stall: int
    busy: int
    waits: Counter[str]
    analytic: bool
    bytes: Counter[str]


@dataclasses.dataclass(slots=True)
class _OpenPhase:
    """A phase that has begun and not ended, with the counts of its device at its beginning."""

    name: str
    start: float
    issue: int
    stall: int
    busy: int
    waits: Counter[str]
    bytes: Counter[str]
    analytic: bool = False


class Recorder:
    """The records of all devices.

    Attributes:
      stretches: The stretches of time, in the order in which they ended.
      phases: The phases, in the order in which they ended.
      waits: Cycles of waiting of each device, by cause.
      bytes: Bytes that the transfers of each device moved, by kind.
    """

    def __init__(self, devices: int):
        self.stretches: list[Stretch] = []
        self.phases: list[PhaseTime] = []
        self.waits: list[Counter[str]] = [Counter() for _ in range(devices)]
        self.bytes: list[Counter[str]] = [Counter() for _ in range(devices)]
        self._open: list[list[_OpenPhase]] = [[] for _ in range(devices)]
        self._run_start = [0.0] * devices
        self._run_busy = [0] * devices

    def phase(self, device: int) -> str:
        """Returns the innermost instruction that a device is in; "" if it is in none."""
        return self._open[device][-1].name if self._open[device] else ""

    def depth(self, device: int) -> int:
        """Returns the number of instructions that a device is in, one within the other."""
        return len(self._open[device])

    def enter_phase(self, device: int, name: str, now: float, issue: int, stall: int, busy: int) -> None:
        """Begins an instruction. The last three arguments are the counts of the device so far."""
        self.run_until(device, now, busy)
        entry = _OpenPhase(name, now, issue, stall, busy, self.waits[device].copy(), self.bytes[device].copy())
        self._open[device].append(entry)

    def leave_phase(self, device: int, now: float, issue: int, stall: int, busy: int) -> None:
        """Ends the innermost instruction. The last three arguments are the counts of the device so far."""
        self.run_until(device, now, busy)
        entry = self._open[device].pop()
        waits, moved = self.waits[device] - entry.waits, self.bytes[device] - entry.bytes
        self.phases.append(
            PhaseTime(
                device, entry.name, entry.start, now, len(self._open[device]), issue - entry.issue, stall - entry.stall,
                busy - entry.busy, waits, entry.analytic, moved,
            )
        )  # fmt: skip

    def mark_analytic(self, device: int) -> None:
        """Notes that the ring model times a collective in the innermost instruction."""
        if self._open[device]:
            self._open[device][-1].analytic = True

    def run_until(self, device: int, now: float, busy: int) -> None:
        """Ends the current stretch in which the core runs."""
        start = self._run_start[device]
        if now > start:
            name = self.phase(device) or "program"
            self.stretches.append(Stretch(device, "core", name, "run", start, now, "", busy - self._run_busy[device]))
        self._run_start[device], self._run_busy[device] = now, busy

    def wait(self, device: int, start: float, end: float, name: str, cause: str, busy: int) -> None:
        """Records that the core waited."""
        if end <= start:
            return
        self.run_until(device, start, busy)
        self.waits[device][cause] += end - start  # type: ignore[assignment]
        self.stretches.append(Stretch(device, "core", name, "wait", start, end, cause))
        self._run_start[device] = end

    def transfer(self, device: int, lane: str, name: str, kind: str, start: float, end: float) -> None:
        """Records that a transfer of the device was under way."""
        self.stretches.append(Stretch(device, lane, name, kind, start, end, name))

    def count_bytes(self, device: int, kind: str, size: int) -> None:
        self.bytes[device][kind] += size
