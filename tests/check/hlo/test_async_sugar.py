"""The long form and sugar: the examples of XLA's proposal are read, printed, and converted in both directions."""

import pytest

from flaxasync.check import async_operations, format_module, parse, to_long_form, to_sugar
from tests.check import proposal
from tests.check.jaxlib_counts import instruction_count


def opcodes(module):
    return {i.opcode for c in module.computations.values() for i in c.instructions}


@pytest.mark.parametrize("name", proposal.EXAMPLES)
def test_an_example_survives_a_round_trip(name):
    module = parse(proposal.EXAMPLES[name])
    assert parse(format_module(module)) == module


@pytest.mark.parametrize("name", proposal.EXAMPLES)
def test_sugar_has_no_generic_opcode_and_long_form_no_sugar(name):
    module = parse(proposal.EXAMPLES[name])
    assert not {o for o in opcodes(to_sugar(module)) if o.startswith("async-")}
    assert not {o for o in opcodes(to_long_form(module)) if o.startswith(("custom-call-", "call-"))}


@pytest.mark.parametrize("name", proposal.EXAMPLES)
def test_conversion_in_both_directions(name):
    long = to_long_form(parse(proposal.EXAMPLES[name]))
    sugar = to_sugar(long)
    assert to_sugar(to_long_form(sugar)) == sugar
    assert len(to_long_form(sugar).computations) == len(long.computations)
    assert instruction_count(to_long_form(sugar)) == instruction_count(long)
    again = parse(format_module(sugar))
    assert again == sugar


@pytest.mark.parametrize("name", proposal.EXAMPLES)
def test_the_operation_is_the_same_in_every_spelling(name):
    def seen(module):
        return [
            (op.name, [u.name for u in op.updates], [w.done.name for w in op.windows], op.bytes)
            for op in async_operations(module)
        ]

    module = parse(proposal.EXAMPLES[name])
    assert seen(module) == seen(to_long_form(module)) == seen(to_sugar(module))
    assert len(seen(module)) == 1


def test_the_proposal_verbatim():
    module = parse(proposal.VERBATIM)
    assert module.is_fragment
    (operation,) = async_operations(module)
    assert (operation.kind, operation.updates[0].name, operation.windows[0].done.name) == (
        "op", "async-update0", "async-done",
    )  # fmt: skip
    assert "op-start(%operand), op_specific_attr=\u201dfoo\u201d" in format_module(to_sugar(module))
    assert parse(format_module(to_sugar(module))) == to_sugar(module)


def test_first_class_operations_have_no_sugar():
    wrapped = "%w (p: f32[4]) -> f32[4] {\n  %p = f32[4] parameter(0)\n  ROOT %c = f32[4] copy(%p)\n}\n"
    module = parse(proposal.module(
        "%s = ((f32[4]), f32[4], s32[]) async-start(%operand0), calls=%w", "ROOT %d = f32[4] async-done(%s)",
        wrapped=wrapped, inputs=("f32[4]",),
    ))  # fmt: skip
    assert to_sugar(module) == module
