"""Tests of `python -m flaxasync.verify` on CPU devices: its cases, its verdicts, and faults planted
in its child.
"""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxasync as fa
from flaxasync.ops import trust
from flaxasync.verify import __main__ as verify_command
from flaxasync.verify import cases, child, measure, programs, supervisor
from flaxasync.verify.__main__ import describe_in_words, main, record_verdicts
from flaxasync.verify.verdict import CaseResult, Verdict, compare_times, judge, summarize
from tests.verify import faulty_child

MACHINE = {"platform": "tpu", "chip": "v5e", "devices": 8}


def every_case(platform, devices, quick=True):
    return cases.list_cases(
        platform, devices, chip="v5e" if platform == "tpu" else None, quick=quick
    )


@pytest.mark.parametrize(
    ("platform", "devices"), [("cpu", 4), ("gpu", 1), ("tpu", 1), ("tpu", 4), ("tpu", 8)]
)
def test_every_op_and_every_backend_is_listed_on_every_machine(platform, devices):
    listed = {(case.op, case.backend) for case in every_case(platform, devices)}
    assert listed == {(op, backend) for op, names in cases.BACKENDS.items() for backend in names}


def test_a_tpu_runs_everything_and_a_gpu_what_is_no_tpu_kernel():
    assert all(cases.unsupported(case, "tpu", quick=True) is None for case in every_case("tpu", 8))
    runs = {
        case.backend
        for case in every_case("gpu", 4)
        if cases.unsupported(case, "gpu", quick=True) is None
    }
    assert runs == {"none", "xla", "reference"}


def test_the_plain_backend_is_measured_beside_every_backend_that_is_chosen():
    plain = {
        "matmul_reduce_scatter/fused": "none",
        "attention/flash": "reference",
        "ppermute/pallas": "xla",
    }
    listed = cases.list_cases("tpu", 8, quick=True, only=list(plain))
    beside = {f"{name.partition('/')[0]}/{backend}" for name, backend in plain.items()}
    assert {f"{case.op}/{case.backend}" for case in listed} == {*plain} | beside


def test_a_full_run_verifies_each_direction_with_and_without_gradients():
    found = [
        c
        for c in every_case("tpu", 8, quick=False)
        if (c.op, c.backend) == ("all_gather_matmul", "fused")
    ]
    forms = itertools.product((1, 2), (True, False), (None, "int8"))
    assert {(c.directions, c.gradient, c.quantization) for c in found} == set(forms)


@pytest.mark.parametrize(
    ("chip", "kinds"), [("v5e", {"int8"}), ("tpu7x", {"fp8"}), (None, {"int8", "fp8"})]
)
def test_the_matmuls_are_verified_in_the_eight_bit_types_of_a_chip(chip, kinds):
    listed = cases.list_cases("tpu", 8, chip=chip, quick=True)
    found = {(case.op, case.backend, case.quantization) for case in listed if case.quantization}
    assert found == set(itertools.product(cases.MATMULS, ("none", "fused"), kinds))


@pytest.mark.slow
def test_a_kernel_in_eight_bits_is_compared_with_the_plain_backend_and_that_with_the_formula():
    """What is not rounded differs by more than kernels may, and by less than the plain backend
    may.
    """
    plain = cases.list_cases("cpu", 4, quick=True, only=["all_gather_matmul/fused"])[1]
    kernel = dataclasses.replace(plain, backend="xla")  # which runs here without a simulator
    assert (plain.quantization, measure.tolerance(plain), measure.tolerance(kernel)) == (
        "int8",
        0.05,
        1e-5,
    )
    errors = [
        max(measure.check_values(c, programs.make_program(c), repeats=1, runs=1).values())
        for c in (plain, kernel)
    ]
    assert errors[1] <= 1e-5 < 1e-3 < errors[0] <= 0.05
    swapped = dataclasses.replace(kernel, quantization="fp8")
    assert (
        max(
            measure.check_values(kernel, programs.make_program(swapped), repeats=1, runs=1).values()
        )
        > 1e-3
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=pytest.mark.slow if case.is_pair or case.quantization else [], id=case.label
        )
        # both numbers of directions, and both of these backends, have the same shapes
        for case in every_case("tpu", 8)
        if case.directions != 1 and case.backend != "stateful"
    ],
)
def test_the_shapes_of_every_case_fit_its_op(case):
    """The program is traced for described TPUs: kernels check their operands while they are
    traced.
    """
    mesh = programs.make_mesh(case, fa.check.topology_devices("v5e:2x4"))
    with jax.set_mesh(mesh):
        arguments = programs.abstract_arguments(case, mesh)
        results = jax.eval_shape(programs.make_program(case), *arguments)
        wanted = jax.eval_shape(programs.make_program(case, reference=True), *arguments)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), results) == jax.tree.map(
        lambda a: (a.shape, a.dtype), wanted
    )


def test_inputs_are_random_and_differ_from_seed_to_seed():
    case = next(c for c in every_case("cpu", 4) if c.op == "all_gather_matmul")
    mesh = programs.make_mesh(case)
    with jax.set_mesh(mesh):
        ((x, w), dy), ((other, _), _) = (
            programs.random_arguments(case, mesh, seed) for seed in (0, 1)
        )
    for array in (x, w, dy):
        assert len(np.unique(array)) > array.size / 2
    assert not jnp.array_equal(x, other)


def test_a_program_runs_several_times_without_a_wait_and_each_result_is_compared(monkeypatch):
    case = next(c for c in every_case("cpu", 4) if (c.op, c.backend) == ("ppermute", "xla"))
    make_program, compare, compared, runs = programs.make_program, measure.compare_results, [], []

    def make(case, *, reference=False):
        program = make_program(case, reference=reference)

        def counted(*arguments):
            runs.append(len(compared))
            result = program(*arguments)
            return result | {"y": result["y"] + 1.0} if len(runs) == 5 else result

        return program if reference else counted

    monkeypatch.setattr(
        measure, "compare_results", lambda *both: compared.append(both) or compare(*both)
    )
    monkeypatch.setattr(programs, "make_program", make)
    monkeypatch.setattr(measure, "time_program", lambda run, name: None)
    measurement = measure.run_case(case, repeats=2)
    assert runs == [0] * measure.BACK_TO_BACK + [measure.BACK_TO_BACK]
    assert measurement.errors["y"] > 0.1  # the fifth run is wrong


def test_a_result_that_is_not_finite_is_infinitely_wrong():
    one = {"y": np.ones(4), "dx": np.ones(4)}
    found = measure.compare_results(one | {"y": np.array([1, np.nan, 1, 1])}, one)
    assert found == {"y": float("inf"), "dx": 0.0}


@pytest.mark.slow
def test_planted_faults_are_reported_and_the_other_cases_still_run(capsys, tmp_path):
    file = tmp_path / "verdicts.json"
    faulty = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "ring_attention"
    ops = ",".join([*(f"{op}/xla" for op in faulty), "ppermute/xla"])
    options = ["--quick", "--cpu-devices", "2", "--ops", ops, "--limit", "30", "--json", str(file)]
    assert main(options, serve=faulty_child.serve) == 1
    found = {
        (r["case"]["op"], r["case"]["backend"]): r for r in json.loads(file.read_text())["results"]
    }
    assert {name: result["verdict"] for name, result in found.items()} == {
        **{(op, "none"): "PASS" for op in faulty},
        ("all_gather_matmul", "xla"): "WRONG",
        ("matmul_reduce_scatter", "xla"): "HUNG",
        ("matmul_all_reduce", "xla"): "CRASHED",
        ("ring_attention", "xla"): "CRASHED",
        ("ppermute", "xla"): "PASS",
    }
    reasons = {
        name[0]: result["reason"] for name, result in found.items() if result["verdict"] != "PASS"
    }
    assert reasons["all_gather_matmul"].startswith("differs from the reference: ")
    assert reasons["matmul_reduce_scatter"] == "did not end within 30 s and was ended"
    assert (
        "died of SIGABRT; its last words: the last words of a process"
        in reasons["matmul_all_reduce"]
    )
    assert (
        reasons["ring_attention"]
        == "NotImplementedError: a planted error, such as the compiler of kernels raises"
    )
    out = capsys.readouterr().out
    assert "5 PASS, 1 WRONG, 1 HUNG, 2 CRASHED" in out
    assert "Do not use here: all_gather_matmul/xla, matmul_all_reduce/xla" in out
    assert "This is plain XLA, which calls still take: name another backend." in out


@pytest.mark.slow
@pytest.mark.parametrize(("works_at", "verdict"), [(3, Verdict.UNSUPPORTED), (9, Verdict.NOT_RUN)])
def test_chips_that_cannot_be_opened_after_a_hang_are_tried_again_and_the_rest_has_no_verdict(
    tmp_path, works_at, verdict
):
    opened = tmp_path / "opened"
    serve = functools.partial(faulty_child.open_once, opened, works_at)
    setup = child.Setup(limit=2, serve=serve, pauses=(0.1, 0.1))
    pair = every_case("cpu", 4)[:2]
    first, second = map(judge, supervisor.run_cases(pair, setup), pair)
    assert (first.verdict, second.verdict) == (Verdict.HUNG, verdict)
    assert opened.stat().st_size == (3 if verdict is Verdict.UNSUPPORTED else 4)
    if verdict is Verdict.NOT_RUN:
        assert second.reason.startswith(
            f"the chips could not be opened again after {pair[0].label}; end the process that "
            "holds them and run again (ended with code 1; its last words: the chips are in use)"
        )
        assert "1 cases have no verdict: the chips could not be" in summarize(
            [first, second], MACHINE
        )


def test_verdicts_are_stored_while_other_cases_still_run(monkeypatch, empty_cache):
    plain, fused = timed("none", None).case, timed("fused", None).case
    measured = {"errors": {"y": 0.0}, "tolerance": 1e-2}
    found = []

    def run_cases(cases, setup):
        for seconds in (2e-3, 3e-3):
            yield {"measurement": measured | {"timing": {"seconds": seconds}}}
        found.append(trust.known("v5e").verdict(trust.key(fused.op, "fused", 8)))
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_command, "run_cases", run_cases)
    with trust.trusting("verified"), pytest.raises(KeyboardInterrupt):
        verify_command.verify(
            [plain, fused], MACHINE | {"kind": "TPU v5 lite"}, child.Setup(), quick=True
        )
    assert found == ["SLOWER"]


def test_cases_that_were_not_run_are_not_stored_and_end_with_status_2(monkeypatch):
    case = timed("fused", None).case
    assert record_verdicts([CaseResult(case, Verdict.NOT_RUN)], MACHINE) is None
    machine = MACHINE | {"platform": "cpu", "kind": "", "versions": {}}
    monkeypatch.setattr(verify_command, "describe", lambda setup: machine)
    monkeypatch.setattr(
        verify_command, "verify", lambda *args, **options: [CaseResult(case, Verdict.NOT_RUN)]
    )
    assert main([]) == 2


@pytest.mark.parametrize(
    ("serve", "limit", "message"),
    [
        (
            faulty_child.be_of_two_hosts,
            60,
            "these are the chips of 2 hosts: verify the chips of one host: set "
            "TPU_PROCESS_BOUNDS=1,1,1 and TPU_CHIPS_PER_PROCESS_BOUNDS to its chips",
        ),
        (
            faulty_child.sleep,
            0.1,
            "it did not answer in time; on a pod, verify the chips of one host: set ",
        ),
    ],
)
def test_the_chips_of_several_hosts_are_verified_on_one(serve, limit, message, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "START_LIMIT", limit)
    assert main([], serve=serve) == 2
    assert message in capsys.readouterr().err


PARENT = """
import functools, sys, time
from flaxasync.verify.child import Setup
from flaxasync.verify.supervisor import _Child
from tests.verify.faulty_child import live_on
child = _Child(Setup(serve=functools.partial(live_on, sys.argv[1])), [])
time.sleep(600)
"""


@pytest.mark.slow
def test_a_child_ends_with_its_parent(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        subprocess.Popen([sys.executable, "-c", PARENT, str(pipe)]) as parent,
        pipe.open() as child,
    ):
        parent.kill()
        assert child.read() == ""  # the pipe ends with the child


@pytest.mark.slow
def test_a_quick_run_passes_on_this_machine(tmp_path, capsys):
    file = tmp_path / "verdicts.json"
    assert main(["--quick", "--platform", "cpu", "--json", str(file)]) == 0, capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert {r["verdict"] for r in results} == {"PASS", "NOT SUPPORTED"}
    passed = [r["case"] for r in results if r["case"]["simulate"] and r["verdict"] == "PASS"]
    in_8_bits = {(op, kind) for op in cases.MATMULS for kind in ("int8", "fp8")}
    others = *cases.MATMULS, "mesh_matmul", "attention", "expert_products"
    assert {(case["op"], case["quantization"]) for case in passed} == in_8_bits | {
        (op, None) for op in others
    }
    assert {case["quantization"] for case in passed if case["keeps"]} == {"int8", "fp8"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--json /dev/null/verdicts.json", "error: --json cannot be written: "),
        (
            "--quick --platform gpu",
            "error: the devices could not be opened: ended with code 1; its last words:",
        ),
        (
            "--ops matmul",
            "error: --ops got 'matmul': it must be OP or OP/BACKEND of ",
        ),
        (
            "--ops attention/fused",
            "error: --ops got 'attention/fused': it must be OP or OP/BACKEND of ",
        ),
        (
            "--rehearse v5e:3x5",
            "error: topology must be one that libtpu describes, like 'v5e:2x4', or GPUs, like 'h100:8': "
            "got 'v5e:3x5'",
        ),
    ],
)
def test_what_cannot_be_verified_is_said_before_anything_runs(options, message, capsys):
    assert main(options.split()) == 2
    assert message in capsys.readouterr().err


def timed(backend, seconds, op="all_gather_matmul", **options):
    shapes = ((2, 1024, 4096), (4096, 4096))
    return CaseResult(
        cases.Case(op, backend, (8,), shapes, **options), Verdict.PASS, seconds=seconds
    )


def test_a_backend_that_loses_to_the_plain_one_is_slower_on_tpus_alone():
    """`plan` predicts "fused" to win at this shape; test_what_follows.py has every case on TPUs."""
    for machine, verdict in (
        (MACHINE, Verdict.SLOWER),
        (MACHINE | {"platform": "cpu", "chip": None}, Verdict.PASS),
    ):
        plain, fused = compare_times([timed("none", 2e-3), timed("fused", 3e-3)], machine)
        assert (plain.verdict, fused.verdict, fused.plain) == (Verdict.PASS, verdict, 2e-3)


def test_the_summary_tells_kernels_that_calls_avoid_from_plain_xla_that_they_still_take():
    results = [
        dataclasses.replace(timed(name, None), verdict=Verdict.WRONG) for name in ("fused", "none")
    ]
    assert summarize(results, MACHINE).splitlines()[1:] == [
        "Do not use here: all_gather_matmul/fused. A call without a backend does not take them.",
        "Do not use here: all_gather_matmul/none. This is plain XLA, which calls still take: name "
        "another backend.",
        "Please open an issue and attach the file that --json writes.",
    ]


def test_references_of_ring_attention_multiply_blocks_without_the_flash_kernel(monkeypatch):
    monkeypatch.setenv("FLAXASYNC_VERIFIED", "all")
    case = next(c for c in every_case("tpu", 8) if (c.op, c.backend) == ("ring_attention", "xla"))
    assert case.takes_flash
    mesh = programs.make_mesh(case, fa.check.topology_devices("v5e:2x4"))
    with jax.set_mesh(mesh):
        arguments = programs.abstract_arguments(case, mesh)
        texts = [
            str(jax.make_jaxpr(programs.make_program(case, reference=r))(*arguments))
            for r in (False, True)
        ]
    assert ["pallas_call" in text for text in texts] == [True, False]


def test_a_deviation_within_the_tolerance_passes_and_one_above_is_wrong():
    case = timed("xla", None).case
    outcome = {
        "measurement": {"errors": {"y": 1e-6, "dx": 3e-5}, "tolerance": 1e-5, "timing": None}
    }
    wrong = judge(outcome, case)
    assert (wrong.verdict, wrong.reason[:34]) == (
        Verdict.WRONG,
        "differs from the reference: dx by ",
    )
    assert (
        judge({"measurement": outcome["measurement"] | {"tolerance": 1e-4}}, case).verdict
        is Verdict.PASS
    )
    assert judge({"error": "XlaRuntimeError: RACE DETECTED"}, case).verdict is Verdict.WRONG
    assert judge({"error": "RuntimeError: TRACEBACK"}, case).verdict is Verdict.CRASHED
    assert judge({"unsupported": "needs squares"}, case).verdict is Verdict.UNSUPPORTED


def test_the_description_of_a_chip_that_is_not_in_the_table_says_what_is_unknown():
    machine = MACHINE | {"kind": "TPU v9", "chip": None, "ring": "ring: closed", "versions": {}}
    assert "'TPU v9' is not in the table of chips" in describe_in_words(machine)


def test_device_time_is_read_from_a_profile(monkeypatch):
    """The path of accelerators, on CPU devices: their instructions are in the profile, too."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    product = jax.jit(lambda x: x @ x)
    x = jnp.ones((256, 256))
    timing = measure.time_program(lambda: product(x), "jit_", runs=3)
    assert timing.clock == "device"
    assert 0 < timing.seconds < 1
    assert sum(timing.phases.values()) > 0
