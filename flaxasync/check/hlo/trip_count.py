"""The trip count of a while loop, if the program's text determines it.

XLA notes `known_trip_count` on CPU and GPU, and never on TPU. Counting loops are therefore also
recognized from their instructions: the condition compares a counter with a bound, the body adds a
constant to the counter and leaves the bound unchanged, and the counter begins at a constant. The
trip count of any other loop is unknown.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flaxasync.check.hlo.module import Computation, Instruction

_FORWARDING = ("copy", "bitcast", "convert", "reshape")  # opcodes that pass an integer on unchanged
_HOLDS = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}
# instructions that are looked at for one loop; those of compilers need fewer than fifty
_MOST = 100


class _Value(NamedTuple):
    """An integer: an element of the loop's tuple, or 0 if that is None, and what is added to it."""

    element: int | None
    added: int


def trip_count(loop: Instruction) -> int | None:
    """Returns the number of iterations of a `while`, or None if the text does not determine it."""
    known = loop.backend_config.get("known_trip_count")
    if isinstance(known, dict):
        count = str(known.get("n", ""))
    else:
        count = ""
    if count.isascii() and count.isdigit():
        return int(count[:18])
    called = loop.called
    if len(called) != 2 or not loop.operands:
        return None
    body, condition = called
    begin = loop.inputs[0]
    budget = itertools.repeat(True, _MOST)  # an element for each instruction that may be looked at
    counter, bound, direction = _comparison(budget, condition)
    if counter is None or bound is None or counter.element is None:
        return None
    limit = bound
    if bound.element is not None:  # the loop carries the bound, and must leave it as it is
        first = _element(budget, begin, bound.element)
        if first is None or _element(budget, body.root, bound.element) != _Value(bound.element, 0):
            return None
        limit = _Value(first.element, first.added + bound.added)
    start = _element(budget, begin, counter.element)
    step = _element(budget, body.root, counter.element)
    if start is None or step is None or step.element != counter.element or not step.added:
        return None
    if start.element is not None or limit.element is not None:
        return None  # an element of the loop around this one
    return _count(start.added + counter.added, limit.added, step.added, direction)


def _count(start: int, limit: int, step: int, direction: str) -> int | None:
    if not _HOLDS[direction](start, limit):
        return 0
    if (step > 0) != (direction in ("LT", "LE")):
        return None  # the counter moves away from its bound
    distance = abs(limit - start) + (1 if direction in ("LE", "GE") else 0)
    return math.ceil(distance / abs(step))


def _comparison(
    budget: Iterator[bool], condition: Computation
) -> tuple[_Value | None, _Value | None, str]:
    """Returns both sides of the comparison of a condition, which may be in a fusion, and its
    direction.
    """
    root = condition.root
    arguments = None
    if root.opcode == "fusion":
        arguments = [_value(budget, operand) for operand in root.inputs]
        root = next((called.root for called in root.called), root)
    direction = root.attributes.get("direction", "")
    if root.opcode != "compare" or direction not in _HOLDS or len(root.operands) != 2:
        return None, None, ""
    left, right = (_value(budget, operand, arguments) for operand in root.inputs)
    return left, right, direction


def _element(budget: Iterator[bool], made: Instruction, index: int) -> _Value | None:
    """Returns the value of one element of a tuple."""
    if made.opcode != "tuple" or index >= len(made.operands):
        return None
    return _value(budget, made.inputs[index])


def _value(
    budget: Iterator[bool],
    i: Instruction,
    arguments: Sequence[_Value | None] | None = None,
) -> _Value | None:
    """Returns the value of a scalar in a computation of a loop, or in a fusion with the given
    arguments.
    """
    if not next(budget, False) or i.shape.dimensions or i.shape.is_tuple:
        return None
    made = i.inputs
    if i.opcode == "constant":
        text = i.literal.strip()
        is_integer = text.isascii() and text.removeprefix("-").isdigit() and len(text) < 19
        if is_integer:
            return _Value(None, int(text))
        return None
    if i.opcode == "parameter" and arguments is not None:
        number = i.parameter_number
        if number is not None and number < len(arguments):
            return arguments[number]
        return None
    if i.opcode == "get-tuple-element" and arguments is None and i.tuple_index is not None:
        if made and made[0].opcode == "parameter":
            return _Value(i.tuple_index, 0)
        return None
    if i.opcode in _FORWARDING and made:
        return _value(budget, made[0], arguments)
    if i.opcode not in ("add", "fusion"):
        return None
    values = [_value(budget, operand, arguments) for operand in made]
    if i.opcode == "add":
        left, right = values if len(values) == 2 else (None, None)
        if left is None or right is None:
            return None
        if left.element is None:
            return _Value(right.element, left.added + right.added)
        if right.element is None:
            return _Value(left.element, left.added + right.added)
        return None  # a sum of two elements
    return next((_value(budget, body.root, values) for body in i.called), None)
