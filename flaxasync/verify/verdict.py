"""What came of a case, in one word and one line, and the report of all cases."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import flaxasync as fa
from flaxasync.ops import trust
from flaxasync.ops.plan import MODELS
from flaxasync.verify.cases import Case
from flaxasync.verify.platform import DEFECTS

# how many times the time of the plain backend a case may take before it is called slower
MARGIN = 1.1
NOISE = 5e-6  # seconds by which two measurements of one short program differ


class Verdict(enum.StrEnum):
    """The verdicts, the best first."""

    PASS = "PASS"
    SLOWER = "SLOWER"
    UNSUPPORTED = "NOT SUPPORTED"
    NOT_RUN = "NOT RUN"
    WRONG = "WRONG"
    HUNG = "HUNG"
    CRASHED = "CRASHED"

    @property
    def bad(self) -> bool:
        return self in (Verdict.WRONG, Verdict.HUNG, Verdict.CRASHED)


@dataclasses.dataclass(frozen=True)
class Result:
    """A case with its verdict. These are the fields of the JSON file."""

    case: Case
    verdict: Verdict
    reason: str = ""  # why the verdict is not PASS
    # the largest relative deviation of each result
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float | None = None  # None for a case that was simulated or did not end
    clock: str = ""  # whose seconds they are: "device", "host", or "simulated"
    # seconds of each instruction, by that clock
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    plain: float | None = None  # the seconds of the plain backend on the same operands
    # what `flaxasync.plan` predicts for this backend and the plain one
    planned: tuple[float, float] | None = None
    # Why there is no planned time ("plan"), measured time ("time"), or reference of the values
    # ("values").
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.case.op}/{self.case.backend}"

    def __str__(self) -> str:
        parts = [f"{self.verdict:13} {self.case.label:56}"]
        if self.errors:
            parts.append(f"{' '.join(self.errors)} within {max(self.errors.values()):.0e}")
        if self.seconds is not None:
            beside = (
                [f"plain {_ms(self.plain)}"]
                if self.plain is not None and not self.case.plain
                else []
            )
            beside += [f"planned {_ms(self.planned[0])}"] if self.planned is not None else []
            where = " simulated" if self.clock == "simulated" else ""
            parts.append(
                f"{_ms(self.seconds)}{where}" + (f" ({', '.join(beside)})" if beside else "")
            )
        elif self.case.simulate and self.errors:
            parts.append("in the simulator")
        parts += [self.reason] if self.reason else []
        return "  ".join(
            parts + [f"no {what}: {why}" for what, why in self.missing.items()]
        ).rstrip()


def judge(outcome: dict[str, Any], case: Case) -> Result:
    """Returns the result of a case from the outcome that `run_cases` yields, without regard to its
    time.
    """
    (kind, found), *_ = outcome.items()
    if kind == "error":
        raced = "RACE" in found or found.startswith("RaceError")  # in JAX's simulator, and in ours
        return Result(case, Verdict.WRONG if raced else Verdict.CRASHED, found)
    if kind != "measurement":  # the name of a verdict, in lower case
        return Result(case, Verdict[kind.upper()], found)
    measured = outcome["measurement"]
    tolerance = measured["tolerance"]
    wrong = {name: error for name, error in measured["errors"].items() if not error <= tolerance}
    reason = ""
    if wrong:
        worst = ", ".join(f"{name} by {error:.1e}" for name, error in wrong.items())
        reason = (
            f"differs from the reference: {worst} of the largest value, where "
            f"{tolerance:.0e} is allowed"
        )
        if case.op == "platform":
            reason = f"{DEFECTS[case.backend]}; {reason}"
    verdict = Verdict.WRONG if wrong else Verdict.PASS
    timing = measured["timing"] or {}
    missing = measured.get("missing", {})
    return Result(case, verdict, reason, measured["errors"], missing=missing, **timing)


def compare_times(results: Sequence[Result], machine: dict[str, Any]) -> list[Result]:
    """Returns the results with the plain backend's times beside them, and calls those slower that
    lose to it.

    Losing to the plain backend is a verdict only on a TPU where `flaxasync.plan` predicts the
    opposite. Simulated CPU devices share their cores, so a ring on them hides nothing, and its time
    says nothing.
    """
    plain = {
        _key(r.case): r.seconds
        for r in results
        if r.case.plain and r.seconds is not None and r.verdict is Verdict.PASS
    }
    found = []
    for result in results:
        base = plain.get(_key(result.case))
        planned = (
            planned_seconds(result.case, machine["chip"]) if machine["platform"] == "tpu" else None
        )
        if isinstance(planned, str):
            result = dataclasses.replace(
                result, plain=base, missing=result.missing | {"plan": planned}
            )
        else:
            result = dataclasses.replace(result, plain=base, planned=planned)
        should_win = result.planned is not None and result.planned[0] < result.planned[1]
        if (
            result.verdict is Verdict.PASS
            and should_win
            and base is not None
            and result.seconds is not None
        ):
            reason = f"takes {result.seconds / base:.2f} times as long as plain XLA"
            if result.seconds > MARGIN * base + NOISE:
                result = dataclasses.replace(result, verdict=Verdict.SLOWER, reason=reason)
        found.append(result)
    return found


def planned_seconds(case: Case, chip: str | None) -> tuple[float, float] | str:
    """Returns the seconds that `flaxasync.plan` predicts for the backend of a case and for "none",
    or why it cannot.
    """
    if chip is None:
        return "the table of chips lacks this one"
    if case.op not in MODELS:
        return f"fa.plan has no cost model of {case.op}"
    itemsize = 2 if case.dtype == "bfloat16" else 4
    options = case.options | ({} if case.op == "mesh_matmul" else {"backward": case.gradient})
    seconds = fa.plan(
        case.op, *case.shapes, chip=chip, ring=case.ring, itemsize=itemsize, **options
    ).seconds
    if case.backend not in seconds:
        return f"fa.plan does not weigh {case.backend!r} for this call"
    return seconds[case.backend], seconds["none"]


def summarize(results: Sequence[Result], machine: dict[str, Any]) -> str:
    """Says in a few lines what a person can conclude and do."""
    counts = {verdict: sum(r.verdict is verdict for r in results) for verdict in Verdict}
    lines = [
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        or "nothing was verified"
    ]
    found = [
        (r, DEFECTS[r.case.backend]) for r in results if r.case.op == "platform" and r.verdict.bad
    ]
    defects = [r for r, defect in found if r.verdict is Verdict.WRONG or defect.fails]
    lines += [f"Known defect of this platform: {defect}." for r, defect in found if r in defects]
    bad = [r for r in results if r.verdict.bad and r not in defects]
    for is_plain, advice in (
        (False, "A call without a backend does not take them."),
        (True, "This is plain XLA, which calls still take: name another backend."),
    ):
        if names := sorted({r.name for r in bad if (r.case.backend in trust.PLAIN) == is_plain}):
            lines.append(f"Do not use here: {', '.join(names)}. {advice}")
    if bad:
        lines.append("Please open an issue and attach the file that --json writes.")
    if slower := sorted({r.name for r in results if r.verdict is Verdict.SLOWER}):
        lines.append(
            "Right, but slower than plain XLA where the opposite is predicted: "
            f"{', '.join(slower)}. See docs/tpu.md."
        )
    if not_run := [r.reason for r in results if r.verdict is Verdict.NOT_RUN]:
        lines.append(f"{len(not_run)} cases have no verdict: {not_run[0]}")
    if machine.get("rehearsal"):
        unchecked = sum("values" in r.missing for r in results)
        lines.append(
            f"A rehearsal for {machine['rehearsal']}: times are simulated, and values are those of "
            "small cases on CPU "
            f"devices; {unchecked} cases have none. No TPU was measured, and no run trusts this."
        )
    elif machine["platform"] != "tpu":
        lines.append(
            f"No TPU was measured: these are {machine['devices']} {machine['platform']} devices."
        )
    elif not bad and not slower and not not_run:
        lines.append("Calls without a backend may take every backend that passed.")
    return "\n".join(lines)


def _key(case: Case) -> tuple:
    return case.op, case.mesh, case.shapes, case.dtype, case.gradient, case.quantization


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.3f} ms"
