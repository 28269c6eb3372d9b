"""What a call without a backend takes: a kernel that was verified here, or else plain XLA, said
once.
"""

import dataclasses
import json
import math
import os
import pathlib
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

import flaxasync as fa
from flaxasync.kernels.flash_attention import Flash
from flaxasync.ops import agreement, choose, trust
from flaxasync.ops.attention.api import _choose_kernel
from flaxasync.ops.attention.blocks import Reference
from flaxasync.verify.__main__ import record_verdicts
from flaxasync.verify.cases import Case
from flaxasync.verify.verdict import CaseResult, Verdict

SHAPES = [(256, 4096), (4096, 4096)]  # at which plan prefers "fused" on eight v5e
OP = "all_gather_matmul"
MACHINE = {"platform": "tpu", "chip": "v5e", "kind": "TPU v5 lite", "rehearsal": None}


@pytest.fixture(autouse=True)
def only_verified(empty_cache):
    """Calls trust only what was verified, as on a machine with a TPU."""
    trust.say_once.cache_clear()
    with trust.trusting("verified"):
        yield


@pytest.fixture
def v5e():
    with jax.set_mesh(fa.check.topology_mesh("v5e:2x4", (8,), ("model",))):
        yield trust.Machine.here("v5e")


def taken(backend=None):
    return choose.decide(OP, backend, shapes=SHAPES, ring=8).backend


def store(machine, verdict="PASS", name=f"{OP}/fused/3+", case="a case"):
    assert trust.record(machine, {name: {case: verdict}}) == machine.file


def test_an_unverified_kernel_is_not_taken_and_one_line_says_what_verifying_it_would_bring(
    v5e, caplog
):
    assert [taken(), taken()] == ["none", "none"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "flaxasync"]
    assert line.startswith(
        f"flaxasync: {OP} takes 'none' and not 'fused', which was not verified on v5e with libtpu "
    )
    assert "it is predicted to be 1." in line
    assert (
        "`python -m flaxasync.verify` verifies it; FLAXASYNC_VERIFIED=all, or naming it, takes it"
        in line
    )


def test_a_kernel_in_eight_bits_needs_a_verdict_of_its_own_beside_the_other(v5e, caplog):
    shapes = [(256, 4096), (4096, 1024)]  # at which plan prefers "fused" in 8 bits

    def taken_in_8_bits():
        return choose.decide(
            OP, None, shapes=shapes, ring=8, quantization=fa.Quantization("int8")
        ).backend

    store(v5e, name=f"{OP}/fused/3+/int8")
    assert taken_in_8_bits() == "none"
    store(v5e)
    assert taken_in_8_bits() == "fused"
    store(v5e, "WRONG", f"{OP}/fused/3+/int8", "another case")
    assert (taken_in_8_bits(), taken()) == ("none", "fused")
    lines = [record.getMessage() for record in caplog.records]
    assert "was not verified on v5e" in lines[0]
    assert "was WRONG on v5e" in lines[1]
    assert f"({OP}/fused/3+/int8)" in lines[1]


@pytest.mark.parametrize("verdict", ["WRONG", "HUNG", "CRASHED"])
def test_a_kernel_that_failed_one_case_is_not_taken_unless_it_is_named(v5e, verdict, caplog):
    store(v5e)
    assert (taken(), caplog.records) == ("fused", [])
    store(v5e, verdict, case="another case")
    assert taken() == "none"
    assert f"'fused', which was {verdict} on v5e" in caplog.text
    assert (taken("fused"), taken("pallas")) == ("fused", "pallas")
    store(v5e, case="another case")  # it passes later
    assert taken() == "fused"


@pytest.mark.parametrize(
    "changed", ["chip", "libtpu", "jax", "jaxlib", "flaxasync", "libtpu_options", "sources"]
)
def test_verdicts_of_another_machine_or_version_are_not_trusted(v5e, changed, caplog):
    store(v5e)
    content = json.loads(v5e.file.read_text())
    content["machine"][changed] = "another"
    v5e.file.write_text(json.dumps(content))
    assert [taken(), taken()] == ["none", "none"]
    assert caplog.text.count("they are of another machine or version, not of v5e with libtpu") == 1


def test_other_options_of_libtpu_and_other_sources_have_a_file_of_their_own(v5e, monkeypatch):
    store(v5e)
    assert taken() == "fused"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--an_option=true")
    assert taken() == "none"
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    monkeypatch.setattr(trust, "digest_of_sources", lambda: "another")
    assert taken() == "none"


def test_the_sources_of_kernels_ops_and_transports_are_in_the_digest():
    package = pathlib.Path(fa.__file__).parent
    found = {
        file.relative_to(package).parts[0]
        for pattern in trust.SOURCES
        for file in package.glob(pattern)
    }
    assert found == {"kernels", "ops", "transport", "ring.py"}


def test_without_a_version_of_libtpu_nothing_is_trusted(v5e, monkeypatch):
    monkeypatch.setattr(trust, "version", lambda package: "none" if package == "libtpu" else "1")
    store(trust.Machine.here("v5e"))
    assert taken() == "none"
    monkeypatch.setenv(trust.VARIABLE, str(trust.Machine.here("v5e").file))
    assert taken() == "fused"


@pytest.mark.parametrize(("text", "message"), [
    ("{", "Expecting property name"),
    ("[]", "they are not in format 3 of this version"),
    ('{"format": 1}', "they are not in format 3 of this version"),
    (None, "the file is damaged"),
    ("[" * 100_000, "is nested too deeply"),
    ('{"format": ' + "3" * 5000 + "}", "an integer has 5,000 digits"),
    (b'{"format": "\xff"}', "is not text in UTF-8: byte 12 is 0xff"),
    ({"verdicts": {f"{OP}/fused/3+": {"a case": None}}}, "the file is damaged"),
    ({"times": {"a call": {"fused": "1"}}}, "the file is damaged"),
    ({"times": {"a call": {"fused": math.nan}}}, "the file is damaged"),
])  # fmt: skip
def test_a_damaged_file_is_not_trusted_and_said_once(v5e, text, message, caplog):
    v5e.file.parent.mkdir(parents=True)
    whole = {"format": 3, "machine": vars(v5e), "verdicts": {f"{OP}/fused/3+": "PASS"}, "times": {}}
    if text is None:
        text = json.dumps(whole)
    elif isinstance(text, dict):
        text = json.dumps(whole | {"verdicts": {f"{OP}/fused/3+": {"a case": "PASS"}}} | text)
    v5e.file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert [taken(), taken()] == ["none", "none"]
    assert caplog.text.count(message) == 1
    assert str(v5e.file) in caplog.text


def test_a_row_without_cases_is_no_verdict(v5e):
    """A kernel of which no case ran has passed nothing."""
    store(v5e)
    content = json.loads(v5e.file.read_text())
    assert taken() == "fused"
    content["verdicts"] = {key: {} for key in content["verdicts"]}
    v5e.file.write_text(json.dumps(content))
    assert taken() == "none"
    trust.record(v5e, {"another": {}})
    assert json.loads(v5e.file.read_text())["verdicts"] == {}


def test_the_environment_overrides_the_stored_verdicts(v5e, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(trust.VARIABLE, "all")
    assert taken() == "fused"
    monkeypatch.delenv(trust.VARIABLE)
    store(v5e)
    monkeypatch.setenv(trust.VARIABLE, "none")
    assert taken() == "none"
    assert "'fused', which FLAXASYNC_VERIFIED=none excludes; it is predicted" in caplog.text
    assert "verifies it" not in caplog.text
    other = tmp_path / "other.json"
    monkeypatch.setenv(trust.VARIABLE, str(other))
    assert taken() == "none"
    assert (
        f"FLAXASYNC_VERIFIED names {other}, which does not exist: no kernel is trusted"
        in caplog.text
    )
    store(v5e)
    assert other.exists()
    assert taken() == "fused"


def test_a_named_file_of_another_machine_is_not_replaced(v5e, monkeypatch, tmp_path, caplog):
    named = tmp_path / "named.json"
    monkeypatch.setenv(trust.VARIABLE, str(named))
    store(v5e)
    assert named.stat().st_mode & 0o777 == 0o644  # others may read it
    before = named.read_text()
    assert trust.record(trust.Machine.here("v6e"), {f"{OP}/fused/3+": {"a case": "PASS"}}) is None
    assert named.read_text() == before
    assert f"{named}, which is not replaced, and no verdicts are stored" in caplog.text


def test_a_folder_that_cannot_be_written_is_said(v5e, monkeypatch, caplog):
    monkeypatch.setenv(trust.VARIABLE, "/dev/null/verified.json")
    assert trust.record(v5e, {f"{OP}/fused/3+": {"a case": "PASS"}}) is None
    assert "the verdicts cannot be stored, so these kernels stay untrusted" in caplog.text
    assert taken() == "none"


def test_where_no_tpu_is_attached_calls_take_what_is_predicted(v5e, monkeypatch):
    with trust.trusting(None):
        assert jax.default_backend() != "tpu"
        assert taken() == "fused"
        monkeypatch.setenv(trust.VARIABLE, "none")
        assert taken() == "none"
        monkeypatch.delenv(trust.VARIABLE)
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        assert taken() == "none"
    with trust.trusting("predicted"):
        assert taken() == "fused"


@pytest.fixture
def agreeing(monkeypatch):
    """Two processes of which both know what this one knows; returns how often they were asked."""
    asked = []

    def both(digests, known_here):
        asked.append(known_here)
        return np.stack([digests, digests]), known_here

    monkeypatch.setattr(trust, "_agreed", {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "exchange", both)
    return asked


def test_several_processes_trust_what_process_0_knows(v5e, agreeing, monkeypatch, caplog):
    assert taken() == "none"
    assert "'fused', which was not verified on v5e" in caplog.text
    assert "The file of process 0 counts, and the variable must be the same in every" in caplog.text
    of_first = {"rule": "stored", "verdicts": {f"{OP}/fused/3+": "PASS"}, "times": {}}
    monkeypatch.setattr(trust, "_agreed", {})
    monkeypatch.setattr(
        agreement,
        "exchange",
        lambda digests, known_here: (np.stack([digests, digests]), json.dumps(of_first)),
    )
    assert [taken(), taken()] == ["fused", "fused"]


def test_processes_that_differ_trust_nothing_and_say_in_what(v5e, monkeypatch, caplog):
    store(v5e)
    monkeypatch.setattr(trust, "_agreed", {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def another_libtpu_in_process_1(digests, known_here):
        of_all = np.stack([digests, digests])
        of_all[1, list(vars(v5e)).index("libtpu")] += 1
        return of_all, known_here

    monkeypatch.setattr(agreement, "exchange", another_libtpu_in_process_1)
    assert [taken(), taken()] == ["none", "none"]
    assert caplog.text.count("libtpu is not the same in process 0 and in process 1") == 1
    assert "'fused', which is not trusted because the processes differ" in caplog.text
    assert ". FLAXASYNC_VERIFIED=all, or naming it, takes it unverified. The file" in caplog.text
    assert "the variable must be the same in every process" in caplog.text


def test_an_error_of_the_processes_is_not_hidden(v5e, monkeypatch):
    def fail(digests, known_here):
        raise ZeroDivisionError("of the links")

    monkeypatch.setattr(trust, "_agreed", {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "exchange", fail)
    with pytest.raises(ZeroDivisionError, match="of the links"):
        taken()
    monkeypatch.setattr(agreement, "LIMIT", 0.1)
    monkeypatch.setattr(agreement, "exchange", lambda digests, known_here: time.sleep(1))
    with pytest.raises(RuntimeError, match=r"not all of them asked within 0\.1 s; call"):
        taken()


def test_several_processes_ask_nothing_about_chips_that_are_not_attached(
    v5e, agreeing, monkeypatch
):
    store(v5e)
    with trust.trusting("predicted"):
        assert trust.known("v5e").verdict(f"{OP}/fused/3+") == "PASS"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU v5 lite")])
    with trust.trusting(None):
        assert (trust.known("v6e").verdicts, agreeing) == ({}, [])
        found = trust.known("v5e").verdict(f"{OP}/fused/3+")
        assert (found, len(agreeing)) == ("PASS", 1)


def test_the_flash_kernel_needs_its_verdict_too(v5e, caplog):
    q = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)

    def kernel(name=None):
        kernels = []
        jax.eval_shape(
            jax.shard_map(
                lambda q: kernels.append(_choose_kernel("attention", name, q, 1024, 1024)) or q,
                in_specs=jax.P(),
                out_specs=jax.P(),
            ),
            q,
        )
        return type(kernels[0])

    assert kernel() == Reference
    assert (
        "attention takes 'reference' and not 'flash', which was not verified on v5e" in caplog.text
    )
    assert kernel("flash") == Flash
    store(v5e, name="attention/flash")
    assert kernel() == Flash


def test_a_plan_says_what_it_would_take_and_what_is_trusted():
    plan = fa.plan(OP, *SHAPES, chip="v5e", ring=8)
    assert (plan.backend, plan.trusted, plan.unverified) == ("fused", "none", ("pallas", "fused"))
    assert "a call without a backend takes 'none' until 'fused' is verified there" in str(plan)
    store(trust.Machine.here("v5e"))
    plan = fa.plan(OP, *SHAPES, chip="v5e", ring=8)
    assert (plan.backend, plan.trusted, plan.unverified) == ("fused", "fused", ("pallas",))
    assert "not verified here" in str(plan)


def test_what_a_killed_process_left_is_removed(v5e):
    store(v5e)
    old, new = (v5e.file.with_name(f".{v5e.file.name}.{name}.part") for name in ("old", "new"))
    for file, age in ((old, 7200), (new, 0)):
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    store(v5e)
    assert {file.name for file in v5e.file.parent.iterdir()} == {v5e.file.name, new.name}


def test_verify_stores_times_of_calls_without_other_options(v5e):
    def timed(seconds, backend="fused", **options):
        case = Case(OP, backend, (8,), tuple(SHAPES), **options)
        return CaseResult(case, Verdict.PASS, seconds=seconds)

    others = timed(0.5, directions=1), timed(0.5, quantization="int8"), timed(None)
    record_verdicts([timed(9.0), timed(1.0, backend="none"), *others], MACHINE)
    rehearsal = MACHINE | {"rehearsal": "v5e:2x4"}
    assert record_verdicts([timed(0.5)], rehearsal) is None
    assert trust.known("v5e").times == {
        trust.call_key(OP, 8, SHAPES, 2): {"fused": 9.0, "none": 1.0}
    }
    assert taken() == "none"


@pytest.mark.parametrize(("op", "mesh", "trusted"), [
    (OP, (1,), {1: False, 2: False, 8: False}),  # a kernel that sent nothing
    (OP, (2,), {1: False, 2: True, 8: False}),  # both neighbours are one device
    (OP, (3,), {1: False, 2: False, 8: True}),
    ("mesh_matmul", (1, 1), {(1, 1): False, (2, 2): False, (2, 4): False}),
    ("mesh_matmul", (2, 2), {(1, 1): False, (2, 2): True, (2, 4): False}),
    ("mesh_matmul", (2, 4), {(1, 1): False, (2, 2): False, (2, 4): True}),
    ("attention", (1,), {1: True}),
    ("expert_products", (1,), {1: True}),
])  # fmt: skip
def test_a_verdict_counts_for_rings_that_are_like_the_one_it_was_found_on(v5e, op, mesh, trusted):
    result = CaseResult(Case(op, "fused", mesh, tuple(SHAPES)), Verdict.PASS)
    assert record_verdicts([result], MACHINE | {"platform": "cpu"}) is None
    assert (
        record_verdicts([dataclasses.replace(result, verdict=Verdict.UNSUPPORTED)], MACHINE) is None
    )
    record_verdicts([result], MACHINE)
    assert {ring: trust.is_trusted(op, "fused", "v5e", ring) for ring in trusted} == trusted


@pytest.mark.parametrize(("verdict", "rows", "stored"), [
    (Verdict.PASS, 512, "PASS"),
    (Verdict.WRONG, 512, "WRONG"),
    (Verdict.WRONG, 96, None),  # the kernel takes no such blocks
])  # fmt: skip
def test_ring_attention_is_a_verdict_about_the_flash_kernel_where_it_used_that(
    v5e, verdict, rows, stored
):
    shape = (2, rows, 8, 128)
    record_verdicts(
        [CaseResult(Case("ring_attention", "xla", (8,), (shape, shape)), verdict)], MACHINE
    )
    assert trust.known("v5e").verdict("attention/flash") == stored


def test_measured_times_decide_among_verified_backends(v5e, caplog):
    """Where "none" takes twice what is predicted, "xla", which was not measured, is expected to do
    so, too.
    """
    seconds = fa.plan(OP, *SHAPES, chip="v5e", ring=8).seconds
    store(v5e)
    call = trust.call_key(OP, 8, SHAPES, 2)
    for measured, fastest in (
        ({"none": 1.0, "fused": 0.9}, "fused"),
        ({"none": 1.0, "fused": 9.0}, "none"),
    ):
        times = {backend: ratio * 2 * seconds["none"] for backend, ratio in measured.items()}
        assert trust.record(v5e, {}, {call: times}) == v5e.file
        assert taken() == fastest
        plan = fa.plan(OP, *SHAPES, chip="v5e", ring=8)
        assert plan.seconds == seconds
        assert ("by times that 'python -m flaxasync.verify' measured there" in str(plan)) == (
            fastest == "none"
        )
    assert not caplog.records
    # this was not measured
    assert fa.plan(OP, *SHAPES, chip="v5e", ring=8, backward=False).trusted == "fused"
    eight = fa.plan(OP, *SHAPES, chip="v5e", ring=8, quantization="int8")
    times = {backend: 9.0 if backend == eight.trusted else 1e-9 for backend in eight.costs}
    assert trust.record(v5e, {}, {call: times}) == v5e.file
    assert taken() != eight.trusted
    # nor was this
    assert fa.plan(OP, *SHAPES, chip="v5e", ring=8, quantization="int8").trusted == eight.trusted


def test_a_chip_that_is_not_in_the_table_works_and_its_unknown_figures_are_named_once(caplog):
    mesh = fa.check.topology_mesh("v5e:2x4", (8,), ("model",)).abstract_mesh
    device = AbstractDevice(device_kind="TPU v9", num_cores=1, platform="tpu")
    with (
        jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)),
        trust.trusting("predicted"),
    ):
        assert [taken(), taken()] == ["xla", "xla"]
        assert taken("fused") == "fused"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "flaxasync"]
    assert (
        "'TPU v9' is not in the table of chips, which has v5e, v6e, v5p, tpu7x: its peak rate, the "
        "sizes and" in line
    )
    assert "links and where they wrap are unknown" in line


def test_times_are_found_for_numbers_of_any_kind():
    named = trust.call_key(OP, 8, SHAPES, 2)
    shapes = [tuple(map(np.int64, shape)) for shape in SHAPES]
    assert (
        named == trust.call_key(OP, (8,), SHAPES, 2) == trust.call_key(OP, np.int64(8), shapes, 2)
    )
