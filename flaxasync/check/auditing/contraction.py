"""Whether a matmul sums over a given dimension of an array, which may reach it through reshapes and fusions."""

import math
import re

from flaxasync.check.hlo.module import Computation, HloModule, Instruction
from flaxasync.check.hlo.shapes import Shape

_WINDOW = re.compile(r"size=([\dx]{1,99})")


def partial_sum_bytes(
    module: HloModule, computation: Computation, matmul: Instruction, made: Instruction, axis: int
) -> int:
    """Returns the bytes of the product of a matmul that sums over a dimension of what `made` makes; 0 for any other.

    A ring that multiplies one block of such a dimension at a time adds up as many products of this size.
    """
    names, seen = _same_elements(computation, {made.name}, made.shape), {computation.name}
    while matmul.opcode == "fusion":
        computation = module.called(matmul)[0]
        if computation.name in seen:
            return 0
        seen.add(computation.name)
        entered = {p.name for n, p in computation.parameters.items() if names & {*matmul.operands[n : n + 1]}}
        names = _same_elements(computation, entered, made.shape)
        inside = [i for i in computation.instructions if module.contains_matmul(i) and not names.isdisjoint(i.operands)]
        if not inside:
            return 0
        matmul = inside[0]
    return matmul.shape.bytes if _sums_over(computation, matmul, names, made.shape, axis) else 0


def _same_elements(computation: Computation, names: set[str], array: Shape) -> set[str]:
    """Returns the names of an array and of everything that is made of it and has as many elements."""
    found = set(names)
    for i in computation.instructions:
        if not found.isdisjoint(i.operands) and math.prod(i.shape.dimensions) == math.prod(array.dimensions):
            found.add(i.name)
    return found


def _sums_over(computation: Computation, product: Instruction, names: set[str], array: Shape, axis: int) -> bool:
    """Says whether a dot or a convolution sums over a dimension; False if reshapes have split or merged dimensions."""
    number = next((n for n, operand in enumerate(product.operands[:2]) if operand in names), None)
    if number is None or axis >= len(array.dimensions) or array.dimensions[axis] == 1:
        return False
    made = computation.operands(product)[number].shape.dimensions
    # Reshapes that only add and remove dimensions of size one keep the order of the others.
    kept = [n for n, size in enumerate(made) if size != 1]
    if [made[n] for n in kept] != [size for size in array.dimensions if size != 1]:
        return False
    at = kept[sum(size != 1 for size in array.dimensions[:axis])]
    if product.opcode == "dot":
        text = product.attributes.get("rhs_contracting_dims" if number else "lhs_contracting_dims", "")
        return str(at) in re.findall(r"\d+", text)
    sides = product.attributes.get("dim_labels", "").split("->")[0].split("_")
    label = sides[number][at : at + 1] if len(sides) == 2 else ""
    if label.isascii() and label.isdigit():  # a dimension along which a window moves: a sum if it covers all of it
        window = _WINDOW.search(product.attributes.get("window", ""))
        sizes = window[1].split("x") if window else []
        return int(label) < len(sizes) and sizes[int(label)] == str(made[at])
    return label == ("i" if number else "f")
