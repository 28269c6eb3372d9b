"""Transfers of float32 that is rounded on arrival: which are found, and what is predicted for a
narrower type.
"""

import pytest

from flaxasync.check import audit
from flaxasync.hardware import chip
from tests.check.auditing.test_advice import in_memory, on_links
from tests.check.hlo_texts import WIDE_SUM, changed

PRODUCT, SCATTER, ROOT = (
    next(line.strip() for line in WIDE_SUM.splitlines() if f"%{name} = " in line)
    for name in ("y", "r", "f")
)
ROUNDED = "%c = bf16[512,4096]{1,0} convert(%p)"


def found(*changes):
    report = audit(changed(WIDE_SUM, *changes), chip="v5e")
    return [f for f in report.findings if f.code == "wide-transfer"]


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ([], 32 * 2**20),
        (
            [
                (
                    PRODUCT,
                    "%y = f32[2048,4096]{1,0} custom-call(%operand0), "
                    'custom_call_target="tpu_custom_call"',
                )
            ],
            2**25,
        ),
        ([(PRODUCT, "%y = f32[2048,4096]{1,0} parameter(2)")], 0),
    ],
    ids=["dot", "kernel", "argument"],
)
def test_the_gain_is_half_of_the_transfer_and_of_the_traffic(changes, written):
    (finding,) = found(*changes)
    traffic = in_memory(written + 8 * 2**20)  # the fusion that rounds reads 8 MiB
    assert finding.gain == pytest.approx((on_links(32 * 2**20) + traffic) / 2, rel=0.01)
    assert finding.instruction == "r"
    assert "f32 that is rounded to bf16" in finding.message
    assert "preferred_element_type" in finding.remedy


# What an edit of the program does that needs the float32 values, or has none of them.
NOT_WIDE = {
    "rounded before": [
        ("%y = f32", "%y = bf16"),
        ("%r = f32", "%r = bf16"),
        ("%p = f32", "%p = bf16"),
        ("(p: f32", "(p: bf16"),
        ("convert(%p)", "copy(%p)"),
    ],
    "returned beside": [
        (
            "(bf16[512,4096]{1,0}, bf16[512,4096]{1,0}) tuple(%c, %n)",
            "(bf16[512,4096], f32[512,4096]) tuple(%c, %p)",
        ),
        (ROOT, "ROOT %f = (bf16[512,4096], f32[512,4096]) fusion(%r), kind=kLoop, calls=%rounded"),
    ],
    "multiplied": [
        (ROUNDED, "%q = f32[512,4096]{1,0} multiply(%p, %p)\n  " + ROUNDED.replace("%p", "%q"))
    ],
    "widened": [(ROUNDED, "%q = f64[512,4096]{1,0} convert(%p)\n  " + ROUNDED.replace("%p", "%q"))],
    "made integers": [
        (ROUNDED, "%q = s8[512,4096]{1,0} convert(%p)\n  " + ROUNDED.replace("%p", "%q"))
    ],
    "taken by a caller": [
        (ROOT, ROOT.replace("ROOT ", "") + "\n  ROOT %t = (f32[512,4096]) tuple(%r)")
    ],
    "widened by the compiler": [
        ("to_apply=%add", "to_apply=%add_promoted"),
        ("%add (", "%add_promoted ("),
    ],
}


@pytest.mark.parametrize("name", NOT_WIDE)
def test_what_is_not_reported(name):
    assert not found(*NOT_WIDE[name])


def test_the_values_are_followed_through_sums_slices_and_a_permute():
    """The partial sums of a ring: what arrives is added, sent on and sliced before it is
    rounded.
    """
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    ring = f"""%s0 = f32[512,4096]{{1,0}} slice(%y), slice={{[0:512], [0:4096]}}
  %s1 = f32[512,4096]{{1,0}} slice(%y), slice={{[512:1024], [0:4096]}}
  %start = (f32[512,4096]{{1,0}}, f32[512,4096]{{1,0}}) collective-permute-start(%s0), {pairs}
  %done = f32[512,4096]{{1,0}} collective-permute-done(%start)
  %sum = f32[512,4096]{{1,0}} add(%done, %s1)
  %r = f32[512,4096]{{1,0}} collective-permute(%sum), {pairs}"""
    (finding,) = found((SCATTER, ring))  # the text names a source line for neither of the permutes
    assert "and 1 more without a line of Python carry" in finding.message
    assert (finding.instruction, finding.count, finding.source) == ("start", 2, "")
    # of each permute a half, which nothing hides
    assert finding.gain > 8 * 2**20 / chip("v5e").link_bandwidth


def test_a_start_with_an_opcode_of_its_own_is_followed():
    """A reduce-scatter-start is short for an async-start, which wraps a reduce-scatter in a
    computation.
    """
    start = SCATTER.replace("scatter(", "scatter-start(").replace(
        "%r = f32[512,4096]{1,0}", "%s = ((f32[2048,4096]{1,0}), f32[512,4096]{1,0}, u32[])"
    )
    (started,) = found((SCATTER, f"{start}\n  %r = f32[512,4096]{{1,0}} reduce-scatter-done(%s)"))
    (synchronous,) = found()
    assert started.instruction == "s"
    assert started.gain == pytest.approx(synchronous.gain, rel=0.01)


def test_transfers_of_one_line_are_one_finding():
    line = ', metadata={source_file="model.py" source_line=7}'
    gather = (
        "%g = f32[2048,4096]{1,0} all-gather(%r), dimensions={0}, replica_groups=[1,4]<=[4]" + line
    )
    root = (
        f"{ROOT.replace('ROOT ', '')}\n  {gather}\n  ROOT %h = bf16[2048,4096]{{1,0}} convert(%g)"
    )
    (finding,) = found((SCATTER, SCATTER + line), (ROOT, root))
    assert (finding.count, finding.source) == (2, "model.py:7")
    assert "and 1 more of its line carry" in finding.message
    assert "64 MiB in 2 transfers" in finding.message
