"""Tests of train/step/verify.py: what a run verifies before it opens the chips, when, and what
follows.
"""

import dataclasses
import importlib
import types

import jax
import pytest

import flaxasync as fa
from flaxasync.hardware import CHIPS
from flaxasync.ops import trust
from flaxasync.verify import programs
from flaxasync.verify.child import Setup, serve
from flaxasync.verify.supervisor import MachineError
from flaxasync.verify.verdict import CaseResult, Verdict
from models.config import TransformerConfig
from tests.verify.sparing_child import without_values
from tests.verify.test_what_follows import follow, machine_of
from train.lifecycle.errors import InputError
from train.lifecycle.preparation import agree_on_kernels
from train.step import flags as flags_module
from train.step import verify as verify_module
from train.step.flags import may_have_tpus
from train.step.mesh import CONTEXT, FSDP, infer_sizes
from train.step.verify import cases_of, verify_first

PRESETS = (
    "tiny",
    "gpt2_124m",
    "llama_8b",
    "llama_70b",
    "long_context",
    "tiny_moe",
    "qwen3_30b_a3b",
    "mixtral_8x7b",
)
MACHINE = {"platform": "tpu", "chip": "v5e", "kind": "TPU v5 lite", "devices": 8, "rehearsal": None}


def preset(name):
    return getattr(importlib.import_module(f"configs.{name}"), name)()


@pytest.fixture
def config(config, replace):
    model = TransformerConfig(
        vocab_size=256, width=1024, heads=8, kv_heads=4, mlp_width=2048, dtype="bfloat16"
    )
    config = replace(config, mesh={"platform": "tpu"}, data={"sequence_length": 1024})
    return dataclasses.replace(config, model=model)


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """A machine with eight v5e: the cases of each run, and the verdict that all of them get, but
    for some backends.
    """
    ran = types.SimpleNamespace(runs=[], verdict=Verdict.PASS, verdicts={})

    def verify(cases, machine, setup):
        ran.runs.append(cases)
        return [CaseResult(case, ran.verdicts.get(case.backend, ran.verdict)) for case in cases]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setattr(verify_module, "describe", lambda setup: MACHINE)
    monkeypatch.setattr(verify_module, "verify", verify)
    trust.say_once.cache_clear()
    return ran


def test_the_cases_are_the_kernels_and_shapes_of_the_configuration(config):
    cases = cases_of(config, {"data": 2, "model": 4})
    shapes = {(case.op, case.shapes) for case in cases}
    # query, key and value: (8 + 2 * 4) * 128 / 4
    assert ("all_gather_matmul", ((4, 256, 1024), (1024, 512))) in shapes
    assert ("all_gather_matmul", ((4, 256, 1024), (1024, 1024))) in shapes  # gate and up
    assert ("matmul_reduce_scatter", ((4, 1024, 512), (512, 1024))) in shapes
    assert ("attention", ((4, 1024, 2, 128), (4, 1024, 1, 128))) in shapes
    # one sequence of them, all heads of the rows of a device
    assert ("all_to_all", ((4 * 512, 256),)) in shapes
    assert {case.backend for case in cases} == {
        "none",
        "xla",
        "pallas",
        "fused",
        "reference",
        "flash",
    }
    for case in cases:
        mesh = programs.make_mesh(
            case, fa.check.topology_devices("v5e:2x2" if case.devices == 4 else "v5e:1x1")
        )
        with jax.set_mesh(mesh):
            jax.eval_shape(programs.make_program(case), *programs.abstract_arguments(case, mesh))


def test_products_in_eight_bits_are_verified_in_the_types_of_both_passes(config, replace):
    def eight_bits(**model):
        found = cases_of(replace(config, model=model), {"data": 2, "model": 4})
        return {(case.backend, case.quantization) for case in found if case.quantization}

    assert eight_bits() == set()
    assert eight_bits(quantization="int8") == {("none", "int8"), ("fused", "int8")}
    assert {kind for _, kind in eight_bits(quantization="int8", quantization_backward="fp8")} == {
        "int8",
        "fp8",
    }


def test_the_cases_have_the_heads_that_a_device_computes(config, replace):
    """Two devices share a key-value head, and six query heads are padded to eight."""
    shapes = {
        (case.op, case.shapes)
        for case in cases_of(
            replace(config, model={"width": 768, "heads": 6, "kv_heads": 2}),
            {"data": 2, "model": 4},
        )
    }
    width, head = 768, 128
    # 2 + 2 * 1 heads a device
    assert ("all_gather_matmul", ((4, 256, width), (width, 4 * head))) in shapes
    assert ("attention", ((4, 1024, 2, head), (4, 1024, 1, head))) in shapes


def test_a_run_verifies_each_shape_once(config, ran, replace, capsys, monkeypatch):
    monkeypatch.setattr(
        jax,
        "process_index",
        lambda: pytest.fail("this process opened the chips before its children"),
    )
    verify_first(config, "auto")
    verify_first(config, "auto")
    assert len(ran.runs) == 1
    assert (
        "verify     16 cases on TPU v5 lite, once; --verify off skips this"
        in capsys.readouterr().out
    )
    verify_first(replace(config, data={"batch_size": 16}), "auto")
    assert len(ran.runs) == 2


def test_a_kernel_that_cannot_serve_the_shapes_is_not_verified(config, ran, replace):
    """A refusal is no verdict, so that it would be asked for before each run."""
    # head size 16
    config = replace(config, mesh={"data": 8, "model": 1}, model={"heads": 64, "kv_heads": 64})
    assert cases_of(config, {"data": 8, "model": 1}) == []
    verify_first(config, "auto")
    assert ran.runs == []


def test_a_context_axis_verifies_the_ring_of_attention(config, replace):
    cases = cases_of(config, {"data": 1, "context": 2, "model": 4})
    rings = [case for case in cases if case.op == "ring_attention"]
    assert [(case.backend, case.mesh, case.shapes[0]) for case in rings] == [
        ("none", (2,), (8, 512, 2, 128)), ("pallas", (2,), (8, 512, 2, 128))
    ]  # fmt: skip


def test_an_fsdp_axis_verifies_what_moves_weights_unless_another_form_is_named(config, replace):
    def prefetching(**model):
        cases = cases_of(replace(config, model=model), {"data": 1, FSDP: 2, "model": 4})
        return [(case.backend, case.mesh, case.shapes) for case in cases if case.op == "prefetch"]

    assert prefetching() == [(name, (2,), ((512, 512),)) for name in ("xla", "pallas")]
    assert prefetching(fsdp_overlap="prefetch_pallas") == prefetching()
    assert prefetching(fsdp_overlap="xla") == []
    assert prefetching(width=128 * 9) == []  # not in whole tiles


def test_a_size_that_is_inferred_is_inferred_from_the_chips(config, ran, replace):
    for _ in range(2):
        verify_first(replace(config, mesh={"data": -1}), "auto")
    assert ran.runs == [cases_of(config, {"data": 2, "model": 4})], "once"


def test_nothing_is_verified_where_that_is_not_wanted_or_there_are_no_tpus(
    config, ran, replace, monkeypatch
):
    verify_first(config, "off")
    verify_first(replace(config, mesh={"platform": "cpu"}), "auto")
    # JAX_PLATFORMS is cpu in tests
    verify_first(replace(config, mesh={"platform": "auto"}), "auto")
    monkeypatch.setenv(trust.VARIABLE, "all")
    verify_first(config, "auto")
    assert ran.runs == []


def test_a_run_of_several_processes_says_which_command_verifies_its_kernels(ran, capsys):
    with (
        jax.set_mesh(fa.check.topology_mesh("v5e:4x4", (16,), ("model",))),
        trust.trusting("verified"),
    ):
        agree_on_kernels()
        assert (
            "verify     no kernel has passed on the host of process 0; `python -m "
            "flaxasync.verify` there, before the run, verifies them; docs/tpu.md says how on a pod"
        ) in capsys.readouterr().out
        trust.record(trust.Machine.here("v5e"), {"attention/flash": {"a case": "PASS"}})
        agree_on_kernels()
    agree_on_kernels()  # no TPUs
    assert capsys.readouterr().out == ""


def test_a_kernel_that_nobody_named_and_that_failed_is_not_verified_again(config, ran):
    """A run that names a backend takes what is trusted for all else."""
    named = dataclasses.replace(config, backend="fused")
    ran.verdicts["flash"] = Verdict.WRONG
    verify_first(named, "auto")
    verify_first(named, "auto")
    assert len(ran.runs) == 1


def test_the_weights_of_a_dense_model_are_those_of_its_mlp(config, replace):
    dense = replace(config, model={"expert_width": 64})
    sizes = {"data": 1, FSDP: 2, "model": 4}
    assert cases_of(dense, sizes) == cases_of(config, sizes)


def test_a_named_form_that_fails_ends_the_run_and_auto_goes_on(config, ran, replace):
    ran.verdict = Verdict.WRONG
    verify_first(config, "auto")
    verify_first(config, "auto")
    assert len(ran.runs) == 1, "what failed is not taken, so it need not be verified again"
    with pytest.raises(
        InputError, match=r"backend=fused fails on this machine: .* WRONG, .*--backend auto"
    ):
        verify_first(dataclasses.replace(config, backend="fused"), "auto")
    assert len(ran.runs) == 2
    sharded = replace(config, mesh={"data": 1, "fsdp": 8, "model": 1})
    # no op of theirs has a ring
    verify_first(dataclasses.replace(sharded, backend="pallas"), "auto")
    sharded = replace(sharded, model={"fsdp_overlap": "prefetch_pallas"})
    with pytest.raises(
        InputError,
        match=r"model.fsdp_overlap=prefetch_pallas fails on this machine: WRONG; leave it",
    ):
        verify_first(sharded, "auto")


def test_devices_that_cannot_be_opened_end_the_run(config, ran, monkeypatch):
    def fail(setup):
        raise MachineError("it died")

    monkeypatch.setattr(verify_module, "describe", fail)
    with pytest.raises(
        InputError, match="the TPU could not be verified: it died; --verify off skips this"
    ):
        verify_first(config, "auto")


def test_a_machine_without_a_tpu_is_one_sentence(config, ran, monkeypatch):
    """The child that looks for the chips ends with a traceback, whose last line is what JAX
    says.
    """
    says = (
        "Unable to initialize backend 'tpu': NOT_FOUND: No device found. (set JAX_PLATFORMS='' to "
        "choose another)"
    )

    def fail(setup):
        raise MachineError(
            "the devices could not be opened: Traceback (most recent call last):\nRuntimeError: "
            f"{says}"
        )

    monkeypatch.setattr(verify_module, "describe", fail)
    with pytest.raises(InputError) as raised:
        verify_first(config, "auto")
    assert str(raised.value) == (
        "mesh.platform=tpu has no devices here (Unable to initialize backend 'tpu': NOT_FOUND: No "
        "device found); use --mesh.platform cpu, or plan with --dry-run --topology v5e:2x4"
    )


def test_chips_are_looked_for_without_opening_them(config, replace, monkeypatch):
    auto = replace(config, mesh={"platform": "auto"})
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    monkeypatch.setattr(
        flags_module.glob, "glob", lambda pattern: ["/dev/accel0"] if "accel" in pattern else []
    )
    assert may_have_tpus(auto)
    monkeypatch.setattr(flags_module.glob, "glob", lambda pattern: [])
    assert not may_have_tpus(auto)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not may_have_tpus(auto)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", PRESETS)
def test_the_cases_of_every_preset_go_through_all_that_follows_a_measurement(
    name, chip, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    config = preset(name)
    mesh = config.mesh
    sizes = {"data": mesh.data, FSDP: mesh.fsdp, CONTEXT: mesh.context, "model": mesh.model}
    follow(cases_of(config, infer_sizes(sizes, 8)), machine_of(chip, 8))


@pytest.fixture
def as_on_chips(empty_cache, monkeypatch):
    """Makes a rehearsal store its verdicts, as a run on chips does, in a folder of the test."""
    describe = verify_module.describe
    monkeypatch.setattr(
        verify_module, "describe", lambda setup: describe(setup) | {"rehearsal": None}
    )


def rehearse(config, capsys, serve=serve):
    """Rehearses the check before a run on eight v5e, and shows that the next run need not verify;
    returns its lines.
    """
    setup = Setup(rehearse="v5e:2x4", serve=serve)
    verify_first(config, "auto", setup=setup)
    first, *lines, last = capsys.readouterr().out.splitlines()
    verify_first(config, "auto", setup=setup)
    assert capsys.readouterr().out == "", "the next run verifies nothing"
    assert first == f"verify     {len(lines)} cases on TPU v5 lite, once; --verify off skips this"
    assert last.startswith("verify     the verdicts are in ")
    return lines


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_chips")
def test_the_check_before_a_run_is_rehearsed_and_the_next_run_reads_its_verdicts(
    config, replace, capsys
):
    config = replace(
        config, mesh={"data": 8, "model": 1}, data={"sequence_length": 128, "batch_size": 8}
    )
    lines = rehearse(replace(config, model={"width": 256, "heads": 2, "kv_heads": 1}), capsys)
    assert [line.split()[:3] for line in lines] == [
        ["PASS", "attention", "reference"],
        ["PASS", "attention", "flash"],
    ]
    assert all(line.endswith(" ms") for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_chips")
def test_the_check_before_a_run_of_a_preset(replace, capsys):
    """Mesh, options and sizes are those of the preset; sequences are short.

    The values of a rehearsal are those of a small case, whatever the preset:
    tests/verify/test_verify.py compares them.
    """
    short = {"sequence_length": 512, "batch_size": 8}
    config = replace(preset("tiny_moe"), mesh={"platform": "tpu"}, data=short)
    lines = rehearse(config, capsys, without_values)
    mesh = config.mesh
    sizes = {"data": mesh.data, FSDP: mesh.fsdp, CONTEXT: mesh.context, "model": mesh.model}
    cases = cases_of(config, infer_sizes(sizes, 8))
    assert len(lines) == len(cases)
    assert not any(line.startswith(("WRONG", "HUNG", "CRASHED")) for line in lines)
    passed = [line for line in lines if line.startswith("PASS")]
    assert any(" ms" in line for line in passed)
    assert all(" ms" in line or "no time: " in line for line in passed)
