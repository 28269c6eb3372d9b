"""The audit on programs that the TPU compiler made: right forms are ok, wrong forms are named, overlap is counted."""

import json

import jax
import jax.numpy as jnp
import pytest

from flaxasync.check import CODES, HloError, Severity, audit
from tests.check import programs, proposal
from tests.grids import sparse

TOO_LARGE_FOR_VMEM = 131072  # rows of 2 KiB: Refs cannot be held to HBM, so only size keeps them out of vector memory


@pytest.mark.parametrize(
    ("form", "topology"),
    sparse(
        ["value", "value_with_compute"],
        ["v5e:2x2", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"],
        keep=lambda form, topology: form == topology % 2,
    ),
)
def test_right_value_forms_are_ok(form, topology):
    report = audit(programs.async_form(form, topology), expect={"permute_start": 3})
    assert report.ok, str(report)
    assert not report.codes() & {"in-flight-copied", "in-flight-read", "in-flight-vmem", "in-flight-freed", "deleted"}


@pytest.mark.parametrize(("form", "pairs"), [("stateful", 3), ("stateful_with_compute", 3), ("two_slots", 2)])
def test_right_stateful_forms_are_ok(form, pairs):
    report = audit(programs.async_form(form, "v5e:2x2", TOO_LARGE_FOR_VMEM), expect={"permute_start": pairs})
    assert report.ok, str(report)


def test_work_in_the_window_is_counted():
    """The matmul of one step stays in its window; that of the other, which nothing pins, the compiler moved out."""
    report = audit(programs.async_form("value_with_compute"))
    first, second = (p for p in report.pairs if p.runs == 4)  # eight hops, two a trip
    assert [w.instruction for w in second.work if "convolution" in w.instruction]
    assert "repeats" in second.crosses
    assert second.overlapped
    assert not first.overlapped
    (moved,) = [f for f in report.findings if f.code == "empty-window"]
    assert (moved.instruction, "convolution" in moved.message) == (first.name, True)


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ("staggered_unroll_1", "in-flight-copied"),
        ("any_outputs", "in-flight-vmem"),
        ("read_in_flight", "in-flight-copied"),
        ("freed_in_flight", "in-flight-freed"),
        ("forgotten", "async-unfinished"),
    ],
)
def test_wrong_forms_are_named(form, code):
    report = audit(programs.async_form(form))
    assert not report.ok
    assert code in {f.code for f in report.findings if f.severity == Severity.ERROR}, str(report)


def test_a_finding_names_the_python_line():
    (finding, *_) = audit(programs.async_form("staggered_unroll_1")).findings
    assert "async_forms.py:" in finding.source


def test_an_unthreaded_pair_is_deleted():
    """It compiles to nothing, which only an expectation can tell."""
    assert audit(programs.async_form("unthreaded")).ok
    report = audit(programs.async_form("unthreaded"), expect={"permute_start": 1})
    assert report.codes() == {"deleted"}
    assert "expected 1 of 'permute_start', the program has 0" in str(report)


def test_windowed_einsum_overlaps_two_permutes_a_step():
    report = audit(programs.windowed_einsum())
    body = [p for p in report.pairs if "body" in p.computation and p.kind == "collective-permute"]
    assert len(body) == 4  # the loop is unrolled by two
    assert all(p.overlapped and p.exposed == 0 for p in body), str(report)


def test_the_2x2_matmul_exposes_its_permute_and_its_all_reduce():
    report = audit(programs.mesh_matmul())
    (permute,) = report.pairs
    assert (permute.kind, permute.bytes, permute.overlapped) == ("collective-permute", 128 << 20, False)
    assert permute.exposed == pytest.approx(2.98e-3, rel=0.01)
    named = {(f.code, f.instruction) for f in report.findings}
    assert named == {("serialised", permute.name), ("synchronous-collective", "all-reduce")}
    assert report.ok  # slow, not wrong


def test_a_loop_that_copies_what_it_carries():
    report = audit(programs.async_form("staggered_unroll_1"))
    assert "loop-copies" not in report.codes()  # its copies are in flight, which is worse and said once
    twice = audit(LOOP.replace("%c = f32[65536]{0} negate(%g)", "%c = f32[65536]{0} copy(%g)"))
    assert "loop-copies" in twice.codes()
    assert "loop-copies" not in audit(LOOP).codes()


LOOP = """HloModule m, is_scheduled=true

%cond (p: (s32[], f32[65536])) -> pred[] {
  %p = (s32[], f32[65536]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(12)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[], f32[65536])) -> (s32[], f32[65536]) {
  %p = (s32[], f32[65536]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(3)
  %next = s32[] add(%i, %one)
  %g = f32[65536]{0} get-tuple-element(%p), index=1
  %c = f32[65536]{0} negate(%g)
  ROOT %t = (s32[], f32[65536]{0}) tuple(%next, %c)
}

ENTRY %e (x: f32[65536]) -> f32[65536] {
  %x = f32[65536]{0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[65536]{0}) tuple(%zero, %x)
  %w = (s32[], f32[65536]{0}) while(%t), condition=%cond, body=%body
  ROOT %r = f32[65536]{0} get-tuple-element(%w), index=1
}
"""


def test_an_unscheduled_module_says_what_cannot_be_told():
    report = audit(LOOP.replace(", is_scheduled=true", ""))
    assert "not-scheduled" in report.codes()
    assert "windows and stalls cannot be told" in CODES["not-scheduled"].meaning


def test_cpu_programs_are_read_and_said_to_be_none_of_a_tpu():
    report = audit(programs.on_cpu(programs.ppermute))
    assert "synchronous-collective" in report.codes()
    assert any("no TPU program" in note for note in report.notes)


def test_the_chip_comes_with_the_program_or_is_assumed_in_words():
    assert audit(programs.compiled(programs.psum, "v5p:2x2x2")).chip == "v5p"
    report = audit(programs.compiled(programs.psum, "v5p:2x2x2").text)
    assert (report.chip, "say chip=" in str(report)) == ("v5e", True)
    with pytest.raises(ValueError, match="chip must be one of v5e, v6e, v5p, tpu7x: got 'v9'"):
        audit(LOOP, chip="v9")


def test_what_cannot_be_audited_is_refused_with_what_to_do():
    class Silent:
        def as_text(self):
            raise NotImplementedError("no text")

    with pytest.raises(ValueError, match="xla_dump_to"):
        audit(Silent())
    with pytest.raises(ValueError, match="expected a compiled program or HLO text: got int"):
        audit(3)
    with pytest.raises(ValueError, match="lowered program"):
        audit(jax.jit(jnp.sin).lower(1.0).as_text())
    with pytest.raises(HloError, match="line 1, column 1"):
        audit("not HLO")


def test_json_holds_all_of_it():
    report = audit(programs.async_form("staggered_unroll_1"))
    data = json.loads(report.to_json())
    assert data["ok"] is False
    assert {f["code"] for f in data["findings"]} == report.codes()
    assert all(f["remedy"] for f in data["findings"])
    assert [p["name"] for p in data["pairs"]] == [p.name for p in report.pairs]


def test_every_code_has_a_remedy():
    assert all(code.remedy and code.meaning for code in CODES.values())


def test_hazards_in_text():
    """Reads and writes that today's compiler guards with a copy, as text that does not."""
    assert audit(KERNELS).ok, str(audit(KERNELS))
    read = KERNELS.replace("negate(%x2)", "negate(%y)")
    assert "in-flight-read" in audit(read).codes()
    written = KERNELS.replace("negate(%x2)", "dynamic-update-slice(%x2, %x2)")
    assert "in-flight-written" in audit(written).codes()
    vmem = KERNELS.replace("f32[4096]{0:T(1024)}", "f32[4096]{0:T(1024)S(1)}")
    assert "in-flight-vmem" in audit(vmem).codes()
    freed = KERNELS.replace("custom-call(%x2, %y, %s)", "custom-call(%y, %s)").replace("{{}: (1, {})}", "{{}: (0, {})}")
    assert "in-flight-freed" in audit(freed.replace("negate(%x2)", "negate(%z)").replace("%w = ", "%w.1 = ")).codes()


KERNELS = proposal.module(
    "%z = f32[4096]{0:T(1024)} negate(%operand0)",
    "%st = (s32[]{:S(2)}, f32[4096]{0:T(1024)}, f32[4096]{0:T(1024)}) custom-call(%z), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (0, {})}',
    "%s = s32[]{:S(2)} get-tuple-element(%st), index=0",
    "%x2 = f32[4096]{0:T(1024)} get-tuple-element(%st), index=1",
    "%y = f32[4096]{0:T(1024)} get-tuple-element(%st), index=2",
    "%w = f32[4096]{0:T(1024)} negate(%x2)",
    "ROOT %d = f32[4096]{0:T(1024)} custom-call(%x2, %y, %s), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (1, {})}',
    inputs=("f32[4096]{0:T(1024)}",),
)


def test_trip_counts():
    report = audit(LOOP.replace("%c = f32[65536]{0} negate(%g)", "%c = f32[65536]{0} copy(%g)"))
    assert [f.count for f in report.findings if f.code == "loop-copies"] == [4]  # 0, 3, 6, 9


def test_two_transfers_of_one_source():
    """Both starts alias the block through, and only read it; a write between them is still found."""
    assert audit(TWO_SENDS).ok, str(audit(TWO_SENDS))
    written = TWO_SENDS.replace("negate(%x3)", "dynamic-update-slice(%x3, %x3)")
    assert {f.code for f in audit(written).findings if f.severity == Severity.ERROR} == {"in-flight-written"}
    into = TWO_SENDS.replace("custom-call(%x2), ", "custom-call(%y, %x2), ")
    into = into.replace("{{1}: (0, {})}, second", "{{1}: (0, {}), {2}: (1, {})}, second")
    assert "in-flight-written" in audit(into).codes()  # the second transfer's destination is what the first one sends


TWO_SENDS = proposal.module(
    "%z = f32[4096]{0} negate(%operand0)",
    "%st = (s32[]{:S(2)}, f32[4096]{0}, f32[4096]{0}) custom-call(%z), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (0, {})}',
    "%s = s32[]{:S(2)} get-tuple-element(%st), index=0",
    "%x2 = f32[4096]{0} get-tuple-element(%st), index=1",
    "%y = f32[4096]{0} get-tuple-element(%st), index=2",
    "%st2 = (s32[]{:S(2)}, f32[4096]{0}, f32[4096]{0}) custom-call(%x2), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (0, {})}, second={}',
    "%s2 = s32[]{:S(2)} get-tuple-element(%st2), index=0",
    "%x3 = f32[4096]{0} get-tuple-element(%st2), index=1",
    "%y2 = f32[4096]{0} get-tuple-element(%st2), index=2",
    "%w = f32[4096]{0} negate(%x3)",
    "%d2 = (f32[4096]{0}, f32[4096]{0}) custom-call(%x3, %y2, %s2), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}',
    "%x4 = f32[4096]{0} get-tuple-element(%d2), index=0",
    "ROOT %d = f32[4096]{0} custom-call(%x4, %y, %s), "
    'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (1, {})}',
    inputs=("f32[4096]{0}",),
)


@pytest.mark.parametrize(("form", "way"), [("stateful", "vmem-to-vmem"), ("value", "hbm-to-hbm")])
def test_small_refs_lie_in_vector_memory_in_the_chips_instructions_too(form, way, tmp_path):
    """What `S(1)` in the text of a start says is what its DMA does."""
    program = programs.async_form.__wrapped__(form, keep_dumps=tmp_path)
    assert ("in-flight-vmem" in audit(program).codes()) == (way == "vmem-to-vmem")
    moves = [line for path in tmp_path.glob("*permute_start*final_bundles.txt")
             for line in path.read_text().splitlines() if "dma.general" in line]  # fmt: skip
    assert moves
    assert all(way in line for line in moves)
