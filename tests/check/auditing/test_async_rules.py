"""The rules of XLA's "Async HLO Instructions": its examples keep them, and what breaks one is found
by its code.

docs/check.md has a table of examples and wrong texts, which is held against the reader here.
"""

import pathlib
import re

import pytest

from flaxasync.check import (
    Severity,
    async_operations,
    audit,
    check_async_rules,
    format_module,
    parse,
)
from tests.check.hlo_texts import ADD, ASYNC_OP, DONE, EXAMPLES, FUTURE, START, WRONG, module

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "check.md").read_text()
TABLE = re.search(r"\n\| text \| found \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.DOTALL)
PROPOSAL = {
    "the first example: one operand, one result": EXAMPLES["single"],
    "the second: two operands, two results": EXAMPLES["multiple"],
    "the third: two updates": EXAMPLES["updates"],
    "the fourth: the third in the short form": EXAMPLES["short form"],
}


def codes(text):
    return {f.code for f in check_async_rules(parse(text))}


def test_the_table_of_the_page_says_what_is_found():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE[1].splitlines()]
    said = {text: set(re.findall(r"async-[\w-]+", found)) for text, found in rows}
    assert said == {text: codes(program) for text, program in (PROPOSAL | WRONG).items()}
    assert len(WRONG) == 12
    assert not any(said[text] for text in PROPOSAL)
    assert all(said[text] for text in WRONG)
    assert all(not audit(program).ok for program in WRONG.values())


@pytest.mark.parametrize(("name", "kind", "updates", "size"), [
    ("single", "custom-call", 0, 128),
    ("multiple", "custom-call", 0, 256),
    ("updates", "custom-call", 2, 128),
    ("short form", "custom-call", 2, 128),
    ("custom-call", "custom-call", 1, 128),
    ("late operand", "add", 1, 4),
    ("late output", "custom-call", 1, 128),
    ("late output at the done", "custom-call", 0, 128),
])  # fmt: skip
def test_an_example_of_xla_is_one_operation_that_keeps_the_rules(name, kind, updates, size):
    example = parse(EXAMPLES[name])
    (op,) = async_operations(example)
    assert (op.spelling, op.kind, len(op.updates), op.bytes) == ("generic", kind, updates, size)
    assert [window.done.is_root for window in op.windows] == [True]
    assert check_async_rules(example) == ()
    assert format_module(parse(format_module(example))) == format_module(example)


UPDATE = f"%u = {FUTURE} async-update(%async-start)"
COPY = "%s = (f32[64], f32[64], u32[]) copy-start(%operand0)"
OTHER_ROOT = "ROOT %r = f32[64] negate(%operand0)"
SHORT = f'%s = {FUTURE} custom-call-start(%operand0), custom_call_target="foo"'


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("async-one-user", [START, "%async-done.1 = f32[32] async-done(%async-start)", DONE]),
        ("async-one-user", [START, f"%t = ({FUTURE}) tuple(%async-start)", DONE]),
        (
            "async-one-user",
            [START, UPDATE, UPDATE.replace("%u", "%v"), DONE.replace("%async-start", "%v")],
        ),
        ("async-one-user", [SHORT, "ROOT %other-done = f32[32] negate-done(%s)"]),
        ("async-one-user", [COPY, "%a = f32[64] copy-done(%s)", "ROOT %b = f32[64] copy-done(%s)"]),
        ("async-unfinished", [START, OTHER_ROOT]),
        ("async-unfinished", [START, UPDATE, OTHER_ROOT]),
        ("async-unfinished", [COPY, OTHER_ROOT]),
        ("async-unfinished", [f"ROOT {START}"]),
        ("async-unfinished", [START, f"ROOT {UPDATE}"]),
        ("async-unfinished", [f"ROOT {COPY}"]),
        ("async-unfinished", [COPY, "ROOT %t = ((f32[64], f32[64], u32[])) tuple(%s)"]),
        (
            "async-unfinished",
            [
                SHORT,
                f"%t = ({FUTURE}, f32[64]) tuple(%s, %operand0)",
                f"ROOT %o = (({FUTURE}, f32[64])) tuple(%t)",
            ],
        ),
        ("async-no-start", ["ROOT %async-done = f32[32] async-done(%operand0)"]),
        ("async-no-start", ["ROOT %d = f32[64] copy-done(%operand0)"]),
        (
            "async-operand-alias",
            [SHORT.replace("((f32[64])", "((f32[63])"), "ROOT %d = f32[32] custom-call-done(%s)"],
        ),
        (
            "async-operand-alias",
            [
                SHORT.replace("((f32[64])", "((f32[64], f32[64])"),
                "ROOT %d = f32[32] custom-call-done(%s)",
            ],
        ),
        (
            "async-operand-alias",
            [START, UPDATE.replace("((f32[64])", "(()"), DONE.replace("%async-start", "%u")],
        ),
        (
            "async-operand-alias",
            [SHORT.replace(FUTURE, "f32[32]"), "ROOT %d = f32[32] custom-call-done(%s)"],
        ),
        (
            "async-result-alias",
            [SHORT.replace("f32[32]", "f32[31]"), "ROOT %d = f32[32] custom-call-done(%s)"],
        ),
        ("async-result-alias", [START.replace(", f32[32], s32[])", ")"), DONE]),
        ("async-shape", [START.replace("f32[32]", "f32[16]"), DONE.replace("f32[32]", "f32[16]")]),
        (
            "async-shape",
            [
                START.replace("%operand0", "%operand0, %operand0").replace(
                    "((f32[64])", "((f32[64], f32[64])"
                ),
                DONE,
            ],
        ),
    ],
)
def test_a_broken_rule_is_reported_by_its_code(code, lines):
    text = module(*lines, wrapped=ASYNC_OP)
    assert code in codes(text)
    report = audit(text)
    assert not report.ok
    assert all(f.severity == Severity.ERROR for f in report.findings if f.code == code)


def test_a_future_may_travel_through_a_loop():
    loop = f"""%yes (p: ({FUTURE})) -> pred[] {{
  %p = ({FUTURE}) parameter(0)
  ROOT %c = pred[] constant(false)
}}

%same (p: ({FUTURE})) -> ({FUTURE}) {{
  ROOT %p = ({FUTURE}) parameter(0)
}}
"""
    lines = (
        START,
        f"%t = ({FUTURE}) tuple(%async-start)",
        f"%w = ({FUTURE}) while(%t), condition=%yes, body=%same",
        f"%g = {FUTURE} get-tuple-element(%w), index=0",
    )
    wrapped = f"{ASYNC_OP}\n{loop}"
    assert codes(module(*lines, DONE.replace("%async-start", "%g"), wrapped=wrapped)) == set()
    assert codes(module(*lines, f"ROOT %t2 = ({FUTURE}) tuple(%g)", wrapped=wrapped)) == {
        "async-unfinished"
    }
    body = module(*lines[:3], f"ROOT %x = {FUTURE} get-tuple-element(%w), index=0", wrapped=wrapped)
    assert codes(body) == {"async-unfinished"}


# What XLA and libtpu write, which is right.

BARRIER = "(f32[64]{0}, u32[]{:S(2)}, u32[]{:S(2)})"
EXCHANGE = f"""%exchange (p: (f32[64], {BARRIER})) -> f32[64] {{
  %p = (f32[64]{{0}}, {BARRIER}) parameter(0)
  %x = f32[64]{{0}} get-tuple-element(%p), index=0
  ROOT %a = f32[64]{{0}} all-to-all(%x), channel_id=1, replica_groups={{{{0,1}}}}, dimensions={{0}}
}}
"""
BEHIND_A_BARRIER = (
    f'%b = {BARRIER} custom-call(), custom_call_target="BarrierStart"',
    f"%t = (f32[64]{{0}}, {BARRIER}) tuple(%operand0, %b)",
    f"%s = (((f32[64]{{0}}, {BARRIER})), f32[64]{{0}}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) "
    "async-start(%t), "
    "output_to_operand_aliasing={{0,0,1,0}: (0, {1,0}), {1}: (0, {1,0}), {2}: (0, {1,1})}, "
    "calls=%exchange",
    "ROOT %d = f32[64]{0} async-done(%s)",
)
RIGHT = {
    "a barrier that returns semaphores": module(
        *BEHIND_A_BARRIER, wrapped=EXCHANGE, inputs=("f32[64]{0}",), partitions=2
    ),
    "users that only order instructions": module(
        START,
        "%w = f32[64] exponential(%operand0)",
        f'%c = () custom-call({FUTURE} %async-start, f32[64] %w), custom_call_target="control_dep"',
        "%async-done = f32[32] async-done(%async-start)",
        '%c2 = () custom-call(%w, %async-done), custom_call_target="control_dep"',
        "ROOT %r = (f32[64], f32[32]) tuple(%w, %async-done)",
        wrapped=ASYNC_OP,
    ),
    "the done in the short form": module(
        START, "ROOT %d = f32[32] custom-call-done(%async-start)", wrapped=ASYNC_OP
    ),
    "the start in the short form": module(SHORT, "ROOT %d = f32[32] async-done(%s)"),
    "a done of the syntax of 2022": module(
        START.replace("calls", 'async_group_id=0, async_execution_thread="host", calls'),
        DONE + ', async_group_id=0, async_execution_thread="host", calls=%async_op',
        wrapped=ASYNC_OP.replace("}\n", '}, execution_thread="host"\n'),
    ),
    "a call of several instructions": module(
        f"%s = {FUTURE} call-start(%operand0), to_apply=%several",
        "ROOT %d = f32[32] call-done(%s)",
        wrapped=ASYNC_OP.replace("%async_op", "%several").replace(
            "ROOT %op = f32[32] custom-call(%param0)",
            "%n = f32[64] negate(%param0)\n  ROOT %op = f32[32] custom-call(%n)",
        ),
    ),
    "a sum for another thread": module(
        "%s = ((f32[64]), f32[64], s32[]) async-start(%operand0), "
        'async_execution_thread="sparsecore", calls=%sum',
        "ROOT %d = f32[64] async-done(%s)",
        wrapped=f"""{ADD}
%sum (p: f32[64]) -> f32[64] {{
  %p = f32[64] parameter(0)
  ROOT %r = f32[64] all-reduce(%p), replica_groups={{}}, to_apply=%add
}}, execution_thread="sparsecore"
""",
    ),
    "another layout in the future": module(
        START.replace("((f32[64])", "((f32[64]{0:T(128)})"),
        DONE,
        wrapped=ASYNC_OP,
        inputs=("f32[64]{0}",),
    ),
    "an update that binds the operand": module(
        '%s = ((), (), (s32[4], s32[2]{:S(2)})) custom-call-start(), custom_call_target="foo"',
        "%u = ((f32[64]), f32[32], (s32[4])) custom-call-update(%s, %operand0)",
        "ROOT %d = f32[32] custom-call-done(%u)",
    ),
    "a host transfer": module(
        "%t = token[] after-all()",
        "%s = (f32[64], u32[], token[]) send(%operand0, %t), channel_id=1, is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="h"}',
        "ROOT %d = token[] send-done(%s), channel_id=1, is_host_transfer=true",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_compilers_write_breaks_no_rule(name):
    report = audit(RIGHT[name])
    assert not report.codes() & {f for f in report.codes() if f.startswith("async-")}, str(report)
    assert report.ok
    assert [bool(op.windows) for op in async_operations(parse(RIGHT[name]))] == [True]
