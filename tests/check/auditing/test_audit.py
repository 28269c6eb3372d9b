"""The audit of programs that the TPU compiler made: what it is given and told, and what it says of
their windows.
"""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array
from flaxasync.check import CODES, HLO_ONLY, audit, compile_for, timeline, topology_mesh
from tests.check import programs
from tests.check.hlo_texts import ADD, LOOP, changed, module


def test_what_a_report_says_of_its_program():
    """The chip comes with a program of compile_for. For a text it is assumed, in words."""
    program = programs.compiled(programs.psum, "v5p:2x2x2")
    assert audit(program).chip == "v5p"
    assert (audit(program.text).chip, "say chip=" in str(audit(program.text))) == ("v5e", True)
    assert "not-scheduled" in audit(LOOP.replace(", is_scheduled=true", "")).codes()
    assert "windows and stalls cannot be told" in CODES["not-scheduled"].meaning
    on_cpu = audit(programs.on_cpu(programs.ppermute))
    assert "synchronous-collective" in on_cpu.codes()
    assert any("no TPU program" in note for note in on_cpu.notes)


class Silent:
    def as_text(self):
        raise NotImplementedError("no text")


@pytest.mark.parametrize(("program", "options", "message"), [
    (LOOP, {"chip": "v9"}, "chip must be one of v5e, v6e, v5p, tpu7x, a100, h100, h200, b200: got 'v9'"),
    (Silent(), {}, "xla_dump_to"),
    (3, {}, "expected a compiled program or HLO text: got int"),
    ("not HLO", {}, "line 1, column 1"),
])  # fmt: skip
def test_what_cannot_be_audited_is_refused_with_what_to_do(program, options, message):
    """tests/check/hlo/test_reader.py has texts that are no HLO."""
    with pytest.raises(ValueError, match=message):
        audit(program, **options)


def test_a_pair_that_nothing_depends_on_is_deleted():
    """It compiles to nothing, which only an expectation can tell."""
    assert audit(programs.async_form("unthreaded")).ok
    report = audit(programs.async_form("unthreaded"), expect={"permute_start": 1})
    assert report.codes() == {"deleted"}
    assert "expected 1 of 'permute_start', the program has 0" in str(report)


def test_a_finding_names_the_python_line_and_json_has_all_of_it():
    report = audit(programs.async_form("staggered_unroll_1"))
    assert "async_forms.py:" in report.findings[0].source
    data = json.loads(report.to_json())
    assert data["ok"] is False
    assert {f["code"] for f in data["findings"]} == report.codes()
    assert all(f["remedy"] for f in data["findings"])
    assert [p["name"] for p in data["pairs"]] == [p.name for p in report.pairs]


# What runs inside the windows, and what the chip waits for.


ONES = "f32[1048576]{0}"
ALONE = "replica_groups={{0},{1}}, to_apply=%add"


@pytest.mark.parametrize(("groups", "code"), [(ALONE, None), ("to_apply=%add", "serialised")])
def test_a_transfer_between_groups_of_one_device_is_no_finding(groups, code):
    """It takes no time: nothing travels."""
    text = module(
        f"%s = {ONES} all-reduce-start(%operand0), channel_id=1, {groups}",
        f"%d = {ONES} all-reduce-done(%s)",
        f"%held = {ONES} all-reduce(%d), channel_id=2, {groups}",
        "ROOT %r = bf16[1048576]{0} convert(%held)",
        wrapped=ADD,
        inputs=(ONES,),
        partitions=2,
    )
    codes = {code, "synchronous-collective", "wide-transfer"} if code else set()
    assert audit(text, chip="v5e").codes() == codes


def test_work_in_the_window_is_counted():
    """The matmul of one step stays in its window. Nothing ties that of the other step, so the
    compiler moved it out.
    """
    report = audit(programs.async_form("value_with_compute"))
    first, second = (p for p in report.pairs if p.runs == 4)  # eight hops, two in each iteration
    assert [w.instruction for w in second.work if "convolution" in w.instruction]
    assert "repeats" in second.crosses
    assert second.overlapped
    assert not first.overlapped
    (moved,) = [f for f in report.findings if f.code == "empty-window"]
    assert (moved.instruction, "convolution" in moved.message) == (first.name, True)


@pytest.mark.slow
def test_windowed_einsum_overlaps_two_permutes_in_each_step():
    """XLA gathers one operand of this matmul in a loop of its own."""
    mesh = topology_mesh("v5e:2x4", (8,), ("model",))
    x, w = (
        array((16384, 8192), mesh, P("model", None)),
        array((8192, 28672), mesh, P(None, "model")),
    )
    report = audit(
        compile_for(
            "v5e:2x4",
            jax.jit(jnp.matmul, out_shardings=w.sharding),
            x,
            w,
            compiler_options=HLO_ONLY,
        )
    )
    body = [p for p in report.pairs if "body" in p.computation and p.kind == "collective-permute"]
    assert len(body) == 4  # the loop is unrolled by two
    assert all(p.overlapped and p.exposed == 0 for p in body), str(report)


def test_the_2x2_matmul_exposes_its_permute_and_its_all_reduce():
    report = audit(programs.mesh_matmul())
    (permute,) = report.pairs
    assert (permute.kind, permute.bytes, permute.overlapped) == (
        "collective-permute",
        128 << 20,
        False,
    )
    assert permute.exposed == pytest.approx(2.98e-3, rel=0.01)
    found = {(f.code, f.instruction) for f in report.findings}
    assert found == {("serialised", permute.name), ("synchronous-collective", "all-reduce")}
    assert report.ok  # the program is slow, and not wrong
    for finding in report.findings:
        assert (
            "flaxasync.mesh_matmul in a shard_map, or the layer flaxasync.nn.MeshLinear"
            in finding.remedy
        )
        # the matmul, of 5.6 ms at the peak, can hide it
        assert finding.gain == pytest.approx(2.98e-3, rel=0.01)


def test_a_loop_that_copies_what_it_carries():
    """A copy of a buffer in flight is one, too, and is reported as the graver fault alone."""
    assert "loop-copies" not in audit(LOOP).codes()
    (copies,) = [
        f
        for f in audit(changed(LOOP, ("negate(%g)", "copy(%g)"))).findings
        if f.code == "loop-copies"
    ]
    assert copies.count == 4  # the counter is 0, 3, 6, 9
    codes = audit(programs.async_form("staggered_unroll_1")).codes()
    assert "in-flight-copied" in codes
    assert "loop-copies" not in codes


# The package's own rings are safe and overlap. tests/transport/test_compiled.py audits every
# transport.


@functools.cache
def ring(op, backend):
    """Compiles x[4096, 2048] . w[2048, 4096] over eight chips, with rows or products sharded."""
    rows, columns = P("x", None), P(None, "x")
    specs, out = (
        ((rows, columns), columns) if op is fa.all_gather_matmul else ((columns, rows), rows)
    )
    local = functools.partial(op, axis_name="x", backend=backend)
    program = programs.on_all_devices(
        "v5e:2x4", local, specs, out, (4096, 2048), (2048, 4096), typed=True
    )
    return compile_for("v5e:2x4", *program, compiler_options=HLO_ONLY)


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        (fa.matmul_reduce_scatter, "xla"),
        pytest.param(fa.all_gather_matmul, "pallas", marks=pytest.mark.slow),
        pytest.param(fa.all_gather_matmul, "xla", marks=pytest.mark.slow),
        pytest.param(fa.matmul_reduce_scatter, "pallas", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_ring_is_safe_and_overlaps(op, backend):
    report = audit(ring(op, backend))
    assert report.ok, str(report)
    moving = [p for p in report.pairs if p.communicates]
    assert moving
    assert all(p.spelling == ("kernel" if backend == "pallas" else "first-class") for p in moving)
    assert sum(p.overlapped for p in moving) >= len(moving) // 2


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(fa.all_gather_matmul, marks=pytest.mark.slow),
        fa.matmul_reduce_scatter,
    ],
    ids=lambda op: op.__name__,
)
def test_without_a_ring_nothing_overlaps_and_it_takes_longer(op):
    report = audit(ring(op, "none"))
    assert not [p for p in report.pairs if p.communicates and p.overlapped]
    assert "synchronous-collective" in report.codes()
    assert timeline(ring(op, "xla")).seconds < timeline(ring(op, "none")).seconds


PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "check.md").read_text()
SEVERITIES = dict(re.findall(r"^\| `([\w-]+)` \| (error|warning) \|", PAGE, re.MULTILINE))
RULES = set(re.findall(r"`(async-[\w-]+)`", PAGE))  # "These codes are errors."
EXAMPLES = sorted((pathlib.Path(__file__).parent / "examples").glob("*.hlo"))


def test_the_page_has_every_code_and_every_code_a_remedy():
    assert set(SEVERITIES) | RULES == set(CODES)
    assert all(code.remedy and code.meaning for code in CODES.values())


def test_every_code_has_an_example():
    """But for "deleted", which is found in no program alone."""
    assert {path.stem for path in EXAMPLES} == set(CODES) - {"deleted"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    text = path.read_text()
    if "__cublas" in text:
        report = audit(text)
        assert report.chip == "h100"
    else:
        report = audit(text, chip="v5e")
    assert path.stem in report.codes(), str(report)
    severity = next(f.severity for f in report.findings if f.code == path.stem)
    assert str(severity) == SEVERITIES.get(path.stem, "error")
