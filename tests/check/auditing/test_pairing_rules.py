"""XLA's "Async HLO Instructions" proposal: its examples keep its rules, and a text breaks each of them."""

import pytest

from flaxasync.check import async_operations, audit, check_async_rules, format_module, parse
from tests.check.hlo_texts import ASYNC_OP, DONE, EXAMPLES, FUTURE, START, module

# The spelling, the kind, the number of updates, and the bytes of each example.
EXPECTED = {
    "single": ("generic", "custom-call", 0, 128),
    "multiple": ("generic", "custom-call", 0, 256),
    "updates": ("generic", "custom-call", 2, 128),
    "sugar": ("sugar", "custom-call", 1, 128),
    "late operand": ("sugar", "call", 1, 4),
    "late output": ("sugar", "call", 1, 128),
    "late output at the done": ("sugar", "call", 0, 128),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_one_operation_that_keeps_the_rules(name):
    example = parse(EXAMPLES[name])
    (op,) = async_operations(example)
    assert (op.spelling, op.kind, len(op.updates), op.bytes) == EXPECTED[name]
    assert [window.done.is_root for window in op.windows] == [True]
    assert check_async_rules(example) == ()
    assert parse(format_module(example)) == example


UPDATE = f"%u = {FUTURE} async-update(%async-start)"
COPY = "%s = (f32[64], f32[64], u32[]) copy-start(%operand0)"
OTHER_ROOT = "ROOT %r = f32[64] negate(%operand0)"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("async-one-user", [START, "%async-done.1 = f32[32] async-done(%async-start)", DONE]),
        ("async-one-user", [START, f"%t = ({FUTURE}) tuple(%async-start)", DONE]),
        ("async-one-user", [START, UPDATE, UPDATE.replace("%u", "%v"), DONE.replace("%async-start", "%v")]),
        ("async-one-user", [START, "ROOT %other-done = f32[32] custom-call-done(%async-start)"]),
        ("async-one-user", [COPY, "%a = f32[64] copy-done(%s)", "ROOT %b = f32[64] copy-done(%s)"]),
        ("async-unfinished", [START, OTHER_ROOT]),
        ("async-unfinished", [START, UPDATE, OTHER_ROOT]),
        ("async-unfinished", [COPY, OTHER_ROOT]),
        ("async-no-start", ["ROOT %async-done = f32[32] async-done(%operand0)"]),
    ],
)
def test_a_broken_rule_is_reported_by_its_code(code, lines):
    text = module(*lines, wrapped=ASYNC_OP)
    found = check_async_rules(parse(text))
    assert code in {f.code for f in found}, found
    assert not audit(text).ok


def test_a_future_may_travel_through_a_loop():
    loop = f"""%yes (p: ({FUTURE})) -> pred[] {{
  %p = ({FUTURE}) parameter(0)
  ROOT %c = pred[] constant(false)
}}

%same (p: ({FUTURE})) -> ({FUTURE}) {{
  ROOT %p = ({FUTURE}) parameter(0)
}}
"""
    text = module(
        START,
        f"%t = ({FUTURE}) tuple(%async-start)",
        f"%w = ({FUTURE}) while(%t), condition=%yes, body=%same",
        f"%g = {FUTURE} get-tuple-element(%w), index=0",
        DONE.replace("%async-start", "%g"),
        wrapped=f"{ASYNC_OP}\n{loop}",
    )
    assert check_async_rules(parse(text)) == ()
