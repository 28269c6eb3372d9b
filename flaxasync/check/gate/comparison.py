"""`compare`: what is different between a baseline and a program, in sentences that name source
lines.

A difference for the worse fails the gate, a difference for the better does not. Where the whole
step is estimated faster than the baseline, more transfers and copies and longer waits are none for
the worse, because they are counted in its time; hazards, host callbacks and memory are not, and
remain.
"""

import collections
import dataclasses

from flaxasync.check.gate.snapshot import COPIES, MEMORY, TRANSFERS, WAITS, Summary, Total
from flaxasync.check.units import size_text, time_text

SMALL_MEMORY = 1 << 20  # bytes; a smaller difference of temporary memory is none
IN_TIME = (TRANSFERS, COPIES, WAITS)  # what is counted in the time of a step
LINES = 3  # source lines that a sentence names


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference."""

    kind: str  # "more transfers", "more seconds of waiting", "fewer host callbacks", ...
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
        lines = [
            f"{program.module} on {program.devices} devices of {program.chip}: "
            f"{len(self.changes)} differences, {verdict}",
            *map(str, self.changes),
            f"estimated {time_text(program.seconds)}, {time_text(self.baseline.seconds)} in the "
            "baseline",
        ]
        return "\n  ".join(lines)


def compare(
    baseline: Summary,
    program: Summary,
    *,
    exposed: float = 0.02,
    bytes: float = 0.01,
    temporaries: float = 0.05,
) -> Comparison:
    """Compares a program with a baseline. Tolerances are shares: 0.02 is two percent.

    Args:
      baseline: What the program was before.
      program: What it is now.
      exposed: How much longer one row, or all of them, may wait, as a share of the baseline's time.
      bytes: By how much an amount may grow, because compilers pad arrays differently.
      temporaries: By how much temporary memory may grow, which may always grow by 1 MiB.

    Raises:
      ValueError: They are different programs: another name, chip, number of devices or mesh. Or a
        tolerance is negative.
    """
    if not min(exposed, bytes, temporaries) >= 0:
        raise ValueError(
            "a tolerance must be a share that is not negative, such as 0.02: got "
            f"exposed={exposed}, bytes={bytes}, temporaries={temporaries}"
        )
    for name in ("module", "chip", "devices", "axes"):
        mine = getattr(baseline, name)
        theirs = getattr(program, name)
        if mine != theirs:
            raise ValueError(
                f"the baseline is of another program: its {name} is {mine}, and that of this "
                f"program is {theirs}; name the baseline of this program, or replace it with "
                "--update"
            )
    changes = []
    for row in sorted(baseline.rows.keys() | program.rows.keys()):
        kind, _, name = row.partition(": ")
        if kind == MEMORY and not (row in baseline.rows and row in program.rows):
            continue  # a text does not say it
        had = baseline.rows.get(row, Total())
        has = program.rows.get(row, Total())
        limit = bytes * had.amount
        if kind == WAITS:  # what a row may wait longer is a share of the time of the whole step
            limit = exposed * baseline.seconds
        elif kind == MEMORY:
            limit = max(temporaries * had.amount, SMALL_MEMORY)
        if abs(has.amount - had.amount) <= limit:
            continue
        direction = "more"
        effect = "worse"
        if has.amount < had.amount:
            direction = "fewer"
            effect = "better"
        elif program.seconds < baseline.seconds and kind in IN_TIME:
            effect = "changed"
        text = f"{name}: {_text(kind, has)} in a step, {_text(kind, had)} in the baseline"
        # the lines that have more instructions than before; all lines if none has
        new = collections.Counter(has.sources) - collections.Counter(had.sources)
        lines = tuple(new or has.sources or had.sources)
        changes.append(Change(f"{direction} {kind}", text, effect, lines))
    return Comparison(baseline, program, tuple(sorted(changes, key=lambda c: not c.worse)))


def _text(kind: str, total: Total) -> str:
    """Returns an amount in its unit: "64 MiB of bf16", "3 ms", "4 runs"."""
    if kind == WAITS:
        return time_text(total.amount)
    if kind not in (TRANSFERS, MEMORY):
        return f"{total.amount} runs"
    size = size_text(total.amount)
    if not total.dtypes:
        return size
    return f"{size} of {' and '.join(total.dtypes)}"
