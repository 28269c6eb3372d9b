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
from flaxasync.verify import cases, child, measure, programs, supervisor, verdict
from flaxasync.verify.__main__ import describe_in_words, main, record_verdicts
from flaxasync.verify.verdict import CaseResult, Verdict, failed, judge, summarize
from tests.verify import faulty_child

MACHINE = {"platform": "tpu", "chip": "v5e", "devices": 8, "rehearsal": None}


def every_case(platform, devices, quick=True):
    return cases.list_cases(platform, devices, quick=quick)


@pytest.mark.parametrize(
    ("platform", "devices"), [("cpu", 4), ("gpu", 1), ("tpu", 1), ("tpu", 4), ("tpu", 8)]
)
def test_every_op_and_every_backend_is_listed_on_every_machine(platform, devices):
    listed = {(case.op, case.backend) for case in every_case(platform, devices)}
    assert listed == {(op, backend) for op, names in cases.BACKENDS.items() for backend in names}


def test_a_tpu_runs_everything_and_a_gpu_what_is_no_tpu_kernel():
    assert all(cases.unsupported(case, "tpu") is None for case in every_case("tpu", 8))
    runs = {case.backend for case in every_case("gpu", 4) if cases.unsupported(case, "gpu") is None}
    assert runs == {"none", "xla", "reference", "exchange"}


def test_one_device_runs_all_but_what_only_moves_data():
    lacking = {case.op for case in every_case("tpu", 1) if cases.unsupported(case, "tpu")}
    assert lacking == {"ppermute", "all_to_all", "prefetch"}


def test_the_plain_backend_is_measured_beside_every_backend_that_is_chosen():
    plain = {
        "matmul_reduce_scatter/fused": "none",
        "attention/flash": "reference",
        "ppermute/pallas": "xla",
    }
    listed = cases.list_cases("tpu", 8, quick=True, only=list(plain))
    beside = {f"{name.partition('/')[0]}/{backend}" for name, backend in plain.items()}
    assert {f"{case.op}/{case.backend}" for case in listed} == {*plain} | beside


@pytest.mark.parametrize("quick", [True, False])
def test_each_direction_is_verified_in_each_type(quick):
    found = [
        (c.directions, c.quantization, c.keeps)
        for c in every_case("tpu", 8, quick)
        if (c.op, c.backend) == ("all_gather_matmul", "fused")
    ]
    types = (None, False), ("int8", False), ("fp8", False), ("int8", True), ("fp8", True)
    assert sorted(found, key=str) == sorted(
        [(directions, *type_) for directions in (1, 2) for type_ in types], key=str
    )


def test_the_matmuls_are_verified_in_eight_bits():
    listed = every_case("tpu", 8)
    found = {(case.op, case.backend, case.quantization) for case in listed if case.quantization}
    assert found == set(itertools.product(cases.MATMULS, ("none", "fused"), ("int8", "fp8")))


@pytest.mark.slow
def test_a_kernel_in_eight_bits_is_compared_with_the_plain_backend_and_that_with_what_is_not_rounded(
    monkeypatch,
):
    """What is not rounded differs by more than kernels may, and by less than the plain backend
    may.
    """
    plain = cases.list_cases("cpu", 4, quick=True, only=["all_gather_matmul/fused"])[1]
    kernel = dataclasses.replace(plain, backend="xla")  # which runs here without a simulator
    assert (plain.quantization, verdict.tolerance(plain), verdict.tolerance(kernel)) == (
        "int8",
        0.05,
        1e-5,
    )
    errors = [max(measure.run_case(case).errors.values()) for case in (plain, kernel)]
    assert errors[1] <= 1e-5 < 1e-3 < errors[0] <= 0.05
    swapped = dataclasses.replace(plain, quantization="fp8")
    monkeypatch.setattr(programs, "make_reference", lambda case: programs.make_program(swapped))
    assert max(measure.run_case(kernel).errors.values()) > 1e-3


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=pytest.mark.slow if case.is_pair or case.quantization else [], id=case.label
        )
        # both numbers of directions, and both of these backends, have the same shapes
        for case in every_case("tpu", 8)
        if case.directions != 1 and case.backend != "stateful" and case.quantization != "fp8"
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
        wanted = jax.eval_shape(programs.make_reference(case), *arguments)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), results) == jax.tree.map(
        lambda a: (a.shape, a.dtype), wanted
    )


def test_inputs_are_random():
    case = next(c for c in every_case("cpu", 4) if c.op == "all_gather_matmul")
    mesh = programs.make_mesh(case)
    with jax.set_mesh(mesh):
        arguments = programs.random_arguments(case, mesh)
    for array in arguments:
        assert len(np.unique(array)) > array.size / 2


@pytest.mark.parametrize("op", programs.EXPERTS)
def test_a_row_chooses_different_experts_and_all_are_chosen(op):
    case = next(c for c in every_case("cpu", 4) if c.op == op)
    mesh = programs.make_mesh(case)
    with jax.set_mesh(mesh):
        ids, gate = map(np.asarray, programs.random_arguments(case, mesh)[1:4:2])
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert set(ids.flat) == set(range(len(gate)))


def test_a_program_runs_several_times_without_a_wait_and_each_result_is_compared(monkeypatch):
    (case,) = [
        c
        for c in every_case("cpu", 4)
        if (c.op, c.backend, c.directions) == ("matmul_all_reduce", "xla", 2)
    ]
    make_program, deviation, compared, runs = programs.make_program, measure.deviation, [], []

    def make(of):
        program = make_program(of)

        def counted(*arguments):
            runs.append(len(compared))
            result = program(*arguments)
            return result | {"y": result["y"] + 1.0} if len(runs) == 5 else result

        return counted if of == case else program

    def compare(*both):
        compared.append(both)
        return deviation(*both)

    monkeypatch.setattr(measure, "deviation", compare)
    monkeypatch.setattr(programs, "make_program", make)
    result = measure.run_case(case)
    assert runs == [0] * measure.BACK_TO_BACK
    assert len(compared) == 3 * measure.BACK_TO_BACK  # y, dx and dw
    assert (result.verdict, result.errors["y"] > 1e-3) == (Verdict.WRONG, True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_result_that_is_not_finite_is_as_wrong_as_json_can_say(value):
    found = measure.deviation(np.array([1, value, 1, 1]), np.ones(4))
    assert found == sys.float_info.max
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert measure.deviation(np.ones(4), np.ones(4)) == 0.0


def in_one_direction(*arguments, **options):
    return [case for case in cases.list_cases(*arguments, **options) if case.directions != 1]


@pytest.mark.slow
def test_planted_faults_are_reported_and_the_other_cases_still_run(capsys, tmp_path, monkeypatch):
    setup = functools.partial(child.Setup, limit=30, serve=faulty_child.serve)
    monkeypatch.setattr(verify_command, "Setup", setup)
    monkeypatch.setattr(verify_command, "list_cases", in_one_direction)
    file = tmp_path / "verdicts.json"
    faulty = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "ring_attention"
    ops = ",".join([*(f"{op}/xla" for op in faulty), "ppermute/xla"])
    options = ["--quick", "--ops", ops, "--json", str(file)]
    assert main(options) == 1
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
    assert reasons["matmul_reduce_scatter"].startswith("did not answer within 30 s and was ended")
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
    assert "still plain XLA (none, xla, reference): name another backend." in out


@pytest.mark.slow
@pytest.mark.parametrize(("works_at", "expected"), [(3, Verdict.UNSUPPORTED), (9, Verdict.NOT_RUN)])
def test_chips_that_cannot_be_opened_after_a_hang_are_tried_again_and_the_rest_has_no_verdict(
    tmp_path, monkeypatch, works_at, expected
):
    monkeypatch.setattr(supervisor, "PAUSES", (0.1, 0.1))
    opened = tmp_path / "opened"
    serve = functools.partial(faulty_child.open_once, opened, works_at)
    pair = every_case("cpu", 4)[:2]
    first, second = supervisor.run_cases(pair, child.Setup(limit=2, serve=serve))
    assert (first.case, second.case) == tuple(pair)
    assert (first.verdict, second.verdict) == (Verdict.HUNG, expected)
    assert opened.stat().st_size == (3 if expected is Verdict.UNSUPPORTED else 4)
    if expected is Verdict.NOT_RUN:
        assert second.reason == (
            "the chips could not be opened again; end the process that holds them and run again "
            "(ended with code 1; its last words: the chips are in use)"
        )
        assert second.reason in summarize([first, second], MACHINE)


def test_verdicts_are_stored_while_other_cases_still_run(monkeypatch, empty_cache):
    plain, fused = timed("none", 2e-3), timed("fused", 3e-3)
    found = []

    def run_cases(cases, setup):
        yield from (plain, fused)
        known = trust.known("v5e")
        found.append(known.verdict(trust.key(fused.case.op, "fused", 8)))
        found.append(known.times)
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_command, "run_cases", run_cases)
    with trust.trusting("verified"), pytest.raises(KeyboardInterrupt):
        verify_command.verify([plain.case, fused.case], MACHINE, child.Setup())
    call = trust.call_key(fused.case.op, 8, fused.case.shapes, 2)
    assert found == ["PASS", {call: {"none": 2e-3, "fused": 3e-3}}]


def test_cases_that_were_not_run_are_not_stored_and_end_with_status_2(monkeypatch):
    case = timed("fused", None).case
    assert record_verdicts([CaseResult(case, Verdict.NOT_RUN)], MACHINE) is None
    machine = MACHINE | {"platform": "cpu", "kind": "", "versions": {}}
    monkeypatch.setattr(verify_command, "describe", lambda setup: machine)
    monkeypatch.setattr(verify_command, "verify", lambda *args: [CaseResult(case, Verdict.NOT_RUN)])
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
            "did not answer within 0.1 s and was ended; on a pod, verify the chips of one host: "
            "set ",
        ),
    ],
)
def test_the_chips_of_several_hosts_are_verified_on_one(serve, limit, message, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "START_LIMIT", limit)
    setup = functools.partial(child.Setup, serve=serve)
    monkeypatch.setattr(verify_command, "Setup", setup)
    assert main([]) == 2
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


# The direction of the fused kernels that are simulated, for each type of 8 bits: one takes long.
SIMULATED = {None: 2, "int8": 1, "fp8": 2}


def few_cases(*arguments, **options):
    return [
        case
        for case in cases.list_cases(*arguments, **options)
        if case.backend != "fused" or case.directions in (None, SIMULATED[case.quantization])
    ]


@pytest.mark.slow
def test_a_quick_run_passes_on_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify_command, "list_cases", few_cases)
    file = tmp_path / "verdicts.json"
    assert main(["--quick", "--json", str(file)]) == 0, capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert {r["verdict"] for r in results} == {"PASS", "NOT SUPPORTED"}
    passed = [r["case"] for r in results if r["verdict"] == "PASS"]
    assert all(r["errors"] for r in results if r["verdict"] == "PASS")
    assert {(case["op"], case["backend"]) for case in passed} == {
        (case.op, case.backend)
        for case in every_case("cpu", 4)
        if cases.unsupported(case, "cpu") is None
    }
    assert {case["backend"] for case in passed if case["op"] == "expert_mlp"} >= {"exchange"}
    fused = [case for case in passed if case["backend"] == "fused"]
    assert {(case["op"], case["quantization"]) for case in fused} == {
        ("mesh_matmul", None),
        *itertools.product(cases.MATMULS, (None, "int8", "fp8")),
    }
    assert {case["quantization"] for case in fused if case["keeps"]} == {"int8", "fp8"}
    for op in cases.MATMULS:
        assert {case["directions"] for case in fused if case["op"] == op} == {1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--json /dev/null/verdicts.json", "error: --json cannot be written: "),
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


def test_devices_that_cannot_be_opened_are_said_with_the_last_words_of_their_process(
    capsys, monkeypatch
):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main([]) == 2
    message = "error: the devices could not be opened: ended with code 1; its last words:"
    assert message in capsys.readouterr().err


def timed(backend, seconds, op="all_gather_matmul"):
    shapes = ((2, 1024, 4096), (4096, 4096))
    return CaseResult(cases.Case(op, backend, (8,), shapes), Verdict.PASS, seconds=seconds)


def test_the_summary_says_what_not_to_use():
    results = [
        dataclasses.replace(timed(name, None), verdict=Verdict.WRONG) for name in ("fused", "none")
    ]
    assert summarize(results, MACHINE).splitlines()[:2] == [
        "2 WRONG",
        "Do not use here: all_gather_matmul/fused, all_gather_matmul/none. Calls without a backend "
        "take none of these kernels, but still plain XLA (none, xla, reference): name another "
        "backend. Please open an issue and attach the file that --json writes.",
    ]


def test_ring_attention_multiplies_blocks_with_the_flash_kernel_where_its_verdict_counts_for_that(
    monkeypatch,
):
    monkeypatch.setenv("FLAXASYNC_VERIFIED", "all")
    case = next(c for c in every_case("tpu", 8) if (c.op, c.backend) == ("ring_attention", "xla"))
    assert trust.key("attention", "flash", 1) in case.verified
    mesh = programs.make_mesh(case, fa.check.topology_devices("v5e:2x4"))
    with jax.set_mesh(mesh):
        arguments = programs.abstract_arguments(case, mesh)
        texts = [
            str(jax.make_jaxpr(make(case))(*arguments))
            for make in (programs.make_program, programs.make_reference)
        ]
    assert ["pallas_call" in text for text in texts] == [True, False]


@pytest.mark.parametrize("op", ["attention", "expert_products"])
def test_the_plain_kernel_has_no_kernel_in_it_where_all_are_trusted(op, monkeypatch):
    monkeypatch.setenv("FLAXASYNC_VERIFIED", "all")
    case = next(c for c in every_case("tpu", 8) if (c.op, c.backend) == (op, "reference"))
    mesh = programs.make_mesh(case, fa.check.topology_devices("v5e:2x4"))
    with jax.set_mesh(mesh):
        arguments = programs.abstract_arguments(case, mesh)
        assert "pallas_call" not in str(jax.make_jaxpr(programs.make_program(case))(*arguments))


@pytest.mark.parametrize(("devices", "topology"), [(1, "v5e:1x1"), (8, "v5e:2x4")])
def test_nothing_is_compared_with_itself(devices, topology, monkeypatch):
    """The reference has no op on local shards and no kernel in it, but for a kernel in 8 bits."""
    monkeypatch.setenv("FLAXASYNC_VERIFIED", "all")
    # a v5e has no fp8
    for case in [case for case in every_case("tpu", devices) if case.quantization != "fp8"]:
        if cases.unsupported(case, "tpu") is not None:
            continue
        mesh = programs.make_mesh(case, fa.check.topology_devices(topology))
        with jax.set_mesh(mesh):
            arguments = programs.abstract_arguments(case, mesh)
            text = str(jax.make_jaxpr(programs.make_reference(case))(*arguments))
        in_8_bits = case.quantization is not None and case.is_kernel
        assert ("shard_map" in text) == in_8_bits, case.label
        assert "pallas_call" not in text, case.label


def test_a_device_time_that_a_profile_lacks_is_said_and_a_program_is_compiled_once(monkeypatch):
    case = next(c for c in every_case("cpu", 4) if c.op == "ppermute")
    make_program, made = programs.make_program, []
    monkeypatch.setattr(programs, "make_program", lambda c: made.append(c) or make_program(c))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(measure, "device_seconds", lambda run, name: None)
    result = measure.run_case(case)
    assert made == [case]
    assert (result.verdict, result.seconds) == (Verdict.PASS, None)
    assert result.reason == "no time: the profile of the devices does not show the program"


def test_a_deviation_within_the_tolerance_passes_and_one_above_is_wrong():
    case = dataclasses.replace(timed("xla", None).case, dtype="float32")
    assert judge(case, {"y": 1e-6, "dx": 9e-6}).verdict is Verdict.PASS
    wrong = judge(case, {"y": 1e-6, "dx": 3e-5})
    assert (wrong.verdict, wrong.reason[:34]) == (
        Verdict.WRONG,
        "differs from the reference: dx by ",
    )
    assert judge(case, {"y": float("nan")}).verdict is Verdict.WRONG
    race = failed(case, RuntimeError("RACE DETECTED"))
    assert (race.verdict, race.reason) == (Verdict.WRONG, "RuntimeError: RACE DETECTED")
    assert failed(case, RuntimeError("TRACEBACK")).verdict is Verdict.CRASHED


def test_the_description_of_a_chip_that_is_not_in_the_table_says_what_is_unknown():
    machine = MACHINE | {"kind": "TPU v9", "chip": None, "ring": "ring: closed", "versions": {}}
    assert "'TPU v9' is not in the table of chips" in describe_in_words(machine)


def test_device_time_is_read_from_a_profile():
    """The path of accelerators, on CPU devices: their instructions are in the profile, too."""
    product = jax.jit(lambda x: x @ x)
    x = jnp.ones((256, 256))
    assert 0 < measure.device_seconds(lambda: product(x), "jit_") < 1
