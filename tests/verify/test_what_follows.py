"""Tests of all that follows a measurement, for every case of every chip: verdicts, plans, summary,
JSON and trust.
"""

import dataclasses
import json
import math

import pytest

from flaxasync.hardware import CHIPS
from flaxasync.ops import trust
from flaxasync.ops.cost_models import MODELS
from flaxasync.verify import verdict
from flaxasync.verify.__main__ import record_verdicts, verdicts_of
from flaxasync.verify.cases import list_cases
from flaxasync.verify.verdict import Verdict

PLAIN = 1e-3  # seconds


def judge_all(cases, machine, seconds):
    """Returns the results of cases that are right and take some seconds, and plain XLA `PLAIN`;
    checks the plans.
    """
    outcomes = []
    for case in cases:
        timing = {
            "seconds": PLAIN if case.plain else seconds,
            "clock": "device",
            "phases": {"fusion": 1e-4},
        }
        outcomes.append(
            {"measurement": {"errors": {"y": 0.0}, "tolerance": 1e-2, "timing": timing}}
        )
    judged = [verdict.judge(outcome, case) for outcome, case in zip(outcomes, cases, strict=True)]
    results = verdict.compare_times(judged, machine)
    for result in results:
        case = result.case
        assert result.plain == PLAIN
        if result.planned is None:
            assert result.missing["plan"], f"{case.label} has neither a planned time nor a reason"
            assert f"no plan: {result.missing['plan']}" in str(result)
            assert case.op not in MODELS or not case.plain
        else:
            assert "plan" not in result.missing
            assert all(0 < time < math.inf for time in result.planned)
            assert result.planned[0] == result.planned[1] or not case.plain
        found = json.loads(json.dumps(dataclasses.asdict(result)))
        assert (found["verdict"], found["seconds"]) == (str(result.verdict), result.seconds)
    return results


def follow(cases, machine):
    """Checks what follows where every backend beats plain XLA, and where every one loses to it."""
    won = judge_all(cases, machine, PLAIN / 2)
    assert {result.verdict for result in won} == {Verdict.PASS}
    lines = verdict.summarize(won, machine).splitlines()
    assert lines == [
        f"{len(cases)} PASS",
        "Calls without a backend may take every backend that passed.",
    ]
    lost = judge_all(cases, machine, PLAIN * 3)
    slower = [r for r in lost if r.planned and r.planned[0] < r.planned[1]]
    assert [r for r in lost if r.verdict is not Verdict.PASS] == slower
    assert all(
        r.verdict is Verdict.SLOWER and r.reason == "takes 3.00 times as long as plain XLA"
        for r in slower
    )
    lines = verdict.summarize(lost, machine).splitlines()
    passed = len(cases) - len(slower)
    assert lines[0] == (f"{passed} PASS, {len(slower)} SLOWER" if slower else f"{passed} PASS")
    names = ", ".join(sorted({f"{r.case.op}/{r.case.backend}" for r in slower}))
    assert not slower or f"where the opposite is predicted: {names}. See" in lines[1]
    for results in (won, lost):
        file = record_verdicts(results, machine)
        stored = verdicts_of(results)
        assert (file is not None) == bool(stored)
        if file is not None:
            assert json.loads(file.read_text())["verdicts"] == stored
        with trust.trusting("verified"):
            known = trust.known(machine["chip"])
        for name, verdicts in stored.items():
            passed = set(verdicts.values()) == {trust.PASSED}
            assert (known.verdict(name) == trust.PASSED) is passed


def machine_of(chip, devices):
    return {"platform": "tpu", "chip": chip, "kind": chip, "devices": devices}


pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("chip", CHIPS)
def test_every_case_of_every_chip_goes_through_all_that_follows_a_measurement(chip, devices, quick):
    follow(list_cases("tpu", devices, chip=chip, quick=quick), machine_of(chip, devices))


def test_a_chip_that_is_not_in_the_table_has_no_plans_and_a_reason():
    cases = [case for case in list_cases("tpu", 8, quick=True) if case.op not in MODELS]
    results = judge_all(cases, machine_of(None, 8) | {"kind": "TPU v9"}, PLAIN)
    assert {r.missing["plan"] for r in results} == {"the table of chips lacks this one"}


def fail(*arguments):
    raise ValueError("a planted fault")


@pytest.mark.parametrize(("name", "fault"), [
    ("planned_seconds", fail),
    ("planned_seconds", lambda case, chip: ""),  # a plan without a time and without a reason
    ("planned_seconds", lambda case, chip: "there is none"),
    ("planned_seconds", lambda case, chip: (1e-3, 2e-3)),  # plain XLA is predicted to win
    ("planned_seconds", lambda case, chip: (math.nan, math.nan)),
    ("compare_times", lambda results, machine: results),
    ("summarize", lambda results, machine: f"{len(results)} PASS"),
])  # fmt: skip
def test_planted_faults_in_what_follows_are_noticed(name, fault, monkeypatch):
    monkeypatch.setattr(verdict, name, fault)
    with pytest.raises((AssertionError, KeyError, ValueError)) as noticed:
        follow(list_cases("tpu", 8, chip="v5e", quick=True), machine_of("v5e", 8))
    assert fault is not fail or "a planted fault" in str(noticed.value)
