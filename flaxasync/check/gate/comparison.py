"""`compare`: what is different between a baseline and a program, in sentences that name source
lines.

A difference for the worse fails the gate, a difference for the better does not. Where the whole
step is estimated faster than the baseline, more transfers and copies and longer waits are none for
the worse, because they are counted in its time; hazards, host callbacks and memory are not, and
remain.
"""

import dataclasses
from collections.abc import Iterator

from flaxasync.check.auditing.findings import size_text, time_text
from flaxasync.check.gate.snapshot import MOVED, Summary, Total

SMALL_MEMORY = 1 << 20  # bytes; a smaller difference of temporary memory is none
LINES = 3  # source lines that a sentence names


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """What may differ from the baseline, as shares: 0.02 is two percent."""

    # how much longer one row, or all of them, may wait, as a share of the baseline's time
    exposed: float = 0.02
    bytes: float = 0.01  # of the bytes of a row, because compilers pad arrays differently
    temporaries: float = 0.05  # of temporary memory, which may always grow by 1 MiB

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"the tolerance {name} must be a share that is not negative, such as 0.02: got "
                    f"{value}"
                )


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference."""

    kind: str  # "more transfers", "longer wait", "more host callbacks", "temporary memory", ...
    text: str  # a sentence with the figures
    effect: str  # "worse", "better", or "changed" in a step that became faster
    sources: tuple[str, ...] = ()  # the source lines, as "file:line"

    @property
    def worse(self) -> bool:
        """Whether it fails the gate."""
        return self.effect == "worse"

    def __str__(self) -> str:
        sentence = f"{self.effect}: {self.kind}: {self.text}"
        if not self.sources:
            return sentence
        return f"{sentence}, from {', '.join(self.sources[:LINES])}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All differences. `print` shows them; `.ok` is true if none is for the worse."""

    baseline: Summary
    program: Summary
    changes: tuple[Change, ...]  # those for the worse first

    @property
    def ok(self) -> bool:
        return not any(change.worse for change in self.changes)

    def __str__(self) -> str:
        program = self.program
        worse = sum(change.worse for change in self.changes)
        verdict = "nothing is worse"
        if worse:
            verdict = f"{worse} for the worse"
        return "\n".join(
            [
                f"{program.module} on {program.devices} devices of {program.chip}: "
                f"{len(self.changes)} differences, {verdict}",
                *(f"  {change}" for change in self.changes),
                f"  estimated {_time(program)}, {_time(self.baseline)} in the baseline",
            ]
        )


def compare(
    baseline: Summary, program: Summary, tolerances: Tolerances | None = None
) -> Comparison:
    """Compares a program with a baseline.

    Raises:
      ValueError: They are different programs: another name, chip, number of devices or mesh.
    """
    for name in ("module", "chip", "devices", "axes"):
        mine = getattr(baseline, name)
        theirs = getattr(program, name)
        if mine != theirs:
            raise ValueError(
                f"the baseline is of another program: its {name} is {mine}, and that of this "
                f"program is {theirs}; name the baseline of this program, or replace it with "
                "--update"
            )
    changes = list(_changes(baseline, program, tolerances or Tolerances()))
    return Comparison(baseline, program, tuple(sorted(changes, key=lambda c: not c.worse)))


def _changes(before: Summary, after: Summary, allowed: Tolerances) -> Iterator[Change]:
    faster = after.seconds < before.seconds
    waits = allowed.exposed * before.seconds  # seconds by which one row, and all, may wait longer
    for row in sorted({*before.rows, *after.rows}):
        kind = (after.rows.get(row) or before.rows[row]).kind
        had = before.rows.get(row, Total(kind))
        has = after.rows.get(row, Total(kind))
        excused = faster and kind in MOVED
        more = has.amount - had.amount
        if abs(more) > allowed.bytes * had.amount:
            text = f"{row}: {has} in a step, {had} in the baseline"
            if more > 0:
                what = "more"
            else:
                what = "fewer"
            yield Change(f"{what} {kind}", text, _effect(more, excused), _new_lines(had, has))
        longer = has.exposed - had.exposed
        # that more of it takes longer is no change of its own
        if abs(longer) > waits and longer * more <= 0:
            text = f"{row}: {_waits(has.exposed, had.exposed)}"
            yield Change("wait", text, _effect(longer, excused), tuple(has.sources))
    longer = after.exposed - before.exposed
    if longer > waits:
        text = f"all transfers: {_waits(after.exposed, before.exposed)}"
        yield Change("wait", text, _effect(longer, faster))
    if before.temporaries is not None and after.temporaries is not None:
        more = after.temporaries - before.temporaries
        if abs(more) > max(allowed.temporaries * before.temporaries, SMALL_MEMORY):
            text = (
                f"{size_text(after.temporaries)}, {size_text(before.temporaries)} in the baseline"
            )
            yield Change("temporary memory", text, _effect(more, excused=False))


def _effect(difference: float, excused: bool) -> str:
    if difference < 0:
        return "better"
    if excused:
        return "changed"
    return "worse"


def _waits(now: float, before: float) -> str:
    return (
        f"the device waits {time_text(now)} of a step for it, {time_text(before)} in the baseline"
    )


def _new_lines(before: Total, after: Total) -> tuple[str, ...]:
    """Returns the source lines that have more instructions than before; all lines if none has."""
    new = [line for line, count in after.sources.items() if count > before.sources.get(line, 0)]
    return tuple(new or after.sources or before.sources)


def _time(summary: Summary) -> str:
    return f"{time_text(summary.seconds)} with {time_text(summary.exposed)} exposed"
