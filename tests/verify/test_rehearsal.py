"""Tests of rehearsals: what a run of `python -m flaxasync.verify` on a TPU does, for chips that are
not there.
"""

import dataclasses
import functools
import json
import os
from unittest import mock

import pytest

import flaxasync as fa
from flaxasync.check.player.errors import RaceError
from flaxasync.ops import trust
from flaxasync.verify import __main__ as verify_command
from flaxasync.verify import cases, rehearsal
from flaxasync.verify.__main__ import main, record_verdicts
from flaxasync.verify.cases import BACKENDS, FORGETS, Case, small
from flaxasync.verify.child import Setup
from flaxasync.verify.rehearsal import rehearse_case
from flaxasync.verify.verdict import CaseResult, Verdict, failed
from tests.verify.sparing_child import without_values

UNKNOWN = "the start of an asynchronous all-gather of XLA reads a table that the dump lacks"
SUMS = "matmul_reduce_scatter", "matmul_all_reduce"
EXPERTS = "expert_mlp", "expert_products"
WIDE = "all_gather_matmul", "mesh_matmul"
SMALL = [op for op in BACKENDS if op not in (*WIDE, *SUMS, *EXPERTS)]
# Each takes half a minute or more. Programs for a ring of four devices take half as long, and have
# the same backends and directions as those for eight. On a mesh of 2 x 2, `mesh_matmul` would have
# rings of two alone.
GROUPS = [
    ("v5e:2x4", "mesh_matmul"),
    ("v5e:2x2", "all_gather_matmul"),
    ("v5e:2x2", ",".join(SUMS)),
    ("v5e:2x2", ",".join(SMALL)),
    ("v5e:2x2", ",".join(EXPERTS)),
]
DEVICES = {"v5e:2x4": 8, "v5e:2x2": 4, "v6e:2x4": 8, "v5p:2x2x2": 8}
OTHERS = [("v6e:2x4", "attention"), ("v5p:2x2x2", "matmul_all_reduce/fused")]
pytestmark = pytest.mark.usefixtures("empty_cache")  # which must stay empty


@pytest.fixture
def without_any_values(monkeypatch):
    setup = functools.partial(Setup, serve=without_values)
    monkeypatch.setattr(verify_command, "Setup", setup)


def rehearse(topology, ops, folder, capsys):
    """Rehearses the quick cases of some ops, and checks that each has a verdict, and what it lacks
    a reason.
    """
    file = folder / "verdicts.json"
    options = ["--rehearse", topology, "--quick", "--ops", ops, "--json", str(file)]
    status = main(options)
    out = capsys.readouterr().out
    assert status == 0, out
    content = json.loads(file.read_text())
    machine, results = content["machine"], content["results"]
    assert machine["rehearsal"] == topology
    assert (machine["platform"], machine["chip"], machine["devices"]) == (
        "tpu",
        topology.partition(":")[0],
        DEVICES[topology],
    )
    listed = cases.list_cases(
        "tpu", DEVICES[topology], quick=True, only=ops.split(","), rehearse=True
    )
    assert [result["case"] for result in results] == [json.loads(case.text) for case in listed]
    for case, result in zip(listed, results, strict=True):
        if result["verdict"] == "NOT SUPPORTED":
            lacks_rate = f"for which a {machine['chip']} has no rate"
            reason = lacks_rate if lacks_rate in result["reason"] else FORGETS
            assert reason in result["reason"], result
            assert (reason == FORGETS) == (case.quantization is None)
            continue
        assert result["verdict"] == "PASS"
        assert (result["seconds"] is None) == result["reason"].startswith("no time: ")
        assert result["reason"].startswith("no values: ") == case.is_pair
    assert f"A rehearsal for {topology}: times are simulated" in out
    assert "the verdicts are in" not in out
    assert not (folder / "cache").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("without_any_values")
@pytest.mark.parametrize(("topology", "ops"), GROUPS)
def test_quick_cases_of_every_op_of_which_nothing_is_trusted(
    topology, ops, tmp_path, capsys, monkeypatch
):
    rehearse(topology, ops, tmp_path, capsys)
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    monkeypatch.setenv(trust.VARIABLE, str(tmp_path / "verdicts.json"))
    assert trust.known("v5e").verdict("ppermute/pallas/3+") is None


@pytest.mark.slow
@pytest.mark.usefixtures("without_any_values")
@pytest.mark.parametrize(("topology", "ops"), OTHERS)
def test_quick_cases_of_other_chips(topology, ops, tmp_path, capsys):
    rehearse(topology, ops, tmp_path, capsys)


def test_verdicts_of_a_rehearsal_are_not_stored():
    result = CaseResult(Case("ppermute", "pallas", (8,), ((128, 512),)), Verdict.PASS)
    machine = {"platform": "tpu", "chip": "v5e", "rehearsal": "v5e:2x4"}
    assert record_verdicts([result], machine) is None
    assert not trust.Machine.here("v5e").file.exists()
    assert record_verdicts([result], machine | {"rehearsal": None}).exists()


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_case_has_a_small_one_for_up_to_four_devices_that_tests_the_same(devices):
    for case in cases.list_cases("tpu", devices, quick=False):
        found = small(case)
        layout = {"mesh": found.mesh, "shapes": found.shapes, "dtype": "float32"}
        assert found == dataclasses.replace(case, **layout)
        assert found.devices == (1 if case.op in trust.SEND_NOTHING else min(case.devices, 4))
        assert len(found.mesh) == len(case.mesh)
        assert list(map(len, found.shapes)) == list(map(len, case.shapes))
        assert sum(size for shape in found.shapes for size in shape) < 2500


def test_a_rehearsal_needs_libtpu(capsys, monkeypatch):
    from flaxasync.check.compile import topologies

    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    assert main(["--rehearse", "v5e:2x4"]) == 2
    assert (
        "error: compiling for a TPU needs libtpu, no TPU: install flaxasync with"
        in capsys.readouterr().err
    )


def test_a_program_that_the_compiler_refuses_raises():
    case = Case("ppermute", "xla", (8,), ((2**20, 2**14),))  # 32 GiB
    with pytest.raises(RuntimeError, match=r"TPU compiler refused: .*Ran out of memory on HBM"):
        rehearse_case(case, "v5e:2x4")


def test_what_no_simulator_executes_is_not_supported():
    case = Case("matmul_all_reduce", "pallas", (8,), ((2, 1024, 512), (512, 512)), directions=1)
    message = rf"no simulator executes it: {FORGETS}; .*{UNKNOWN}"
    with pytest.raises(fa.mesh.UnsupportedError, match=message):
        rehearse_case(case, "v5e:2x4")


def test_a_program_that_the_simulator_cannot_execute_keeps_its_values_and_has_no_time():
    """It does not know the tables of asynchronous collectives of XLA among more than two
    devices.
    """
    case = Case("all_gather_matmul", "none", (8,), ((2, 128, 512), (512, 512)))
    result = rehearse_case(case, "v5e:2x4")
    assert (result.case, result.verdict, result.seconds) == (case, Verdict.PASS, None)
    assert result.reason.startswith("no time: ")
    assert UNKNOWN in result.reason
    assert result.errors.keys() == {"y", "dx", "dw"}


def test_a_ring_of_some_of_the_devices_is_simulated_beside_its_copies():
    result = rehearse_case(Case("ppermute", "pallas", (2,), ((128, 512),)), "v5e:2x4")
    assert 0 < result.seconds < 1e-3
    assert (result.errors, result.reason) == ({}, f"no values: {FORGETS}")


def test_a_race_in_the_simulator_is_wrong(monkeypatch):
    case = Case("ppermute", "pallas", (8,), ((128, 512),))
    error = RaceError("device 1 writes into device 0")
    monkeypatch.setattr(rehearsal, "simulated_seconds", mock.Mock(side_effect=error))
    with pytest.raises(RaceError):
        rehearse_case(case, "v5e:2x4")
    assert failed(case, error).verdict is Verdict.WRONG
