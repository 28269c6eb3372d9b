"""Transfers of float32 that is rounded on arrival: which are found, and what is predicted for a narrower type."""

import pytest

from flaxasync.check import audit, parse
from flaxasync.hardware import chip
from tests.check.hlo_texts import WIDE_SUM

CODE = "wide-transfer"
ROUNDED = "%c = bf16[512,4096]{1,0} convert(%p)"
ROOT = "ROOT %f = (bf16[512,4096]{1,0}, bf16[512,4096]{1,0}) fusion(%r), kind=kLoop, calls=%rounded"


def found(text, name="v5e"):
    return [f for f in audit(text, chip=name).findings if f.code == CODE]


def changed(*replacements):
    """Returns WIDE_SUM with texts replaced, each of which it must have."""
    text = WIDE_SUM
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    parse(text)
    return text


SCATTER = "%r = f32[512,4096]{1,0} reduce-scatter(%y), dimensions={0}, replica_groups=[1,4]<=[4], to_apply=%add"
DOT = "%y = f32[2048,4096]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("replacements", "written"),
    [
        ([], 32 * 2**20),
        ([(DOT, '%y = f32[2048,4096]{1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call"')], 32 * 2**20),
        ([(DOT, "%y = f32[2048,4096]{1,0} parameter(2)")], 0),
    ],
    ids=["dot", "kernel", "argument"],
)
def test_the_gain_is_half_of_the_transfer_and_of_the_traffic(replacements, written):
    v5e = chip("v5e")
    (finding,) = found(changed(*replacements))
    links = 3 / 4 * 32 * 2**20 / (2 * v5e.link_bandwidth)  # of the 32 MiB in float32, both directions of the ring
    memory = (written + 8 * 2**20) / (v5e.hbm_bandwidth * v5e.hbm_efficiency)  # the fusion that rounds reads 8 MiB
    assert finding.gain == pytest.approx((links + memory) / 2, rel=0.01)
    assert finding.instruction == "r"
    assert "f32 that is rounded to bf16" in finding.message
    assert "preferred_element_type" in finding.remedy


def test_a_sum_that_is_rounded_before_it_travels_is_not_reported():
    narrow = WIDE_SUM.replace("%y = f32", "%y = bf16").replace("%r = f32", "%r = bf16").replace("%p = f32", "%p = bf16")
    narrow = narrow.replace("(p: f32", "(p: bf16").replace("bf16[512,4096]{1,0} convert(%p)", "bf16[512,4096] copy(%p)")
    assert not found(narrow)


@pytest.mark.parametrize(
    "replacements",
    [
        # One of two uses takes the float32 values: they are added to others in float32 and returned.
        [
            (
                "(bf16[512,4096]{1,0}, bf16[512,4096]{1,0}) tuple(%c, %n)",
                "(bf16[512,4096], f32[512,4096]) tuple(%c, %p)",
            ),
            (ROOT, "ROOT %f = (bf16[512,4096], f32[512,4096]) fusion(%r), kind=kLoop, calls=%rounded"),
        ],
        # The values are multiplied before they are rounded.
        [(ROUNDED, "%q = f32[512,4096]{1,0} multiply(%p, %p)\n  %c = bf16[512,4096]{1,0} convert(%q)")],
        # The values are converted to a type that is no narrower, or that is no floating-point type.
        [(ROUNDED, "%q = f64[512,4096]{1,0} convert(%p)\n  %c = bf16[512,4096]{1,0} convert(%q)")],
        [(ROUNDED, "%q = s8[512,4096]{1,0} convert(%p)\n  %c = bf16[512,4096]{1,0} convert(%q)")],
        # A caller takes the float32 values.
        [(ROOT, "%f = (bf16[512,4096]{1,0}, bf16[512,4096]{1,0}) fusion(%r), kind=kLoop, calls=%rounded\n"
                "  ROOT %t = (f32[512,4096]) tuple(%r)")],
        # The compiler itself widened the sum, as it does on CPU.
        [("to_apply=%add", "to_apply=%add_promoted"), ("%add (", "%add_promoted (")],
    ],
    ids=["returned", "multiplied", "widened", "integers", "called", "promoted"],
)  # fmt: skip
def test_values_that_are_needed_in_float32_are_not_reported(replacements):
    assert not found(changed(*replacements))


def test_the_values_are_followed_through_sums_slices_and_a_permute():
    """The partial sums of a ring: what arrives is added, sent on and sliced before it is rounded."""
    ring = changed((
        "%r = f32[512,4096]{1,0} reduce-scatter(%y), dimensions={0}, replica_groups=[1,4]<=[4], to_apply=%add",
        "%s0 = f32[512,4096]{1,0} slice(%y), slice={[0:512], [0:4096]}\n"
        "  %s1 = f32[512,4096]{1,0} slice(%y), slice={[512:1024], [0:4096]}\n"
        "  %start = (f32[512,4096]{1,0}, f32[512,4096]{1,0}) collective-permute-start(%s0), "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}\n"
        "  %done = f32[512,4096]{1,0} collective-permute-done(%start)\n"
        "  %sum = f32[512,4096]{1,0} add(%done, %s1)\n"
        "  %r = f32[512,4096]{1,0} collective-permute(%sum), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
    ))  # fmt: skip
    (finding,) = found(ring)  # the text names a source line for neither of the permutes
    assert "and 1 more without a line of Python carry" in finding.message
    assert (finding.instruction, finding.count, finding.source) == ("start", 2, "")
    v5e = chip("v5e")
    block = 8 * 2**20 / v5e.link_bandwidth  # seconds of one permute in float32, which nothing hides
    assert finding.gain > block  # half of both


SCATTER_START = SCATTER.replace("%r = f32[512,4096]{1,0} reduce-scatter(", "%s = SHAPE reduce-scatter-start(")


def test_a_start_with_an_opcode_of_its_own_is_followed():
    """A reduce-scatter-start is short for an async-start, which wraps a reduce-scatter in a computation."""
    shape = "((f32[2048,4096]{1,0}), f32[512,4096]{1,0}, u32[])"
    done = "\n  %r = f32[512,4096]{1,0} reduce-scatter-done(%s)"
    (started,) = found(changed((SCATTER, SCATTER_START.replace("SHAPE", shape) + done)))
    (synchronous,) = found(WIDE_SUM)
    assert started.instruction == "s"
    assert started.gain == pytest.approx(synchronous.gain, rel=0.01)


def test_transfers_of_one_line_are_one_finding():
    line = ', metadata={source_file="model.py" source_line=7}'
    two = changed(
        ("to_apply=%add", "to_apply=%add" + line),
        (ROOT, ROOT.replace("ROOT ", "")
         + "\n  %g = f32[2048,4096]{1,0} all-gather(%r), dimensions={0}, replica_groups=[1,4]<=[4]" + line
         + "\n  ROOT %h = bf16[2048,4096]{1,0} convert(%g)"),
    )  # fmt: skip
    (finding,) = found(two)
    assert finding.count == 2
    assert finding.source == "model.py:7"
    assert "and 1 more of its line carry" in finding.message
    assert "64 MiB in 2 transfers" in finding.message
