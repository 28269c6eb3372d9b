"""`compare`: what is different between a baseline and a program, in sentences that name source
lines.

A difference for the worse fails the gate, a difference for the better does not. Where the whole
step is estimated faster than the baseline, differences of transfers and of copies are none for the
worse, because they are counted in its time; those of hazards, host callbacks and memory are not,
and remain. A transfer that is new and one that is gone are paired if they differ in their type or
their size alone, so that one change of the program makes one sentence. For a row that both programs
have, its runs and the time for which the device waits for it are compared.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from flaxasync.check.auditing.findings import size_text, time_text
from flaxasync.check.gate.summary import Count, Row, Rows, Summary
from flaxasync.check.hlo.shapes import element_bits

SMALL_MEMORY = 1 << 20  # bytes; a smaller difference of temporary memory is none
LINES = 3  # source lines that a sentence names


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """What may differ from the baseline, as shares: 0.02 is two percent."""

    # how much longer one row, or all of them, may wait, as a share of the baseline's time
    exposed: float = 0.02
    bytes: float = 0.01  # of the size of an array, because compilers pad arrays differently
    temporaries: float = 0.05  # of temporary memory, which may always grow by 1 MiB

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"the tolerance {name} must be a share that is not negative, such as 0.02: got "
                    f"{value}"
                )


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference."""

    kind: str  # "extra transfer", "lost overlap", "wider dtype", "extra host callback", ...
    text: str  # a sentence with the figures
    sources: tuple[str, ...] = ()  # the source lines, as "file:line"
    worse: bool = True  # whether it fails the gate
    in_faster_step: bool = False  # whether it would fail the gate if the step had not become faster

    def in_a_faster_step(self) -> "Change":
        """Returns the same difference in a step that became faster, which it did not make worse."""
        return dataclasses.replace(
            self, worse=False, in_faster_step=self.worse or self.in_faster_step
        )

    def _effect(self) -> str:
        if self.in_faster_step:
            return "changed"
        return "worse" if self.worse else "better"

    def __str__(self) -> str:
        lines = f", from {', '.join(self.sources[:LINES])}" if self.sources else ""
        more = f" and {len(self.sources) - LINES} more lines" if len(self.sources) > LINES else ""
        return f"{self._effect()}: {self.kind}: {self.text}{lines}{more}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All differences. `print` shows them; `.ok` is true if none is for the worse."""

    baseline: Summary
    program: Summary
    changes: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        return not any(change.worse for change in self.changes)

    def __str__(self) -> str:
        before = self.baseline
        after = self.program
        worse = sum(change.worse for change in self.changes)
        if worse:
            verdict = f"{worse} difference{'s' * (worse > 1)} for the worse"
        else:
            verdict = f"{'better than' if self.changes else 'as'} in the baseline"
        memory = [
            "unknown" if s.temporaries is None else size_text(s.temporaries)
            for s in (before, after)
        ]
        return "\n".join(
            [
                f"{after.module} on {after.devices} devices of {after.chip}: {verdict}",
                *(f"  {change}" for change in self.changes),
                f"  exposed {before.exposed:.1%} -> {after.exposed:.1%} of "
                f"{time_text(before.seconds)} -> "
                f"{time_text(after.seconds)} (estimated); temporary memory {memory[0]} -> "
                f"{memory[1]}",
            ]
        )


def compare(
    baseline: Summary, program: Summary, tolerances: Tolerances | None = None
) -> Comparison:
    """Compares a program with a baseline.

    Raises:
      ValueError: They are different programs: another name, chip, number of devices or mesh.
    """
    allowed = tolerances or Tolerances()
    for name, field in (
        ("module", "module"),
        ("chip", "chip"),
        ("number of devices", "devices"),
        ("mesh", "axes"),
    ):
        mine = getattr(baseline, field)
        theirs = getattr(program, field)
        if mine != theirs:
            raise ValueError(
                f"the baseline is of another program: its {name} is {mine}, and that of this "
                f"program is {theirs}; "
                "name the baseline of this program, or replace it with --update"
            )
    waits = allowed.exposed * baseline.seconds
    timed = [
        *_differences("transfer", baseline.transfers, program.transfers, waits, allowed.bytes),
        *_differences("copy in a loop", baseline.copies, program.copies, waits, allowed.bytes),
    ]
    had, waited = (summary.exposed * summary.seconds for summary in (baseline, program))
    if waited - had > waits and not any(change.kind == "lost overlap" for change in timed):
        text = (
            f"the device waits {time_text(waited)} of a step for all transfers, "
            f"{time_text(had)} in the baseline"
        )
        timed.append(Change("exposed time", text))
    if program.seconds < baseline.seconds:
        timed = [change.in_a_faster_step() for change in timed]
    changes = [
        *timed,
        *_differences("host callback", baseline.callbacks, program.callbacks, waits, allowed.bytes),
        *_differences("hazard", baseline.hazards, program.hazards, waits, allowed.bytes),
    ]
    if baseline.temporaries is not None and program.temporaries is not None:
        needed = baseline.temporaries
        needs = program.temporaries
        if abs(needs - needed) > max(allowed.temporaries * needed, SMALL_MEMORY):
            text = f"{size_text(needs)} of temporary memory, {size_text(needed)} in the baseline"
            changes.append(Change("temporary memory", text, worse=needs > needed))
    return Comparison(
        baseline, program, tuple(sorted(changes, key=lambda change: not change.worse))
    )


def _differences(
    noun: str, before: Rows, after: Rows, waits: float, same: float
) -> Iterator[Change]:
    """Yields the changes of rows: of their types and sizes, their number, their runs, and the waits
    for them.

    The waits for one row may grow by the seconds `waits`. Rows whose sizes differ by the share
    `same` are one row.
    """
    gone = _more(before, after)
    new = _more(after, before)
    both = [(row, row) for row in sorted(before) if row in after]
    for old, row in _alike(gone, new):
        number = min(gone[old], new[row])
        worse = row.bytes > old.bytes
        gone[old] -= number
        new[row] -= number
        lines = _new_lines(before.get(row), after[row])
        text = row.text(number)
        if number and old.dtype == row.dtype and abs(row.bytes - old.bytes) <= same * old.bytes:
            both.append((old, row))
        elif number and _elements(old) == _elements(row):
            text += (
                f" {'is' if number == 1 else 'are'} {row.dtype} on the wire, {old.dtype} in "
                "the baseline"
            )
            yield Change("wider dtype" if worse else "narrower dtype", text, lines, worse)
        elif number:
            text += f", {size_text(old.bytes)} in the baseline"
            yield Change(f"larger {noun}" if worse else f"smaller {noun}", text, lines, worse)
    for row, number in sorted((+new).items()):
        yield Change(
            f"extra {noun}", row.text(number, "more"), _new_lines(before.get(row), after[row])
        )
    for row, number in sorted((+gone).items()):
        yield Change(
            f"removed {noun}", row.text(number, "fewer"), tuple(before[row].sources), worse=False
        )
    for old, row in both:
        had = before[old]
        has = after[row]
        lines = tuple(has.sources)
        what = row.text(has.count)
        more = _sign(has.count - had.count)
        runs = _sign(has.runs - had.runs)
        longer = has.exposed - had.exposed
        if runs not in (0, more):  # more instructions run more often, which is no change of its own
            text = f"{what}: {has.runs} runs in a step, {had.runs} in the baseline"
            yield Change("runs", text, lines, runs > 0)
        # and more runs of them take longer
        if abs(longer) > waits and _sign(longer) not in (more, runs):
            text = f"the device waits {time_text(has.exposed)} of a step for {what}, "
            text += f"{time_text(had.exposed)} in the baseline"
            yield Change(
                "lost overlap" if longer > 0 else "better overlap", text, lines, longer > 0
            )


def _more(rows: Rows, than: Rows) -> collections.Counter[Row]:
    """Returns how many of each row there are beyond those of other rows."""
    counts = [
        collections.Counter({row: count.count for row, count in some.items()})
        for some in (rows, than)
    ]
    return counts[0] - counts[1]


def _alike(gone: Iterable[Row], new: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Returns rows that may replace one another: first those of as many elements, then those of one
    type.
    """
    alike = [
        (old, row)
        for old, row in itertools.product(sorted(gone), sorted(new))
        if (old.what, old.place, old.axes) == (row.what, row.place, row.axes)
    ]
    as_many = [(old, row) for old, row in alike if _elements(old) == _elements(row)]
    return as_many + [(old, row) for old, row in alike if old.dtype == row.dtype]


def _new_lines(before: Count | None, after: Count) -> tuple[str, ...]:
    """Returns the source lines that have more instructions than before; all lines if none has.

    A line that is inserted into a file moves every line below it by the same offset. The old lines
    are therefore matched with the new ones by offsets. The offset that matches the most
    instructions of a file comes first, and of several such offsets the smallest one. Whatever is
    then left of the new lines is new.
    """
    old = collections.Counter(before.sources if before else ())
    new = collections.Counter(after.sources)
    while True:
        offsets: collections.Counter[tuple[str, int]] = collections.Counter()
        for one, other in itertools.product(old, new):
            file, line = _place(one)
            same, moved = _place(other)
            if file == same:
                offsets[file, moved - line] += min(old[one], new[other])
        if not offsets:
            return tuple(new) or tuple(after.sources)
        best, offset = max(offsets, key=lambda move: (offsets[move], -abs(move[1])))
        for one in [one for one in old if _place(one)[0] == best]:
            other = f"{best}:{_place(one)[1] + offset}"
            number = min(old[one], new[other])
            old[one] -= number
            new[other] -= number
        old = +old
        new = +new


def _place(source: str) -> tuple[str, int]:
    file, _, line = source.rpartition(":")
    return file, int(line)


def _elements(row: Row) -> int:
    return row.bytes * 8 // max(element_bits(row.dtype), 1)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
