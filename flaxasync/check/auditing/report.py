"""What `audit` returns: asynchronous operations as they were scheduled, what was found; a table, or JSON."""

import dataclasses
import json

from flaxasync.check.auditing.findings import Finding, Severity

EMPTY = 0.01  # share of the transfer below which a window counts as empty
LISTED = 4  # findings of one code that the table writes out


@dataclasses.dataclass(frozen=True)
class Work:
    """One instruction that runs inside a window."""

    computation: str
    instruction: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Pair:
    """One asynchronous operation as it was scheduled."""

    name: str
    kind: str
    spelling: str
    computation: str
    dones: tuple[str, ...]
    bytes: int
    runs: int  # how often it starts, loops included
    communicates: bool
    work: tuple[Work, ...]  # inside the window
    inside: float  # s of work inside
    transfer: float  # s that the transfer takes alone
    crosses: str  # "", or how the future passes through a loop
    source: str

    @property
    def exposed(self) -> float:
        """Seconds of the transfer that no work hides, each time it runs."""
        return max(0.0, self.transfer - self.inside)

    @property
    def overlapped(self) -> bool:
        """Says whether anything runs while it travels."""
        return self.inside > EMPTY * self.transfer and bool(self.work)


@dataclasses.dataclass(frozen=True)
class Audit:
    """What `audit` found. `print` shows it as a table."""

    module: str
    chip: str
    pairs: tuple[Pair, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when no finding is an error: no buffer in flight is touched, no rule broken, nothing deleted."""
        return not any(f.severity == Severity.ERROR for f in self.findings)

    def codes(self) -> set[str]:
        return {f.code for f in self.findings}

    def worst(self) -> Severity | None:
        return max((f.severity for f in self.findings), default=None)

    def to_json(self) -> str:
        pairs = [dataclasses.asdict(p) | {"exposed": p.exposed, "overlapped": p.overlapped} for p in self.pairs]
        return json.dumps(
            {
                "module": self.module,
                "chip": self.chip,
                "ok": self.ok,
                "pairs": pairs,
                "findings": [f.to_json() for f in self.findings],
                "notes": list(self.notes),
            },
            indent=2,
        )

    def __str__(self) -> str:
        return _table(self)


def _table(report: Audit) -> str:
    rows = [("operation", "kind", "where", "runs", "bytes", "transfer", "work inside", "exposed", "what runs inside")]
    for p in report.pairs:
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
    lines = [f"audit of {report.module or 'a fragment'} ({report.chip}): {'ok' if report.ok else 'NOT OK'}", ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(rows) == 1:
        lines[-1] = "no asynchronous operations"
    counts = {s: sum(f.severity == s for f in report.findings) for s in reversed(Severity)}
    lines += ["", ", ".join(f"{n} {s}{'s' if n != 1 and s != Severity.INFO else ''}" for s, n in counts.items())]
    for code in dict.fromkeys(f.code for f in report.findings):
        alike = [f for f in report.findings if f.code == code]
        lines += [str(f) for f in alike[:LISTED]]
        if len(alike) > LISTED:
            lines.append(f"    ... and {len(alike) - LISTED} more {code}")
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)


def size_text(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    raise AssertionError


def time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
