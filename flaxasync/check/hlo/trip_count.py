"""The trip count of a while loop, if the program's text determines it.

XLA notes `known_trip_count` on CPU and GPU, and never on TPU. Counting loops are therefore also recognized from their
instructions: the condition compares a counter with a constant, the body adds a constant to the counter, and the
counter begins at a constant. The trip count of any other loop is unknown.
"""

import math

from flaxasync.check.hlo.module import Computation, HloModule, Instruction

# Opcodes that pass an integer on unchanged.
_FORWARDING = ("copy", "bitcast", "convert", "reshape")
_HOLDS = {"LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b}


def trip_count(module: HloModule, loop: Instruction) -> int | None:
    """Returns the number of iterations of a `while`, or None if the text does not determine it."""
    known = loop.backend_config.get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isascii() and str(known.get("n", "")).isdigit():
        return int(str(known["n"])[:18])
    condition = module.computations.get(loop.attributes.get("condition", "").lstrip("%"))
    body = module.computations.get(loop.loop_body)
    if condition is None or body is None or not loop.operands:
        return None
    caller = next(c for c, call in module.callers[body.name] if call is loop)
    comparison = _comparison(module, condition)
    if comparison is None:
        return None
    counter, bound, direction = comparison
    start = _constant(caller, _element(caller, loop.operands[0], counter))
    limit = bound if isinstance(bound, int) else _constant(caller, _element(caller, loop.operands[0], bound[0]))
    step = _step(module, body, counter)
    if start is None or limit is None or not step:
        return None
    return _count(start, limit, step, direction)


def _count(start: int, limit: int, step: int, direction: str) -> int | None:
    if not _HOLDS[direction](start, limit):
        return 0
    if (step > 0) != (direction in ("LT", "LE")):
        return None  # the counter moves away from its bound
    distance = abs(limit - start) + (1 if direction in ("LE", "GE") else 0)
    return math.ceil(distance / abs(step))


def _comparison(module: HloModule, condition: Computation) -> tuple[int, int | tuple[int], str] | None:
    """Reads `compare(get-tuple-element(parameter, i), bound), direction=LT`, which may be in a fusion.

    Returns:
      The index i of the counter in the loop's tuple, the bound, and the direction of the comparison. The bound is a
      number, or (index,) if it is an element of the loop's tuple.
    """
    root = _origin(condition, condition.root)
    if root is None:
        return None
    inner, arguments = condition, [_origin(condition, condition.by_name.get(o)) for o in root.operands]
    if root.opcode == "fusion" and root.called_computations:
        inner = module.computations.get(root.called_computations[0], condition)
        outer = arguments
        root = _origin(inner, inner.root)
        if root is None:
            return None
        arguments = []
        for operand in root.operands:
            source = _origin(inner, inner.by_name.get(operand))
            number = source.parameter_number if source is not None else None
            arguments.append(outer[number] if number is not None and number < len(outer) else source)
    direction = root.attributes.get("direction", "")
    if root.opcode != "compare" or direction not in _HOLDS or len(arguments) != 2:
        return None
    left, right = arguments
    if left is None or right is None or left.opcode != "get-tuple-element" or left.tuple_index is None:
        return None
    if right.opcode == "get-tuple-element" and right.tuple_index is not None:
        return left.tuple_index, (right.tuple_index,), direction
    value = _value(right)
    return None if value is None else (left.tuple_index, value, direction)


def _step(module: HloModule, body: Computation, counter: int) -> int | None:
    """Returns what one iteration adds to the counter."""
    root = body.root
    if root is None or root.opcode != "tuple" or counter >= len(root.operands):
        return None
    added, value = 0, _origin(body, body.by_name.get(root.operands[counter]))
    for _ in range(len(body.instructions)):
        if value is None:
            return None
        if value.opcode == "get-tuple-element":
            return added if value.tuple_index == counter else None
        if value.opcode == "fusion" and (increment := _fused_increment(module, value)) is not None:
            added, value = added + increment, _origin(body, body.by_name.get(value.operands[0]))
            continue
        if value.opcode != "add" or len(value.operands) != 2:
            return None
        sides = [_origin(body, body.by_name.get(o)) for o in value.operands]
        numbers = [_value(side) if side is not None else None for side in sides]
        if numbers[1] is not None:
            added, value = added + numbers[1], sides[0]
        elif numbers[0] is not None:
            added, value = added + numbers[0], sides[1]
        else:
            return None
    return None


def _fused_increment(module: HloModule, fusion: Instruction) -> int | None:
    """Returns the constant of a fusion that only computes `parameter + constant`; None for any other fusion."""
    inner = module.computations.get(fusion.called_computations[0]) if fusion.called_computations else None
    if inner is None or inner.root is None or inner.root.opcode != "add" or len(fusion.operands) != 1:
        return None
    numbers = [_value(i) for o in inner.root.operands if (i := inner.by_name.get(o)) is not None]
    return next((n for n in numbers if n is not None), None)


def _element(caller: Computation, operand: str, index: int) -> Instruction | None:
    """Returns the instruction that made one element of a tuple."""
    made = caller.by_name.get(operand)
    if made is None or made.opcode != "tuple" or index >= len(made.operands):
        return None
    return caller.by_name.get(made.operands[index])


def _constant(computation: Computation, instruction: Instruction | None) -> int | None:
    source = _origin(computation, instruction)
    return _value(source) if source is not None else None


def _origin(computation: Computation, instruction: Instruction | None) -> Instruction | None:
    """Returns the instruction that made a value, stepping back over copies and the like."""
    for _ in range(len(computation.instructions)):
        if instruction is None or instruction.opcode not in _FORWARDING or not instruction.operands:
            break
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction


def _value(instruction: Instruction) -> int | None:
    """Returns the value of an integer constant; None for any other instruction."""
    text = instruction.literal.strip()
    return int(text) if instruction.opcode == "constant" and len(text) < 19 and _is_integer(text) else None


def _is_integer(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit()
