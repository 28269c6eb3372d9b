"""`compare`: what is different between a baseline and a program, in sentences that name source lines.

A difference for the worse fails the gate, a difference for the better does not. Rows of transfers are compared first.
What is new is paired with what is gone, so that one change of the program makes one sentence: the same array in a wider
type, or a larger array. How often a row runs, and for how long the device waits for it, is compared afterwards for
every row that both have, and named unless it is what the change of the number of transfers says already.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator

from flaxasync.check.auditing.findings import CODES
from flaxasync.check.auditing.report import size_text, time_text
from flaxasync.check.gate.summary import Count, Row, Rows, Summary
from flaxasync.check.hlo.shapes import element_bits

SMALL_MEMORY = 1 << 20  # bytes; a smaller difference of temporary memory is none
LINES = 3  # source lines that a sentence names


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """What may differ from the baseline.

    Attributes:
      exposed: The share of the baseline's time by which the waits for one kind of transfer, and all waits together, may
        grow. 0.02 is two percent of a step.
      bytes: The share by which the size of an array may differ. Compilers pad arrays differently.
      temporaries: The share by which temporary memory may grow. It may always grow by 1 MiB.
    """

    exposed: float = 0.02
    bytes: float = 0.01
    temporaries: float = 0.05

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"the tolerance {name} must be a share that is not negative, such as 0.02: got {value}"
                )


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
      kind: What is different: "extra transfer", "lost overlap", "wider dtype", "copy in a loop", "host callback", ...
      text: A sentence with the figures.
      sources: The source lines, as "file:line".
      worse: Whether it fails the gate.
    """

    kind: str
    text: str
    sources: tuple[str, ...] = ()
    worse: bool = True

    def __str__(self) -> str:
        lines = f", from {', '.join(self.sources[:LINES])}" if self.sources else ""
        more = f" and {len(self.sources) - LINES} more lines" if len(self.sources) > LINES else ""
        return f"{'worse' if self.worse else 'better'}: {self.kind}: {self.text}{lines}{more}"


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
        worse = sum(change.worse for change in self.changes)
        before, after = self.baseline, self.program
        head = f"{after.module} on {after.devices} devices of {after.chip}: "
        head += f"{worse} difference{'s' if worse != 1 else ''} for the worse" if worse else "as in the baseline"
        if not worse and self.changes:
            head = head.replace("as in", "better than")
        lines = [head, *(f"  {change}" for change in self.changes)]
        lines.append(
            f"  exposed {before.exposed:.1%} -> {after.exposed:.1%} of {time_text(before.seconds)} -> "
            f"{time_text(after.seconds)} (estimated); temporary memory {_memory(before)} -> {_memory(after)}"
        )
        return "\n".join(lines)


def compare(baseline: Summary, program: Summary, tolerances: Tolerances | None = None) -> Comparison:
    """Compares a program with a baseline.

    Raises:
      ValueError: They are different programs: another name, chip, number of devices or mesh.
    """
    for name, mine, theirs in (
        ("module", baseline.module, program.module),
        ("chip", baseline.chip, program.chip),
        ("number of devices", baseline.devices, program.devices),
        ("mesh", _mesh(baseline), _mesh(program)),
    ):
        if mine != theirs:
            raise ValueError(
                f"the baseline is of another program: its {name} is {mine}, and that of this program is {theirs}; "
                "name the baseline of this program, or replace it with --update"
            )
    allowed = tolerances or Tolerances()
    changes = [*_transfers(baseline, program, allowed)]
    changes += _counted("copy in a loop", baseline.copies, program.copies, _copies_text)
    changes += _counted("host callback", baseline.callbacks, program.callbacks, _callbacks_text)
    changes += _counted("hazard", baseline.hazards, program.hazards, _hazards_text)
    before, after = (summary.exposed * summary.seconds for summary in (baseline, program))
    named_already = any(change.kind == "lost overlap" for change in changes)
    if not named_already and after - before > allowed.exposed * baseline.seconds:
        text = f"the device waits {time_text(after)} of a step for all transfers, {time_text(before)} in the baseline"
        changes.append(Change("exposed time", text))
    if baseline.temporaries is not None and program.temporaries is not None:
        had, needs = baseline.temporaries, program.temporaries
        if abs(needs - had) > max(allowed.temporaries * had, SMALL_MEMORY):
            text = f"{size_text(needs)} of temporary memory, {size_text(had)} in the baseline"
            changes.append(Change("temporary memory", text, worse=needs > had))
    return Comparison(baseline, program, tuple(sorted(changes, key=lambda change: not change.worse)))


def _transfers(baseline: Summary, program: Summary, allowed: Tolerances) -> Iterator[Change]:
    new, gone, common = _differences(baseline.transfers, program.transfers)
    for row, other in _pairs(gone, new):
        number = min(gone[row], new[other])
        lines = _lines(baseline.transfers.get(other, Count()), program.transfers[other])
        worse = other.bytes > row.bytes
        if row.dtype == other.dtype and abs(other.bytes - row.bytes) <= allowed.bytes * row.bytes:
            common.append((row, other))
        elif _elements(row) == _elements(other) and row.dtype != other.dtype:
            verb = "is" if number == 1 else "are"
            text = f"{named(number, other)} {verb} {other.dtype} on the wire, {row.dtype} in the baseline"
            yield Change("wider dtype" if worse else "narrower dtype", text, lines, worse)
        else:
            text = f"{named(number, other)}, {size_text(row.bytes)} in the baseline"
            yield Change("larger transfer" if worse else "smaller transfer", text, lines, worse)
        gone[row] -= number
        new[other] -= number
    for row, number in sorted((+new).items()):
        before, after = baseline.transfers.get(row, Count()), program.transfers[row]
        yield Change("extra transfer", f"{named(number, row, more=True)}", _lines(before, after))
    for row, number in sorted((+gone).items()):
        lines = tuple(baseline.transfers[row].sources)
        yield Change("fewer transfers", f"{named(number, row, fewer=True)}", lines, worse=False)
    for row, other in common:
        before, after = baseline.transfers[row], program.transfers[other]
        said = {_sign(after.count - before.count)}  # a longer wait is no news if there are more transfers
        runs = _sign(after.runs - before.runs)
        if runs and runs not in said:
            said.add(runs)
            yield Change("runs", _runs_text(named(after.count, other), before, after), tuple(after.sources), runs > 0)
        longer = after.exposed - before.exposed
        if abs(longer) > allowed.exposed * baseline.seconds and _sign(longer) not in said:
            text = f"the device waits {time_text(after.exposed)} of a step for {named(after.count, other)}, "
            text += f"{time_text(before.exposed)} in the baseline"
            worse = longer > 0
            yield Change("lost overlap" if worse else "better overlap", text, tuple(after.sources), worse)


def _differences(before: Rows, after: Rows) -> tuple[collections.Counter, collections.Counter, list[tuple[Row, Row]]]:
    """Returns how many of each row are new, how many are gone, and the rows that both have."""
    counts = [collections.Counter({row: count.count for row, count in rows.items()}) for rows in (before, after)]
    return counts[1] - counts[0], counts[0] - counts[1], [(row, row) for row in sorted(before) if row in after]


def _pairs(gone: collections.Counter, new: collections.Counter) -> Iterator[tuple[Row, Row]]:
    """Yields rows that are gone with rows that are new in their stead: of as many elements, or else of one dtype."""
    for fits in (lambda a, b: _elements(a) == _elements(b), lambda a, b: a.dtype == b.dtype):
        for row in sorted(gone):
            for other in sorted(new):
                alike = (row.what, row.place, row.axes) == (other.what, other.place, other.axes)
                if alike and gone[row] > 0 and new[other] > 0 and fits(row, other):
                    yield row, other


def _counted(kind: str, before: Rows, after: Rows, text: Callable[[int, Row, str], str]) -> Iterator[Change]:
    """Yields the changes of rows for which no device waits."""
    new, gone, common = _differences(before, after)
    for row, number in sorted(new.items()):
        yield Change(kind, text(number, row, " more"), _lines(before.get(row, Count()), after[row]))
    for row, number in sorted(gone.items()):
        yield Change(f"no {kind}" if row not in after else kind, text(number, row, " fewer"),
                     tuple(before[row].sources), worse=False)  # fmt: skip
    for row, _ in common:
        runs = _sign(after[row].runs - before[row].runs)
        if runs and runs != _sign(after[row].count - before[row].count):
            words = _runs_text(text(after[row].count, row, ""), before[row], after[row])
            yield Change(kind, words, tuple(after[row].sources), runs > 0)


def _runs_text(row: str, before: Count, after: Count) -> str:
    return f"{row}: {after.runs} runs in a step, {before.runs} in the baseline"


def _copies_text(number: int, row: Row, word: str) -> str:
    return f"{number}{word} of {size_text(row.bytes)} of {row.dtype}{_in(row)}"


def _callbacks_text(number: int, row: Row, word: str) -> str:
    return f"{number}{word} {row.what}{_in(row)}"


def _hazards_text(number: int, row: Row, word: str) -> str:
    meaning = CODES[row.what].meaning if row.what in CODES else ""
    return f"{number}{word} {row.what}: {meaning}"


def named(number: int, row: Row, *, more: bool = False, fewer: bool = False) -> str:
    """Returns "2 more all-gathers of 64 MiB over 'model' in the backward loop"."""
    word = " more" if more else " fewer" if fewer else ""
    over = f" over {row.axes}" if row.axes else ""
    return f"{number}{word} {row.what}{'s' if number != 1 else ''} of {size_text(row.bytes)}{over}{_in(row)}"


def _in(row: Row) -> str:
    if not row.place:
        return ""
    return f" in the {row.place}" if row.place not in ("forward", "backward") else f" in the {row.place} pass"


def _elements(row: Row) -> int:
    return row.bytes * 8 // max(element_bits(row.dtype), 1)


def _lines(before: Count, after: Count) -> tuple[str, ...]:
    """Returns the lines that have more instructions than before; all lines if none has.

    An edit moves the lines below it, each by as much. In each file, the offset that explains the most lines is
    therefore taken first, the smallest of those that explain equally many, and then the next one for the lines that
    remain.
    """
    new = collections.Counter(after.sources)
    old = collections.Counter(before.sources)
    while moves := _offsets(old, new):
        file, offset = max(moves, key=lambda move: (moves[move], -abs(move[1]), move))
        for source in list(old):
            moved = _moved(source, offset)
            if _file(source) == file and (number := min(old[source], new[moved])):
                old[source] -= number
                new[moved] -= number
        old, new = +old, +new
    return tuple(source for source in after.sources if source in new) or tuple(after.sources)


def _offsets(old: collections.Counter[str], new: collections.Counter[str]) -> collections.Counter[tuple[str, int]]:
    """Returns for how many instructions each offset of lines leads from an old line to a new one, by file."""
    offsets: collections.Counter[tuple[str, int]] = collections.Counter()
    for (a, before), (b, after) in itertools.product(old.items(), new.items()):
        offset = _line(b) - _line(a)
        if _moved(a, offset) == b:
            offsets[_file(a), offset] += min(before, after)
    return offsets


def _file(source: str) -> str:
    return source.rpartition(":")[0]


def _line(source: str) -> int:
    number = source.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _moved(source: str, offset: int) -> str:
    return f"{_file(source)}:{_line(source) + offset}" if offset else source


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def _mesh(summary: Summary) -> str:
    return ", ".join(f"{name}={size}" for name, size in summary.axes.items()) or "not named"


def _memory(summary: Summary) -> str:
    return "unknown" if summary.temporaries is None else size_text(summary.temporaries)
