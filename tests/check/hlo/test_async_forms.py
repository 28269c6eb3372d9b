"""The short and the generic form of an asynchronous operation: one representation, which is written
in either form.
"""

import pytest

from flaxasync.check import async_operations, check_async_rules, format_module, parse
from tests.check import programs
from tests.check.hlo_texts import ASYNC_OP, DONE, EXAMPLES, FUTURE, START, WRONG, changed, module
from tests.check.jaxlib_counts import counts, counts_of_jaxlib

NOTES = 'metadata={op_name="jit(f)/foo" source_file="f.py" source_line=7}'
WITH_NOTES = module(f"{START}, {NOTES}", DONE, wrapped=ASYNC_OP)


def test_the_third_and_the_fourth_example_of_the_proposal_are_one_module():
    generic, short = EXAMPLES["updates"], EXAMPLES["short form"]
    assert parse(generic) == parse(short)
    assert parse(generic) != parse(EXAMPLES["single"])
    assert parse(generic) != parse(changed(short, ('"foo"', '"bar"')))
    assert parse(generic) != parse(changed(short, ("f32[32]", "f32[16]")))
    # As the page prints them, with an opcode that is not there.
    quoted = (('custom_call_target="foo"', "op_specific_attr=”foo”"), ("custom-call", "op"))
    assert parse(changed(generic, *quoted)) == parse(changed(short, *quoted))


def test_the_short_form_stands_for_a_computation_of_one_instruction():
    read = parse(EXAMPLES["custom-call"])
    wrapped = read.computations["async_computation"]
    assert [(i.name, i.opcode, str(i.shape), i.operands) for i in wrapped.instructions] == [
        ("p0", "parameter", "f32[64]", ()),
        ("custom-call", "custom-call", "f32[32]", ("p0",)),
    ]
    assert wrapped.root.attributes == {"custom_call_target": '"foo"'}
    opcodes = {i.name: i.opcode for i in read.entry.instructions}
    assert opcodes["cc-start"] == "async-start"
    assert opcodes["cc-update"] == "async-update"
    assert opcodes["result"] == "async-done"
    assert read.entry.by_name["cc-start"].attributes == {"calls": "%async_computation"}


@pytest.mark.parametrize("name", [*EXAMPLES, *WRONG])
def test_either_form_is_read_back_to_the_same_module(name):
    read = parse((EXAMPLES | WRONG)[name])
    for form in ("generic", "short"):
        text = format_module(read, form=form)
        again = parse(text)
        assert again == read, text
        assert format_module(again, form=form) == text
        assert {f.code for f in check_async_rules(again)} == {
            f.code for f in check_async_rules(read)
        }
    if name in EXAMPLES:
        assert "async-" not in format_module(read, form="short").replace("%async-", "")
        assert "custom-call-" not in format_module(read, form="generic")


OTHER = 'backend_config={"a":1}'


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (WITH_NOTES, f'custom-call-start(%operand0), custom_call_target="foo", {NOTES}'),
        (
            module(START, DONE, wrapped=ASYNC_OP.replace('="foo"', f'="foo", {NOTES}')),
            f'foo", {NOTES}',
        ),
        (
            module(START, DONE, wrapped=ASYNC_OP.replace('="foo"', f'="foo", {OTHER}')),
            "async-start(%operand0), calls=",
        ),
        (WRONG["a computation that copies"], "async-start(%operand0), calls="),
        (WRONG["a computation of two instructions"], "async-start(%operand0), calls="),
        (
            changed(
                EXAMPLES["single"],
                ("calls=", 'async_execution_thread="h", calls='),
                ("}\n\nE", '}, execution_thread="h"\n\nE'),
            ),
            'custom-call-start(%operand0), custom_call_target="foo", async_execution_thread="h"',
        ),
    ],
    ids=["notes", "notes within", "another config within", "copy", "two", "thread"],
)
def test_what_has_no_short_form_stays_generic(text, start):
    read = parse(text)
    short = format_module(read, form="short")
    assert start in short
    assert parse(short) == read


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form must be 'generic' or 'short': got 'sugar'"):
        format_module(parse(EXAMPLES["single"]), form="sugar")


def test_a_start_and_its_done_on_both_sides_of_a_loop():
    """The done is written like its start, though it is that of a value that the loop returns."""
    loop = f"""%yes (p: ({FUTURE})) -> pred[] {{
  %p = ({FUTURE}) parameter(0)
  ROOT %c = pred[] constant(false)
}}

%same (p: ({FUTURE})) -> ({FUTURE}) {{
  ROOT %p = ({FUTURE}) parameter(0)
}}
"""
    read = parse(
        module(
            START,
            f"%t = ({FUTURE}) tuple(%async-start)",
            f"%w = ({FUTURE}) while(%t), condition=%yes, body=%same",
            f"%g = {FUTURE} get-tuple-element(%w), index=0",
            DONE.replace("%async-start", "%g"),
            wrapped=f"{ASYNC_OP}\n{loop}",
        )
    )
    short = format_module(read, form="short")
    assert "f32[32] custom-call-done(%g)" in short
    assert parse(short) == read
    assert [len(op.windows) for op in async_operations(parse(short))] == [1]


def test_jaxlib_reads_both_forms_as_the_same_program():
    modules = [parse(text) for name, text in EXAMPLES.items() if name != "late output"]
    modules += [parse(programs.compiled(programs.host, "v5e:2x4").text)]
    modules += [parse(programs.compiled(programs.psum, "tpu7x:2x2x1").text)]
    for form in ("generic", "short"):
        theirs = counts_of_jaxlib([format_module(module, form=form) for module in modules])
        assert [c for c in theirs if c] == [
            counts(m) for m, c in zip(modules, theirs, strict=True) if c
        ]
        assert sum(c is not None for c in theirs) >= len(EXAMPLES) - 2
