"""Tests of all that follows a measurement, for every case of every chip: summary, JSON and trust."""

import dataclasses
import json

import pytest

from flaxasync.hardware import CHIPS
from flaxasync.ops import trust
from flaxasync.verify.__main__ import record_verdicts
from flaxasync.verify.cases import list_cases
from flaxasync.verify.verdict import CaseResult, Verdict, judge, summarize


def follow(cases, machine):
    """Checks what follows where every case passes, and where every kernel is wrong."""
    right = [judge(case, {"y": 0.0}, 1e-3) for case in cases]
    assert summarize(right, machine).splitlines() == [
        f"{len(cases)} PASS",
        "Calls without a backend may take every backend that passed.",
    ]
    wrong = [judge(case, {"y": float(case.is_kernel)}, 1e-3) for case in cases]
    bad = {f"{case.op}/{case.backend}" for case in cases if case.is_kernel}
    assert [result.verdict.bad for result in wrong] == [case.is_kernel for case in cases]
    text = summarize(wrong, machine)
    assert not bad or f"Do not use here: {', '.join(sorted(bad))}. Calls" in text
    for results in (right, wrong):
        for result in results:
            found = json.loads(json.dumps(dataclasses.asdict(result)))
            assert (found["verdict"], found["seconds"]) == (str(result.verdict), 1e-3)
        file = record_verdicts(results, machine)
        assert (file is not None) == bool(cases)
        with trust.trusting("verified"):
            known = trust.known(machine["chip"])
        for result in results:
            case = result.case
            if case.is_kernel:
                for name in case.verified:
                    assert (known.verdict(name) == trust.PASSED) == (results is right)
            elif case.quantization is None and case.directions != 1:
                itemsize = 4 if case.dtype == "float32" else 2
                call = trust.call_key(case.op, case.mesh, case.shapes, itemsize)
                assert known.times[call][case.backend] == 1e-3


def machine_of(chip, devices):
    return {"platform": "tpu", "chip": chip, "kind": chip, "devices": devices, "rehearsal": None}


pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("chip", CHIPS)
def test_every_case_of_every_chip_goes_through_all_that_follows_a_measurement(chip, devices, quick):
    follow(list_cases("tpu", devices, quick=quick), machine_of(chip, devices))


def test_a_chip_that_is_not_in_the_table_has_verdicts_by_its_kind():
    (case, *_) = [case for case in list_cases("tpu", 8, quick=True) if case.is_kernel]
    machine = machine_of(None, 8) | {"kind": "TPU v9"}
    record_verdicts([CaseResult(case, Verdict.PASS)], machine)
    with trust.trusting("verified"):
        assert [trust.known("TPU v9").verdict(name) for name in case.verified] == ["PASS"]
