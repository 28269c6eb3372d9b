"""What runs while a transfer is under way, and what makes the chip wait, in the estimate of a
scheduled program.

A large program has thousands of transfers, whose windows may all be open at once. What a whole
computation or program has in common is therefore found once, in `Windows` and in `IndependentWork`.
"""

import bisect
import collections
import itertools
from collections.abc import Iterable, Set

from flaxasync.check.auditing import mesh_product
from flaxasync.check.auditing.advice import advise
from flaxasync.check.auditing.findings import (
    Finding,
    Pair,
    Severity,
    Work,
    finding,
    size_text,
    time_text,
)
from flaxasync.check.auditing.independent_work import IndependentWork
from flaxasync.check.auditing.rings import function_of
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.async_operations import COLLECTIVES, AsyncOperation, synchronous_collective
from flaxasync.check.hlo.module import Computation, Instruction
from flaxasync.check.hlo.participants import AxisNames
from flaxasync.check.hlo.value_flow import Span

# bytes; a smaller collective is limited by its latency, so it is reported as information only
LARGE = 1 << 20
COPIED = 1 << 16  # bytes; a smaller copy in a loop is not reported
WORK = 1e-7  # seconds; a shorter instruction does not count as work


class _Schedule:
    """The work of one computation, in order."""

    def __init__(self, computation: Computation, costs: Costs):
        timed = [(i, costs.seconds(i)) for i in computation.instructions]
        kept = [
            (i, seconds)
            for i, seconds in timed
            if seconds >= WORK and i.opcode not in COLLECTIVES and not _changes_nothing(i)
        ]
        self.work = [Work(computation.name, i.name, seconds) for i, seconds in kept]
        self.positions = [i.position for i, _ in kept]
        # the seconds of the work before each one, and last of all
        self.sums = [0.0, *itertools.accumulate(w.seconds for w in self.work)]
        # how many more windows hide each work than that before
        self.hiding = collections.Counter[int]()


class Windows:
    """The work within any span of the schedule of one program."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self._schedules: dict[str, _Schedule] = {}

    def work_in(self, spans: Iterable[Span], *, hides: bool) -> tuple[tuple[Work, ...], float]:
        """Returns the work within spans, and its seconds. Notes that it hides a transfer, if it
        does.
        """
        work: list[Work] = []
        seconds = 0.0
        for span in spans:
            name = span.computation
            if name not in self._schedules:
                self._schedules[name] = _Schedule(self.costs.module.computations[name], self.costs)
            schedule = self._schedules[name]
            first = bisect.bisect_left(schedule.positions, span.first)
            stop = bisect.bisect_left(schedule.positions, span.stop)
            work += schedule.work[first:stop]
            seconds += schedule.sums[stop] - schedule.sums[first]
            if hides:
                schedule.hiding[first] += 1
                schedule.hiding[stop] -= 1
        return tuple(work), seconds if work else 0.0

    def hiding(self) -> set[tuple[str, str]]:
        """Returns all work that was noted to hide a transfer, each as (computation, instruction)."""
        found: set[tuple[str, str]] = set()
        for name, schedule in self._schedules.items():
            count = 0
            for n, work in enumerate(schedule.work):
                count += schedule.hiding[n]
                if count:
                    found.add((name, work.instruction))
        return found


def pair_of(windows: Windows, op: AsyncOperation) -> Pair:
    """Returns an asynchronous operation as it was scheduled."""
    # The window of most iterations of a loop, and not the one through which the future leaves the
    # loop.
    staying = [w for w in op.windows if not any(c.startswith("leaves") for c in w.crosses)]
    window = next(iter(staying or op.windows), None)
    if window and windows.costs.module.is_scheduled:
        spans = window.spans
    else:
        spans = ()
    work, inside = windows.work_in(spans, hides=op.communicates)
    return Pair(
        name=op.name,
        kind=op.kind,
        spelling=op.spelling,
        computation=op.computation,
        dones=tuple(w.done.name for w in op.windows),
        bytes=op.bytes,
        runs=windows.costs.runs[op.computation],
        communicates=op.communicates,
        work=work,
        inside=inside,
        transfer=windows.costs.transfer_seconds(op),
        crosses=", ".join(window.crosses) if window else "",
        source=op.start.source,
        ring=function_of(op.start),
    )


def overlap_findings(
    independent: IndependentWork,
    op: AsyncOperation,
    pair: Pair,
    hiding: Set[tuple[str, str]],
    names: AxisNames,
) -> list[Finding]:
    """Returns what keeps a transfer from being hidden. `hiding` is the work that hides any transfer
    of the program.
    """
    offloaded = op.thread != "main"
    if not op.windows or not (op.communicates or offloaded):
        return []
    code = "exposed"
    gain = pair.exposed
    advice = ""
    what = f"{pair.kind}{_over(names, op.start)}, {size_text(pair.bytes)}"
    message = f"{pair.name} ({what}) takes {time_text(pair.transfer)}"
    if not pair.overlapped:
        code = "serialised"
        gain = 0.0
        message += " and nothing runs meanwhile"
        computation = op.start.computation
        ends = [w.done for w in op.windows if w.done.computation is computation and not w.crosses]
        free = []
        if ends:
            free = independent.beside(op.start, ends, pair.transfer)
        if free:
            seconds, work = free[0]
            code = "empty-window"
            gain = min(pair.transfer, sum(s for s, _ in free))
            where = ""
            if work.source:
                where = f", {work.source}"
            message += f": {work.name} ({time_text(seconds)}{where}) could run inside"
            advice = _barrier_to_remove(op, work, hiding)
        elif product := mesh_product.find(op.start):
            advice = mesh_product.advice(product)
            gain = mesh_product.gain(independent.costs, product, pair.transfer)
    elif pair.exposed > max(0.05 * pair.transfer, 1e-6):
        message += f", the work inside {time_text(pair.inside)}"
    else:
        return []
    if pair.bytes >= LARGE:
        severity = None
    else:
        severity = Severity.INFO
    return [finding(code, message, op.start, severity=severity, gain=gain, advice=advice)]


def collectives_that_hold_the_chip(costs: Costs) -> list[tuple[Instruction, Instruction]]:
    """Returns each collective that runs and has no start and no done, as (instruction, collective).

    The instruction is the collective itself, or the fusion that contains it.
    """
    return [(i, found) for i in costs.executed if (found := synchronous_collective(i))]


def synchronous_collectives(
    independent: IndependentWork,
    holding: Iterable[tuple[Instruction, Instruction]],
    names: AxisNames,
) -> list[Finding]:
    """Returns a finding for each collective that holds the chip, with what to do about it."""
    costs = independent.costs
    found = []
    for i, collective in holding:
        seconds = costs.seconds(i)
        moved = max(one.shape.bytes for one in (i, *i.inputs))
        what = f"{collective.opcode}{_over(names, collective)}, {size_text(moved)}"
        message = f"{i.name} ({what}) holds the chip for {time_text(seconds)}"
        if moved >= LARGE:
            severity = None
        else:
            severity = Severity.INFO
        advice = advise(independent, i, collective)
        found.append(
            finding(
                "synchronous-collective",
                message,
                i,
                severity=severity,
                advice=advice.text,
                gain=advice.gain,
            )
        )
    return found


def _over(names: AxisNames, collective: Instruction) -> str:
    """Returns " over data" for a collective between devices along this axis of the mesh, if axes
    have names.
    """
    if not names.axes:
        return ""
    found = names.of(collective)
    if found:
        return f" over {found}"
    return ""


def loop_copies(costs: Costs, *, known: Set[tuple[str, str]]) -> list[Finding]:
    """Returns a finding for each large copy of a buffer that a loop carries, but for those that
    `known` has already.
    """
    found = []
    bodies = {i.loop_body for i in costs.executed}
    for name in (n for n in costs.runs if n in bodies):
        computation = costs.module.computations[name]
        carried = _carried(computation)
        for i in computation.instructions:
            if i.shape.bytes < COPIED or (name, i.name) in known or not _changes_nothing(i):
                continue
            if i.name in carried or i.operands[0] in carried:
                message = (
                    f"{i.name} copies {size_text(i.shape.bytes)} of what the loop carries, "
                    f"{costs.runs[name]} times"
                )
                found.append(finding("loop-copies", message, i))
    return found


def _changes_nothing(i: Instruction) -> bool:
    """Says whether an instruction is a copy that changes nothing, not even the layout. It does not
    count as work.
    """
    return i.opcode == "copy" and [made.shape for made in i.inputs] == [i.shape]


def _barrier_to_remove(op: AsyncOperation, work: Instruction, hiding: Set[tuple[str, str]]) -> str:
    """Returns the advice on a transfer of XLA's own that a barrier made wait for independent work;
    "" on any other.

    A compiled program has no barriers left: XLA drops them once they have ordered the schedule.
    What remains is the order, which XLA does not choose by itself: the work ends before the
    transfer begins, and hides no other transfer.
    """
    before = work.position < op.start.position
    if op.spelling == "kernel" or not before or (op.computation, work.name) in hiding:
        return ""
    return (
        f"remove the jax.lax.optimization_barrier that makes what is sent wait for {work.name}: "
        "neither needs the other, and XLA runs such work inside its own transfers unless a barrier "
        "forbids it"
    )


def _carried(body: Computation) -> set[str]:
    """Returns the names of the values that enter a loop body through its parameter or leave it
    through its root.
    """
    names = {i.name for i in body.parameters.values()}
    for i in body.instructions:
        if i.opcode in ("get-tuple-element", "bitcast") and i.operands and i.operands[0] in names:
            names.add(i.name)
    return names | set(body.root.operands)
