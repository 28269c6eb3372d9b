"""What came of a case, in one word and one line, and the report of all cases."""

import collections
import dataclasses
import enum
from collections.abc import Sequence

from flaxasync.check.player.errors import RaceError
from flaxasync.verify.cases import Case, Facts

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""The largest deviation relative to the largest value. float32 differs by the order of additions;
bfloat16 keeps 8 bits, and partial sums travel in it."""
ROUNDING = {"int8": 0.05, "fp8": 0.2}
"""The same for plain products in 8 bits, which are compared with products that are not rounded."""

ADVICE = (
    "Calls without a backend take none of these kernels, but still plain XLA (none, xla, "
    "reference): name another backend. Please open an issue and attach the file that --json writes."
)


class Verdict(enum.StrEnum):
    """The verdicts, the best first."""

    PASS = "PASS"
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
    reason: str = ""  # why the verdict is not PASS, or why there are no values or times
    # the largest relative deviation of each result
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    # by the clock of the device, or simulated in a rehearsal; None on CPUs
    seconds: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.verdict:13} {self.case.label:56}"]
        if self.errors:
            parts.append(f"{' '.join(self.errors)} within {max(self.errors.values()):.0e}")
        if self.seconds is not None:
            parts.append(f"{self.seconds * 1e3:.3f} ms")
        parts.append(self.reason)
        return "  ".join(parts).rstrip()


def judge(
    case: Case, errors: dict[str, float], seconds: float | None = None, reason: str = ""
) -> CaseResult:
    """Returns the result of a case that ran, which is wrong if an error is above the tolerance."""
    verdict = Verdict.PASS
    allowed = tolerance(case)
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= allowed]
    if wrong:
        verdict = Verdict.WRONG
        reason = (
            f"differs from the reference: {', '.join(wrong)} of the largest value, where "
            f"{allowed:.0e} is allowed"
        )
    return CaseResult(case, verdict, reason, errors, seconds)


def tolerance(case: Case) -> float:
    """Returns the deviation that is allowed, relative to the largest value."""
    if case.quantization is not None and case.backend == case.plain:
        return ROUNDING[case.quantization]
    return TOLERANCE[case.dtype]


def failed(case: Case, error: Exception) -> CaseResult:
    """Returns the result of a case that raised: wrong, if JAX's simulator or ours found a race."""
    verdict = Verdict.CRASHED
    if isinstance(error, RaceError) or "RACE DETECTED" in str(error):
        verdict = Verdict.WRONG
    return CaseResult(case, verdict, f"{type(error).__name__}: {error}"[:2000])


def summarize(results: Sequence[CaseResult], machine: Facts) -> str:
    """Says in a few lines what a person can conclude and do."""
    counts = collections.Counter(result.verdict for result in results)
    words = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
    lines = [", ".join(words)]
    bad = [result.case for result in results if result.verdict.bad]
    if bad:
        names = sorted({f"{case.op}/{case.backend}" for case in bad})
        lines.append(f"Do not use here: {', '.join(names)}. {ADVICE}")
    lines += {result.reason for result in results if result.verdict is Verdict.NOT_RUN}
    if machine["rehearsal"]:
        lines.append(
            f"A rehearsal for {machine['rehearsal']}: times are simulated, and values are those of "
            "small cases on CPU devices. No TPU was measured, and no verdict is stored."
        )
    elif machine["platform"] != "tpu":
        lines.append(
            f"No TPU was measured: these are {machine['devices']} {machine['platform']} devices."
        )
    else:
        lines.append("Calls without a backend may take every backend that passed.")
    return "\n".join(lines)
