"""What runs while a transfer is under way, and what makes the chip wait, in the estimate of a
scheduled program.

A large program has thousands of transfers, whose windows may all be open at once. What a whole
computation or program has in common is therefore found once, in `Windows` and in `IndependentWork`.
"""

import bisect
import itertools
from collections.abc import Iterable, Set

from flaxasync.check.auditing import mesh_product
from flaxasync.check.auditing.advice import advise
from flaxasync.check.auditing.findings import Finding, Pair, Work, finding, of_size
from flaxasync.check.auditing.independent_work import IndependentWork
from flaxasync.check.auditing.rings import function_of
from flaxasync.check.estimate.costs import Costs
from flaxasync.check.hlo.async_operations import COLLECTIVES, AsyncOperation, synchronous_collective
from flaxasync.check.hlo.module import Computation, Instruction
from flaxasync.check.hlo.participants import AxisNames
from flaxasync.check.hlo.value_flow import Span
from flaxasync.check.units import size_text, time_text

COPIED = 1 << 16  # bytes; a smaller copy in a loop is not reported
WORK = 1e-7  # seconds; a shorter instruction does not count as work
# What is exposed of a transfer is reported from this share of it on, and from so many seconds on.
EXPOSED_SHARE = 0.05
EXPOSED_SECONDS = 1e-6


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


class Windows:
    """The work within any span of the schedule of one program."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self._schedules: dict[str, _Schedule] = {}

    def work_in(self, spans: Iterable[Span]) -> tuple[tuple[Work, ...], float]:
        """Returns the work within spans, and its seconds."""
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
        return tuple(work), seconds


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
    work, inside = windows.work_in(spans)
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
    """Returns what keeps a transfer from being hidden, if it takes any time. `hiding` is the work
    that hides any transfer of the program.
    """
    is_offloaded = op.thread != "main"
    if not op.windows or not pair.transfer or not (op.communicates or is_offloaded):
        return []

    def found(code: str, what_runs: str, gain: float, advice: str = "") -> list[Finding]:
        what = f"{pair.kind}{_over(names, op.start)}, {size_text(pair.bytes)}"
        message = f"{pair.name} ({what}) takes {time_text(pair.transfer)}{what_runs}"
        severity = of_size(pair.bytes)
        return [finding(code, message, op.start, severity=severity, gain=gain, advice=advice)]

    if pair.overlapped:
        if pair.exposed <= max(EXPOSED_SHARE * pair.transfer, EXPOSED_SECONDS):
            return []
        return found("exposed", f", the work inside {time_text(pair.inside)}", pair.exposed)
    nothing = " and nothing runs meanwhile"
    here = op.start.computation
    ends = [w.done for w in op.windows if w.done.computation is here and not w.crosses]
    free = []
    if ends:
        free = independent.beside(op.start, ends, pair.transfer)
    if not free:
        advice, gain = mesh_product.remedy(independent.costs, op.start, pair.transfer)
        return found("serialised", nothing, gain, advice)
    longest, work = free[0]
    where = ""
    if work.source:
        where = f", {work.source}"
    could = f": {work.name} ({time_text(longest)}{where}) could run inside"
    gain = min(pair.transfer, sum(seconds for seconds, _ in free))
    return found("empty-window", nothing + could, gain, _barrier_to_remove(op, work, hiding))


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
    """Returns a finding for each collective that holds the chip for any time, with what to do about
    it.
    """
    costs = independent.costs
    found = []
    for i, collective in holding:
        seconds = costs.seconds(i)
        if not seconds:  # as between groups of one device
            continue
        moved = max(one.shape.bytes for one in (i, *i.inputs))
        what = f"{collective.opcode}{_over(names, collective)}, {size_text(moved)}"
        message = f"{i.name} ({what}) holds the chip for {time_text(seconds)}"
        advice = advise(independent, i, collective)
        found.append(
            finding(
                "synchronous-collective",
                message,
                i,
                severity=of_size(moved),
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
