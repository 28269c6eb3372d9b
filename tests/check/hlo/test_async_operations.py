"""The examples of XLA's proposal are one operation each, in the generic form, as sugar, and bound late."""

import pytest

from flaxasync.check import async_operations, format_module, parse
from tests.check import proposal

# The spelling, the kind, the number of updates, and the bytes.
EXPECTED = {
    "single": ("generic", "custom-call", 0, 128),
    "multiple": ("generic", "custom-call", 0, 256),
    "updates": ("generic", "custom-call", 2, 128),
    "sugar": ("sugar", "custom-call", 1, 128),
    "late operand": ("sugar", "call", 1, 4),
    "late output": ("sugar", "call", 1, 128),
    "late output at the done": ("sugar", "call", 0, 128),
}


@pytest.mark.parametrize("name", proposal.EXAMPLES)
def test_an_example(name):
    module = parse(proposal.EXAMPLES[name])
    (op,) = async_operations(module)
    assert (op.spelling, op.kind, len(op.updates), op.bytes) == EXPECTED[name]
    assert [window.done.is_root for window in op.windows] == [True]
    assert parse(format_module(module)) == module
