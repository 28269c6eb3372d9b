"""The rules of XLA's "Async HLO Instructions" proposal: its examples keep them, and a text breaks each of them."""

import pytest

from flaxasync.check import audit, check_async_rules, parse
from tests.check import proposal

START = "%async-start = ((f32[64]), f32[32], s32[]) async-start(%operand0), calls=%async_op"
DONE = "ROOT %async-done = f32[32] async-done(%async-start)"

BROKEN = {
    "async-one-user": [
        proposal.module(START, "%async-done.1 = f32[32] async-done(%async-start)", DONE, wrapped=proposal.OP),
        proposal.module(START, "%t = (((f32[64]), f32[32], s32[])) tuple(%async-start)", DONE, wrapped=proposal.OP),
        proposal.module(
            START,
            "%u = ((f32[64]), f32[32], s32[]) async-update(%async-start)",
            "%v = ((f32[64]), f32[32], s32[]) async-update(%async-start)",
            "ROOT %async-done = f32[32] async-done(%v)",
            wrapped=proposal.OP,
        ),
        proposal.module(START, "ROOT %other-done = f32[32] custom-call-done(%async-start)", wrapped=proposal.OP),
        proposal.module(
            "%s = (f32[64], f32[64], u32[]) copy-start(%operand0)",
            "%a = f32[64] copy-done(%s)",
            "ROOT %b = f32[64] copy-done(%s)",
        ),
    ],
    "async-unfinished": [
        proposal.module(START, "ROOT %r = f32[64] negate(%operand0)", wrapped=proposal.OP),
        proposal.module(
            START,
            "%u = ((f32[64]), f32[32], s32[]) async-update(%async-start)",
            "ROOT %r = f32[64] negate(%operand0)",
            wrapped=proposal.OP,
        ),
        proposal.module("%s = (f32[64], f32[64], u32[]) copy-start(%operand0)", "ROOT %r = f32[64] negate(%operand0)"),
    ],
    "async-no-start": [proposal.module("ROOT %async-done = f32[32] async-done(%operand0)")],
}


@pytest.mark.parametrize("name", proposal.EXAMPLES)
def test_the_examples_keep_the_rules(name):
    assert check_async_rules(parse(proposal.EXAMPLES[name])) == ()


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in BROKEN.items() for text in texts])
def test_a_broken_rule_is_reported_by_its_code(code, text):
    found = check_async_rules(parse(text))
    assert code in {f.code for f in found}, found
    assert not audit(text).ok


def test_a_future_may_travel_through_a_loop():
    carried = "((f32[64]), f32[32], s32[])"
    text = proposal.module(
        START,
        f"%t = ({carried}) tuple(%async-start)",
        f"%w = ({carried}) while(%t), condition=%yes, body=%same",
        f"%g = {carried} get-tuple-element(%w), index=0",
        "ROOT %async-done = f32[32] async-done(%g)",
        wrapped=f"{proposal.OP}\n%yes (p: ({carried})) -> pred[] {{\n  %p = ({carried}) parameter(0)\n"
        f"  ROOT %c = pred[] constant(false)\n}}\n\n%same (p: ({carried})) -> ({carried}) {{\n"
        f"  ROOT %p = ({carried}) parameter(0)\n}}\n",
    )
    assert check_async_rules(parse(text)) == ()
