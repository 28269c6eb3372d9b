"""Reads a profile of `jax.profiler`, and says how much communication was exposed, beside the
estimate of the program.

    python -m flaxasync.check trace PATH [--program HLO] [--module NAME] [--chip v5e] [--json]

The exit status is 0, or 2 if the profile or the program cannot be read. Exposed communication is
the time in which a device communicates and does not compute: the union of the intervals of
communication less the union of those of compute. Adding the times of single instructions would
count a moment as often as instructions share it, and would count a loop beside what runs in it. A
Pallas kernel that sends and multiplies is one instruction, and counts as compute: what it waits for
inside is not in a profile, but in the simulation of the program. The two halves of an asynchronous
operation are no compute, whatever is under way. The program says which pairs of kernels
communicate, and which fusions are such halves or hold a collective; without it, names do.
"""

import argparse
import bisect
import dataclasses
import json
import math
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from flaxasync.check.estimate.estimator import timeline
from flaxasync.check.estimate.phases import layer_of
from flaxasync.check.estimate.timeline import Timeline
from flaxasync.check.hlo.async_operations import (
    COLLECTIVES,
    async_operations,
    synchronous_collective,
)
from flaxasync.check.hlo.load import read_module
from flaxasync.check.hlo.module import CONTROL_FLOW, HloModule, Instruction
from flaxasync.check.trace.profile import (
    BARRIER,
    DeviceProfile,
    Event,
    Interval,
    clip,
    read_profile,
    seconds,
    union,
)
from flaxasync.hardware import CHIPS, GPUS

# How the names of instructions between devices begin, where no program says what they are.
COMMUNICATION = (
    *COLLECTIVES,
    "ppermute",
    "all_gather",
    "psum",
    "reduce_scatter",
    "psum_scatter",
    "all_to_all",
    "nccl",
    "rccl",
    BARRIER,
    "async-collective-start",
    "async-collective-done",  # fusions of libtpu
)
# the end of the name of a start, an update or a done
_HALF = re.compile(r"-(?:start|update|done)(?:\.\d+)*$")
SHOWN = 12  # instructions and layers in the table
_START = operator.attrgetter("start")


class ProfiledProgram:
    """What is known of the instructions in a profile: what the text of the program says of them, if
    there is one.
    """

    def __init__(self, module: HloModule | None):
        self._instructions: dict[str, Instruction] = {}
        self._communicating: set[str] = set()
        self._halves: set[str] = set()  # starts, updates and dones
        if module is None:
            return
        for i in module.instructions:
            self._instructions[i.name] = i
            if synchronous_collective(i) is not None:
                self._communicating.add(i.name)
        for op in async_operations(module):
            halves = (op.start, *op.updates, *(window.done for window in op.windows))
            self._halves.update(i.name for i in halves)
            if op.communicates or op.spelling == "fusion":  # which XLA makes of collectives alone
                self._communicating.update(i.name for i in halves)

    def communicates(self, event: Event) -> bool:
        return self._name(event) in self._communicating or self._what(event).startswith(
            COMMUNICATION
        )

    def computes(self, event: Event) -> bool:
        """Says whether the device works during the event: it does not where it starts a transfer or
        waits for one. What control flow runs has events of its own.
        """
        what = self._what(event)
        if what.startswith(CONTROL_FLOW) or "Async" in event.line or self.communicates(event):
            return False
        return self._name(event) not in self._halves and not _HALF.search(what)

    def path(self, event: Event) -> str:
        """Returns the names of the functions and scopes that an event comes from."""
        found = self._instructions.get(self._name(event))
        if found is None:
            return event.scope
        return found.op_name or event.scope

    def _name(self, event: Event) -> str:
        if event.op in self._instructions:
            return event.op
        return event.name

    def _what(self, event: Event) -> str:
        """Returns the opcode of an instruction; its name where the opcode is not known, or says
        nothing of its kind.
        """
        found = self._instructions.get(self._name(event))
        if found is None or found.opcode in ("async-start", "async-update", "async-done", "fusion"):
            return event.name
        return found.opcode


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Exposed communication of one instruction or one layer, in one run of the program."""

    name: str  # of the instruction or of the layer
    layer: str  # of an instruction: the scopes of its JAX operation
    count: float  # how often it ran
    # its share of the exposed time; a moment that several share belongs to the one that began first
    seconds: float
    busy: float  # its own time, exposed or hidden


@dataclasses.dataclass(frozen=True)
class DeviceTimes:
    """Where the time of one device went. All times are seconds of one run: the mean over the
    runs.
    """

    device: str
    program: str
    runs: int  # in the profile
    seconds: float  # from the beginning of a run to its end
    compute: float
    communication: float
    exposed: float  # in which it communicated and did not compute
    # the instructions that communicate, those with the longest exposed time first
    ops: tuple[Exposed, ...]
    layers: tuple[Exposed, ...]  # the same by layer


def measure_exposed(
    devices: Sequence[DeviceProfile], program: str | None = None, module: HloModule | None = None
) -> list[DeviceTimes]:
    """Measures the exposed communication of a program on every device.

    `program` is its name in the profile, or the beginning of its name; by default it is the one
    that took longest. The module, if it is known, says which instructions communicate, and what
    layers they are from. ValueError lists the programs of the profile if it has no run of this one.
    """
    spent = defaultdict[str, float](float)
    for device in devices:
        for event in device.runs or device.events:
            spent[event.program] += event.end - event.start
    longest_first = sorted(spent, key=spent.__getitem__, reverse=True)
    matches = [name for name in longest_first if name.startswith(program or "")]
    if not matches:
        raise ValueError(
            f"the profile has no program {program!r}: it has {', '.join(sorted(spent))}"
        )
    wanted = matches[0]
    if program in matches:
        wanted = program
    known = ProfiledProgram(module)
    return [_times(device, wanted, known) for device in devices]


def _times(device: DeviceProfile, program: str, known: ProfiledProgram) -> DeviceTimes:
    if device.runs:
        runs = [run.interval for run in device.runs if run.program == program]
        events = [e for e in device.events if _within(e, runs)]
    else:
        events = [e for e in device.events if e.program == program]
        runs = _runs(events)
    count = max(len(runs), 1)
    communicating = [event for event in events if known.communicates(event)]
    compute = union(event.interval for event in events if known.computes(event))
    ops = _shares(communicating, compute, count, known)
    by_layer: dict[str, list[Exposed]] = {}
    for op in ops:
        by_layer.setdefault(op.layer, []).append(op)
    layers = [_together(name, of_layer) for name, of_layer in by_layer.items()]
    communication = seconds(event.interval for event in communicating)
    return DeviceTimes(
        device=device.name,
        program=program,
        runs=len(runs),
        seconds=seconds(runs) / count,
        compute=seconds(compute) / count,
        communication=communication / count,
        exposed=sum(op.seconds for op in ops),
        ops=_longest_first(ops),
        layers=_longest_first(layers),
    )


def _together(layer: str, ops: Sequence[Exposed]) -> Exposed:
    """Returns the exposed communication of a layer that has these instructions."""
    return Exposed(
        name=layer,
        layer=layer,
        count=sum(op.count for op in ops),
        seconds=sum(op.seconds for op in ops),
        busy=sum(op.busy for op in ops),
    )


def _longest_first(rows: Sequence[Exposed]) -> tuple[Exposed, ...]:
    return tuple(sorted(rows, key=operator.attrgetter("seconds"), reverse=True))


def _within(event: Event, runs: Sequence[Interval]) -> bool:
    return any(start <= event.start < end for start, end in runs)


def _whole(events: Sequence[Event]) -> Interval:
    """Returns the time from the first to the last of some events."""
    return min(e.start for e in events), max(e.end for e in events)


def _runs(events: Sequence[Event]) -> list[Interval]:
    """Returns the time from the first to the last event of each run, in a profile without events of
    whole runs.
    """
    by_run: dict[str, list[Event]] = {}
    for event in events:
        by_run.setdefault(event.run, []).append(event)
    if list(by_run) == [""]:
        return _runs_without_numbers(events)
    return sorted(map(_whole, by_run.values()))


def _runs_without_numbers(events: Sequence[Event]) -> list[Interval]:
    """Returns the time of each run of one program, where the profile does not number the runs.

    The instructions with the fewest events are taken to run once in each run, and any other event
    to belong to the run whose such instructions are nearest: those of loops are between them, and
    the host is slower than a device.
    """
    by_name: dict[str, list[Event]] = {}
    for event in sorted(events, key=_START):
        by_name.setdefault(event.op or event.name, []).append(event)
    count = min(map(len, by_name.values()))
    once = [found for found in by_name.values() if len(found) == count]
    cores = [_whole(run) for run in zip(*once, strict=True)]
    runs = list(cores)
    for event in events:
        n = _nearest(cores, event)
        runs[n] = (min(runs[n][0], event.start), max(runs[n][1], event.end))
    return runs


def _nearest(cores: Sequence[Interval], event: Event) -> int:
    """Returns the index of the interval that an event is in, or that is nearest to it, of some that
    are in order.
    """
    begun = bisect.bisect_right(cores, event.start, key=operator.itemgetter(0))
    before = max(0, begun - 1)
    after = before + 1
    if after == len(cores):
        return before
    since = event.start - cores[before][1]
    until = cores[after][0] - event.end
    if until < since:
        return after
    return before


def _shares(
    communicating: Sequence[Event], compute: list[Interval], runs: int, known: ProfiledProgram
) -> list[Exposed]:
    """Divides the exposed time among the instructions: what several share belongs to the one that
    began first.
    """
    by_name: dict[str, list[Event]] = {}
    shares = defaultdict[str, float](float)
    taken = -math.inf  # the end of the events so far, to which all exposed time before it belongs
    for event in sorted(communicating, key=_START):
        by_name.setdefault(event.name, []).append(event)
        begin = max(event.start, taken)
        if event.end > begin:
            hidden = seconds(clip(compute, (begin, event.end)))
            shares[event.name] += max(0.0, event.end - begin - hidden)
            taken = event.end
    found = []
    for name, events in by_name.items():
        busy = seconds(e.interval for e in events)
        layer = layer_of(known.path(events[-1]))
        found.append(Exposed(name, layer, len(events) / runs, shares[name] / runs, busy / runs))
    return found


def main(arguments: list[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m flaxasync.check trace", description=description
    )
    parser.add_argument("path", help="an xplane file, or a folder that jax.profiler.trace wrote")
    parser.add_argument(
        "--program", metavar="HLO", help="the program: the text that compiled.as_text() returned"
    )
    parser.add_argument(
        "--module",
        metavar="NAME",
        help="its name in the profile (default: the one that took longest)",
    )
    parser.add_argument(
        "--chip", choices=sorted((*CHIPS, *GPUS)), help="the chip that the program is estimated for"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    try:
        module = None
        estimate = None
        if chosen.program:
            module = read_module(chosen.program)
        times = measure_exposed(read_profile(chosen.path), chosen.module, module)
        if module is not None and chosen.chip:
            estimate = timeline(module, chosen.chip)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps([dataclasses.asdict(device) for device in times], indent=1))
    else:
        print(_tables(times, estimate))
    return 0


def _tables(times: Sequence[DeviceTimes], estimate: Timeline | None) -> str:
    """Makes tables of devices, and of the instructions and layers of the device with the most
    exposed communication.
    """
    worst = max(times, key=operator.attrgetter("exposed"))
    lines = [
        f"{worst.program}, {worst.runs} runs; milliseconds of one run",
        _row("device", "run", "compute", "communication", "exposed"),
    ]
    for d in times:
        row = _row(d.device, _ms(d.seconds), _ms(d.compute), _ms(d.communication), _ms(d.exposed))
        if d.seconds:
            row += f"  {d.exposed / d.seconds:6.1%}"
        lines.append(row)
    causes: Mapping[str, float] = {}
    if estimate is not None:
        e = estimate.slowest
        causes = e.causes
        lines.append(_row("estimated", _ms(e.seconds), _ms(e.compute), "", _ms(e.exposed)))
        lines.append(f"the estimate is based on {estimate.basis}")
    lines += _table(f"instructions that communicate on {worst.device}", worst.ops, causes)
    if any(layer.name for layer in worst.layers):
        lines += _table("layers", worst.layers, {})
    return "\n".join(lines)


def _row(label: str, run: str, compute: str, communication: str, exposed: str) -> str:
    return f"{label:20} {run:>10} {compute:>10} {communication:>14} {exposed:>10}"


def _table(title: str, rows: Sequence[Exposed], estimates: Mapping[str, float]) -> list[str]:
    head = f"{title:50} {'times':>7} {'busy':>10} {'exposed':>10}"
    if estimates:
        head += f" {'estimated':>10}"
    lines = ["", head]
    for row in rows[:SHOWN]:
        name = row.name or "(no layer)"
        line = f"  {name[:48]:48} {row.count:7.0f} {_ms(row.busy)} {_ms(row.seconds)}"
        if row.name in estimates:
            line += f" {_ms(estimates[row.name])}"
        lines.append(line)
    if rest := rows[SHOWN:]:
        more = f"and {len(rest)} more"
        lines.append(f"  {more:48} {'':18} {_ms(sum(row.seconds for row in rest))}")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:10.3f}"
