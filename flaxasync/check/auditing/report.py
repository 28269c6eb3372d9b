"""`Audit`, the result of an audit: the asynchronous operations as they were scheduled, and the findings."""

import dataclasses
import json
from collections.abc import Sequence

from flaxasync.check.auditing.findings import Finding, Severity

EMPTY = 0.01  # a window with less work than this share of the transfer counts as empty
LISTED = 4  # the most findings of one code that the table shows in full


@dataclasses.dataclass(frozen=True)
class Work:
    """One instruction that runs inside a window, and its time in seconds."""

    computation: str
    instruction: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Pair:
    """One asynchronous operation as it was scheduled."""

    name: str  # of the start
    kind: str  # the opcode of what runs; "custom-call" for a kernel
    spelling: str  # as in `AsyncOperation`
    computation: str  # of the start
    dones: tuple[str, ...]  # the names of the instructions that wait for it
    bytes: int  # that it moves or makes
    runs: int  # how often it starts, over all iterations of the loops around it
    communicates: bool  # whether it moves data between devices
    work: tuple[Work, ...]  # what runs inside the window
    inside: float  # seconds of that work
    transfer: float  # seconds that the transfer takes alone on its link
    crosses: str  # how the future crosses a loop; "" if it crosses none
    source: str  # "file:line" of the Python that made the start; "" if the text does not say

    @property
    def exposed(self) -> float:
        """Seconds of one run of the transfer that no work hides."""
        return max(0.0, self.transfer - self.inside)

    @property
    def overlapped(self) -> bool:
        """Whether work runs while the transfer is under way."""
        return self.inside > EMPTY * self.transfer and bool(self.work)


@dataclasses.dataclass(frozen=True)
class Audit:
    """What `audit` found. `print` shows it as a table."""

    module: str  # the name of the program
    chip: str  # the name of the chip whose times were estimated
    pairs: tuple[Pair, ...]  # the asynchronous operations
    findings: tuple[Finding, ...]  # what is wrong, the most severe first
    notes: tuple[str, ...]  # what a reader should know about the figures, such as a chip that was assumed

    @property
    def ok(self) -> bool:
        """Whether no finding is an error: no buffer in flight is touched, no rule is broken, and nothing is missing."""
        return not any(f.severity == Severity.ERROR for f in self.findings)

    def codes(self) -> set[str]:
        """Returns the codes of the findings."""
        return {f.code for f in self.findings}

    def worst(self) -> Severity | None:
        """Returns the highest severity of the findings; None if there are none."""
        return max((f.severity for f in self.findings), default=None)

    def to_json(self) -> str:
        pairs = [dataclasses.asdict(p) | {"exposed": p.exposed, "overlapped": p.overlapped} for p in self.pairs]
        facts = {"module": self.module, "chip": self.chip, "ok": self.ok, "notes": self.notes}
        return json.dumps(facts | {"pairs": pairs, "findings": [f.to_json() for f in self.findings]}, indent=2)

    def __str__(self) -> str:
        lines = [f"audit of {self.module or 'a fragment'} ({self.chip}): {'ok' if self.ok else 'NOT OK'}", ""]
        lines += _table(self.pairs)
        counts = {s: sum(f.severity == s for f in self.findings) for s in reversed(Severity)}
        lines += ["", ", ".join(f"{n} {s}{'s' if n != 1 and s != Severity.INFO else ''}" for s, n in counts.items())]
        for code in dict.fromkeys(f.code for f in self.findings):
            alike = [f for f in self.findings if f.code == code]
            lines += [str(f) for f in alike[:LISTED]]
            if len(alike) > LISTED:
                lines.append(f"    ... and {len(alike) - LISTED} more {code}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def size_text(count: float) -> str:
    """Returns a number of bytes with a unit: "512 B", "1.5 KiB", "2 MiB"."""
    if count < 1 << 10:
        return f"{count:.4g} B"
    return f"{count / 1024:.4g} KiB" if count < 1 << 20 else f"{count / (1 << 20):.4g} MiB"


def time_text(seconds: float) -> str:
    """Returns a time with a unit: "93.2 us", "2.98 ms"."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _table(pairs: Sequence[Pair]) -> list[str]:
    """Returns the lines of the table of asynchronous operations."""
    if not pairs:
        return ["no asynchronous operations"]
    rows = [("operation", "kind", "where", "runs", "bytes", "transfer", "work inside", "exposed", "what runs inside")]
    for p in pairs:
        inside = ", ".join(w.instruction for w in sorted(p.work, key=lambda w: -w.seconds)[:2])
        more = f" and {len(p.work) - 2} more" if len(p.work) > 2 else ""
        where = p.computation if not p.crosses else f"{p.computation} ({p.crosses})"
        rows.append((
            p.name[:44], p.kind if p.spelling != "kernel" else "kernel pair", where[:60], f"x{p.runs}",
            size_text(p.bytes), time_text(p.transfer), time_text(p.inside),
            time_text(p.exposed) if p.communicates else "",
            (inside + more) or "nothing",
        ))  # fmt: skip
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
