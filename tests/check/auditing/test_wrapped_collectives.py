"""Collectives within fusions and in groups that async-start wraps, and what is said of the chip of
a text.
"""

import pytest

from flaxasync.check import CHIPS, async_operations, audit, parse, timeline
from flaxasync.check.estimate.costs import collective_seconds
from tests.check.hlo_texts import ADD, module

V5E = CHIPS["v5e"]
MIB = 1 << 20
ARRAY, QUARTER = "f32[1024,1024]{1,0}", "f32[256,1024]{1,0}"
GROUPS = "replica_groups=[1,4]<=[4]"
PAIRS = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
FUSED = f"""%sum (p: {ARRAY}) -> {ARRAY} {{
  %p = {ARRAY} parameter(0)
  %r = {ARRAY} all-reduce(%p), {GROUPS}, to_apply=%add
  ROOT %n = {ARRAY} negate(%r)
}}

%wrapped (p: {ARRAY}) -> {ARRAY} {{
  %p = {ARRAY} parameter(0)
  ROOT %f = {ARRAY} fusion(%p), kind=kCustom, calls=%sum
}}
"""
MIXED = f"""%wrapped (p: {QUARTER}, q: {ARRAY}) -> ({ARRAY}, {ARRAY}) {{
  %p = {QUARTER} parameter(0)
  %q = {ARRAY} parameter(1)
  %g = {ARRAY} all-gather(%p), dimensions={{0}}, {GROUPS}
  %r = {ARRAY} all-reduce(%q), {GROUPS}, to_apply=%add
  ROOT %t = ({ARRAY}, {ARRAY}) tuple(%g, %r)
}}
"""
STARTS = f"""%wrapped (p: {QUARTER}, q: {ARRAY}) -> ({ARRAY}, {ARRAY}) {{
  %p = {QUARTER} parameter(0)
  %q = {ARRAY} parameter(1)
  %s = ({QUARTER}, {ARRAY}) all-gather-start(%p), dimensions={{0}}, {GROUPS}
  %s2 = ({ARRAY}, {ARRAY}, u32[], u32[]) collective-permute-start(%q), {PAIRS}
  %d = {ARRAY} all-gather-done(%s)
  %d2 = {ARRAY} collective-permute-done(%s2)
  ROOT %t = ({ARRAY}, {ARRAY}) tuple(%d, %d2)
}}
"""
ONE = (
    f"%s = (({ARRAY}), {ARRAY}, s32[]) async-start(%operand1), calls=%wrapped",
    f"ROOT %d = {ARRAY} async-done(%s)",
)
TWO = (
    f"%s = (({QUARTER}, {ARRAY}), ({ARRAY}, {ARRAY}), s32[]) async-start(%operand0, %operand1), "
    "calls=%wrapped",
    f"ROOT %d = ({ARRAY}, {ARRAY}) async-done(%s)",
)
GATHER = collective_seconds("all-gather", MIB, 4 * MIB, 4, V5E)
SUM = collective_seconds("all-reduce", 4 * MIB, 4 * MIB, 4, V5E)
PERMUTE = collective_seconds("collective-permute", 4 * MIB, 4 * MIB, 4, V5E)


def program(lines, wrapped):
    return module(*lines, wrapped=f"{ADD}\n{wrapped}", inputs=(QUARTER, ARRAY), partitions=4)


@pytest.mark.parametrize(("text", "kind", "size", "seconds"), [
    (program(ONE, FUSED), "all-reduce", 4 * MIB, SUM),
    (program(TWO, MIXED), "all-gather and all-reduce", 8 * MIB, GATHER + SUM),
    (program(TWO, STARTS), "all-gather and collective-permute", 8 * MIB, GATHER + PERMUTE),
], ids=["in a fusion", "mixed", "starts"])  # fmt: skip
def test_all_that_is_wrapped_is_communication(text, kind, size, seconds):
    report = audit(text, chip="v5e")
    (pair,) = report.pairs
    assert (pair.kind, pair.communicates, pair.bytes) == (kind, True, size)
    assert pair.transfer == pytest.approx(seconds)
    assert report.codes() == {"serialised"}
    assert timeline(text, "v5e").exposed == pytest.approx(seconds)


def test_the_collectives_of_an_operation_are_listed():
    (op,) = async_operations(parse(program(TWO, MIXED)))
    assert [i.name for i in op.collectives] == ["g", "r"]
    assert {i.computation.name for i in op.collectives} == {"wrapped"}


KERNEL = module(
    "%t = f32[2048]{0:T(1024)} bitcast(%operand0)",
    'ROOT %k = f32[2048]{0:T(1024)} custom-call(%t), custom_call_target="tpu_custom_call", '
    'backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000"}}}',
    inputs=("f32[2048]{0:T(1024)}",),
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (KERNEL, None),
        (
            KERNEL.replace("bitcast", "negate"),
            "the text has no cycle estimates: work beside kernels is timed",
        ),
        (module("ROOT %r = f32[64] negate(%operand0)"), "it is no TPU program"),
        (module("ROOT %r = f32[64]{0:S(1)} copy(%operand0)"), "work beside kernels"),
    ],
    ids=["kernel", "kernel and work", "no layouts", "vector memory"],
)
def test_what_is_said_of_a_program_without_estimates(text, said):
    notes = [note for note in audit(text, chip="v6e").notes if "cycle estimates" in note]
    assert len(notes) == (said is not None)
    assert all(said in note for note in notes)
