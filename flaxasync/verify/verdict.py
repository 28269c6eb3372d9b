"""What came of a case, in one word and one line, and the report of all cases."""

import collections
import dataclasses
import enum
import re
from collections.abc import Sequence

import jax.numpy as jnp

import flaxasync as fa
from flaxasync.ops import trust
from flaxasync.ops.cost_models import MODELS
from flaxasync.verify.cases import Case, Facts

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
class CaseResult:
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

    @property
    def should_win(self) -> bool:
        """Whether the backend is predicted to be faster than the plain one."""
        return self.planned is not None and self.planned[0] < self.planned[1]

    def __str__(self) -> str:
        parts = [f"{self.verdict:13} {self.case.label:56}"]
        if self.errors:
            parts.append(f"{' '.join(self.errors)} within {max(self.errors.values()):.0e}")
        if self.seconds is not None:
            parts.append(_ms(self.seconds))
        if self.clock == "simulated" or (self.case.simulate and self.errors):
            parts.append("simulated")
        if self.seconds is not None and self.plain is not None and not self.case.plain:
            parts.append(f"plain {_ms(self.plain)}")
        if self.planned is not None:
            parts.append(f"planned {_ms(self.planned[0])}")
        if self.reason:
            parts.append(self.reason)
        parts += [f"no {what}: {why}" for what, why in self.missing.items()]
        return "  ".join(parts).rstrip()


def judge(outcome: Facts, case: Case) -> CaseResult:
    """Returns the result of a case from the outcome that `run_cases` yields, without regard to its
    time.
    """
    ((kind, found),) = outcome.items()
    if kind == "error":
        verdict = Verdict.CRASHED
        # in JAX's simulator, and in ours
        if re.search(r"\bRACE\b", found) or found.startswith("RaceError"):
            verdict = Verdict.WRONG
        return CaseResult(case, verdict, found)
    if kind != "measurement":  # the name of a verdict, in lower case
        return CaseResult(case, Verdict[kind.upper()], found)
    timing = found["timing"] or {}
    result = CaseResult(
        case, Verdict.PASS, errors=found["errors"], missing=found.get("missing", {}), **timing
    )
    allowed = found["tolerance"]
    wrong = [f"{name} by {e:.1e}" for name, e in result.errors.items() if not e <= allowed]
    if not wrong:
        return result
    reason = (
        f"differs from the reference: {', '.join(wrong)} of the largest value, where {allowed:.0e} "
        "is allowed"
    )
    return dataclasses.replace(result, verdict=Verdict.WRONG, reason=reason)


def compare_times(results: Sequence[CaseResult], machine: Facts) -> list[CaseResult]:
    """Returns the results with the plain backend's times beside them, and calls those slower that
    lose to it.

    Losing to the plain backend is a verdict only on a TPU where `flaxasync.plan` predicts the
    opposite. Simulated CPU devices share their cores, so a ring on them hides nothing, and its time
    says nothing.
    """
    plain = {_key(r.case): r.seconds for r in results if r.case.plain and r.verdict is Verdict.PASS}
    found = []
    for measured in results:
        result = dataclasses.replace(measured, plain=plain.get(_key(measured.case)))
        if machine["platform"] == "tpu":
            result = _with_plan(result, machine["chip"])
        if result.verdict is Verdict.PASS and result.should_win:
            result = _slower(result)
        found.append(result)
    return found


def _slower(result: CaseResult) -> CaseResult:
    """Returns a result, called slower if it takes longer than the plain backend by more than the
    margin.
    """
    seconds = result.seconds
    plain = result.plain
    if seconds is None or plain is None or seconds <= MARGIN * plain + NOISE:
        return result
    reason = f"takes {seconds / plain:.2f} times as long as plain XLA"
    return dataclasses.replace(result, verdict=Verdict.SLOWER, reason=reason)


def _with_plan(result: CaseResult, chip: str | None) -> CaseResult:
    """Returns a result with what `flaxasync.plan` predicts, or with why it cannot."""
    planned = planned_seconds(result.case, chip)
    if isinstance(planned, str):
        return dataclasses.replace(result, missing=result.missing | {"plan": planned})
    return dataclasses.replace(result, planned=planned)


def planned_seconds(case: Case, chip: str | None) -> tuple[float, float] | str:
    """Returns the seconds that `flaxasync.plan` predicts for the backend of a case and for "none",
    or why it cannot.
    """
    if chip is None:
        return "the table of chips lacks this one"
    if case.op not in MODELS:
        return f"fa.plan has no cost model of {case.op}"
    options = case.options
    if case.op != "mesh_matmul":
        options["backward"] = case.gradient
    itemsize = jnp.dtype(case.dtype).itemsize
    plan = fa.plan(case.op, *case.shapes, chip=chip, ring=case.ring, itemsize=itemsize, **options)
    if case.backend not in plan.seconds:
        return f"fa.plan does not weigh {case.backend!r} for this call"
    return plan.seconds[case.backend], plan.seconds["none"]


def summarize(results: Sequence[CaseResult], machine: Facts) -> str:
    """Says in a few lines what a person can conclude and do."""
    counts = collections.Counter(result.verdict for result in results)
    words = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
    lines = [", ".join(words) or "nothing was verified"]
    bad = [r for r in results if r.verdict.bad]
    kernels = {r.name for r in bad if r.case.backend not in trust.PLAIN}
    plain = {r.name for r in bad} - kernels
    if kernels:
        avoided = "A call without a backend does not take them."
        lines.append(f"Do not use here: {', '.join(sorted(kernels))}. {avoided}")
    if plain:
        taken = "This is plain XLA, which calls still take: name another backend."
        lines.append(f"Do not use here: {', '.join(sorted(plain))}. {taken}")
    if bad:
        lines.append("Please open an issue and attach the file that --json writes.")
    slower = sorted({r.name for r in results if r.verdict is Verdict.SLOWER})
    if slower:
        lines.append(
            "Right, but slower than plain XLA where the opposite is predicted: "
            f"{', '.join(slower)}. See docs/tpu.md."
        )
    not_run = [r.reason for r in results if r.verdict is Verdict.NOT_RUN]
    if not_run:
        lines.append(f"{len(not_run)} cases have no verdict: {not_run[0]}")
    devices = f"{machine['devices']} {machine['platform']} devices"
    if machine.get("rehearsal"):
        unchecked = sum("values" in r.missing for r in results)
        lines.append(
            f"A rehearsal for {machine['rehearsal']}: times are simulated, and values are those of "
            f"small cases on CPU devices; {unchecked} cases have none. No TPU was measured, and no "
            "verdict is stored."
        )
    elif machine["platform"] != "tpu":
        lines.append(f"No TPU was measured: these are {devices}.")
    elif not bad and not slower and not not_run:
        lines.append("Calls without a backend may take every backend that passed.")
    return "\n".join(lines)


def _key(case: Case) -> tuple:
    return case.op, case.mesh, case.shapes, case.dtype, case.gradient, case.quantization


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
