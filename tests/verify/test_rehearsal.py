"""Tests of rehearsals: what a run of `python -m flaxasync.verify` on a TPU does, for chips that are
not there.
"""

import json
import os
from unittest import mock

import pytest

import flaxasync as fa
from flaxasync.check.player.errors import RaceError
from flaxasync.ops import trust
from flaxasync.ops.cost_models import MODELS
from flaxasync.verify import cases, rehearsal
from flaxasync.verify.__main__ import main, record_verdicts
from flaxasync.verify.cases import BACKENDS, FORGETS, Case, stand_in
from flaxasync.verify.rehearsal import rehearse_case
from flaxasync.verify.verdict import CaseResult, Verdict, judge
from tests.verify import sparing_child

UNKNOWN = "the start of an asynchronous all-gather of XLA reads a table that the dump lacks"
SUMS = "matmul_reduce_scatter", "matmul_all_reduce"
EXPERTS = "expert_mlp", "expert_products"
WIDE = "all_gather_matmul", "mesh_matmul"
SMALL = [op for op in BACKENDS if op not in (*WIDE, *SUMS, *EXPERTS)]
# Each takes half a minute or more. Programs for a ring of four devices take half as long, and have
# the same backends and directions as those for eight. On a mesh of 2 x 2, `mesh_matmul` would have
# rings of two alone.
GROUPS = [
    ("v5e:2x4", ",".join(WIDE)),
    ("v5e:2x2", ",".join(SUMS)),
    ("v5e:2x2", ",".join(SMALL)),
    ("v5e:2x2", ",".join(EXPERTS)),
]
DEVICES = {"v5e:2x4": 8, "v5e:2x2": 4, "v6e:2x4": 8, "v5p:2x2x2": 8}
OTHERS = [("v6e:2x4", "attention"), ("v5p:2x2x2", "matmul_all_reduce/fused")]
pytestmark = pytest.mark.usefixtures("empty_cache")  # which must stay empty


def rehearse(topology, ops, folder, capsys, serve, has_values):
    """Rehearses the quick cases of some ops, and checks that each has a verdict, and what it lacks
    a reason.
    """
    file = folder / "verdicts.json"
    options = ["--rehearse", topology, "--quick", "--ops", ops, "--json", str(file)]
    status = main(options, serve=serve)
    out = capsys.readouterr().out
    assert status == 0, out
    content = json.loads(file.read_text())
    machine, results = content["machine"], content["results"]
    assert content["rehearsal"] == topology
    assert (machine["platform"], machine["chip"], machine["devices"]) == (
        "tpu",
        topology.partition(":")[0],
        DEVICES[topology],
    )
    listed = cases.list_cases(
        "tpu",
        DEVICES[topology],
        chip=machine["chip"],
        quick=True,
        only=ops.split(","),
        rehearse=True,
    )
    assert [result["case"] for result in results] == [json.loads(case.text) for case in listed]
    for case, result in zip(listed, results, strict=True):
        missing = result["missing"]
        if result["verdict"] == "NOT SUPPORTED":
            assert FORGETS in result["reason"], result
            continue
        assert result["verdict"] in ("PASS", "SLOWER")
        assert (result["planned"] is None) == bool(missing.get("plan"))
        assert (result["seconds"] is None) == bool(missing.get("time"))
        assert bool(missing.get("values")) == case.is_pair
        assert bool(result["errors"]) == has_values(case)
        assert case.op in MODELS or result["planned"] is None
    assert f"A rehearsal for {topology}: times are simulated" in out
    assert "the verdicts are in" not in out
    assert not (folder / "cache").exists()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "ops"), GROUPS)
def test_quick_cases_of_every_op_of_which_nothing_is_trusted(
    topology, ops, tmp_path, capsys, monkeypatch
):
    sparing = sparing_child.with_few_values, sparing_child.compares_values
    results = rehearse(topology, ops, tmp_path, capsys, *sparing)
    assert {r["clock"] for r in results if r["seconds"] is not None} <= {"simulated"}
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    monkeypatch.setenv(trust.VARIABLE, str(tmp_path / "verdicts.json"))
    assert trust.known("v5e").verdict("ppermute/pallas/3+") is None


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "ops"), OTHERS)
def test_quick_cases_of_other_chips(topology, ops, tmp_path, capsys):
    """Their values are those of any chip."""
    rehearse(topology, ops, tmp_path, capsys, sparing_child.without_values, lambda case: False)


def test_values_are_compared_of_each_kind_of_case():
    listed = cases.list_cases("tpu", 8, chip="v5e", quick=True, rehearse=True)
    compared = [case for case in listed if sparing_child.compares_values(case)]

    def kinds(cases):
        return {(case.op, case.backend, case.quantization, case.keeps) for case in cases}

    assert kinds(compared) == kinds(case for case in listed if not case.is_pair)
    for op in cases.MATMULS:
        fused = {c.directions for c in compared if (c.op, c.backend) == (op, "fused")}
        assert fused == {1, 2}


def test_verdicts_of_a_rehearsal_are_not_stored():
    result = CaseResult(Case("ppermute", "pallas", (8,), ((128, 512),)), Verdict.PASS)
    machine = {"platform": "tpu", "chip": "v5e", "rehearsal": "v5e:2x4"}
    assert record_verdicts([result], machine) is None
    assert not trust.Machine.here("v5e").file.exists()
    assert record_verdicts([result], machine | {"rehearsal": None}).exists()


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_case_has_a_small_one_for_up_to_four_devices_that_tests_the_same(devices):
    for case in cases.list_cases("tpu", devices, quick=False):
        small = stand_in(case)
        assert (small.op, small.backend, small.gradient) == (case.op, case.backend, case.gradient)
        assert small.quantization == case.quantization
        assert small.devices == min(case.devices, 4)
        assert small.directions == case.directions
        assert small.simulate == (case.backend not in ("none", "xla", "reference"))
        assert sum(size for shape in small.shapes for size in shape) < 2000


def test_a_rehearsal_needs_libtpu(capsys, monkeypatch):
    from flaxasync.check.compile import topologies

    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    assert main(["--rehearse", "v5e:2x4"]) == 2
    assert (
        "error: compiling for a TPU needs libtpu, no TPU: install flaxasync with"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("other", ["--platform tpu", "--cpu-devices 2"])
def test_a_rehearsal_runs_on_four_cpu_devices_alone(other, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--rehearse", "v5e:2x4", *other.split()])
    assert ended.value.code == 2
    message = "--rehearse excludes --platform and --cpu-devices: it runs on four CPU devices"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "message"),
    [
        # 32 GiB
        (
            Case("ppermute", "xla", (8,), ((2**20, 2**14),)),
            "TPU compiler refused: .*Ran out of memory on HBM",
        ),
        (
            Case("matmul_all_reduce", "pallas", (8,), ((2, 1024, 512), (512, 512)), directions=1),
            rf"no simulator executes it: {FORGETS}; .*{UNKNOWN}",
        ),
    ],
)
def test_what_can_be_neither_compiled_nor_simulated_is_not_supported(case, message):
    with pytest.raises(fa.mesh.UnsupportedError, match=message):
        rehearse_case(case, repeats=1, topology="v5e:2x4")


def test_a_program_that_the_simulator_cannot_execute_keeps_its_values_and_has_no_time():
    """It does not know the tables of asynchronous collectives of XLA among more than two
    devices.
    """
    case = Case("all_gather_matmul", "none", (8,), ((2, 128, 512), (512, 512)))
    measured = rehearse_case(case, repeats=1, topology="v5e:2x4")
    assert measured.timing is None
    assert measured.missing.keys() == {"time"}
    assert UNKNOWN in measured.missing["time"]
    assert measured.errors.keys() == {"y", "dx", "dw"}


def test_a_ring_of_some_of_the_devices_is_simulated_beside_its_copies():
    measured = rehearse_case(
        Case("ppermute", "pallas", (2,), ((128, 512),)), repeats=1, topology="v5e:2x4"
    )
    assert 0 < measured.timing.seconds < 1e-3
    assert measured.missing.keys() == {"values"}


def test_a_race_in_the_simulator_is_wrong(monkeypatch):
    case, error = (
        Case("ppermute", "pallas", (8,), ((128, 512),)),
        RaceError("device 1 writes into device 0"),
    )
    monkeypatch.setattr(rehearsal, "play_case", mock.Mock(side_effect=error))
    with pytest.raises(RaceError):
        rehearse_case(case, repeats=1, topology="v5e:2x4")
    assert judge({"error": f"RaceError: {error}"}, case).verdict is Verdict.WRONG
