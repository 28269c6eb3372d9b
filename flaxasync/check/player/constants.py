"""Integer constants in the text of a program: their elements, and the words of memory that hold them.

Kernels read tables from such constants, for example which tiles they visit. The simulator knows the contents of no
other array.
"""

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence

from flaxasync.check.hlo.module import Instruction
from flaxasync.check.hlo.shapes import Shape, element_bits

# The elements of the result are those of the operand, in the same order; those of a broadcast are repeated.
_SAME = frozenset({"bitcast", "copy", "copy-done", "copy-start", "reshape", "broadcast"})
_TILES = re.compile(r"T\(((?:\d+,)?\d+)\)(?:\(128\))?(?:\(([24]),1\))?")
LANES = 128


def integer_elements(instructions: Mapping[str, Instruction], name: str) -> list[int] | None:
    """Returns the elements of a constant, or of one that was copied or repeated.

    The result is None where the text does not say. `instructions` are those of a computation, by name.
    """
    i = instructions.get(name)
    if i is None:
        return None
    if i.opcode in _SAME and i.operands:
        return integer_elements(instructions, i.operands[0])
    if i.opcode != "constant" or "..." in i.literal:
        return None
    return [int(number) for number in re.findall(r"-?\d+", i.literal)]


def words(shape: Shape, elements: Sequence[int]) -> list[int] | None:
    """Returns an array as the words of memory that hold it, tile by tile. Fewer elements than it has are repeated.

    s32[1,4,4]{2,1,0:T(4,128)} has one tile, of 512 words. Of narrower elements, as in s8[8,128]{1,0:T(8,128)(4,1)} or
    s8[10]{0:T(512)(128)(4,1)}, those of four rows of 128, or of two, make words. Words are unsigned 32-bit integers, 0
    beside the array. The result is None if the elements are no integers, or lie in another way.
    """
    layout, bits = shape.layout, element_bits(shape.element_type)
    found = _TILES.fullmatch(layout.tiling) if layout else None
    if layout is None or found is None or shape.element_type[0] not in "su" or not elements:
        return None
    tile, together = [int(size) for size in found[1].split(",")], int(found[2] or 1)
    if bits * together != 32:
        return None
    order = layout.minor_to_major[::-1]  # from here on the slowest dimension is first, and the last ones are in tiles
    above = (1,) * (len(tile) - len(order))
    sizes = (*above, *(shape.dimensions[dim] for dim in order))
    outer = len(sizes) - len(tile)
    counts = (*sizes[:outer], *(-(-size // side) for size, side in zip(sizes[outer:], tile, strict=True)))
    result = [0] * (math.prod(counts) * math.prod(tile) // together)
    indices = itertools.product(*map(range, shape.dimensions))
    for index, element in zip(indices, itertools.cycle(elements), strict=False):
        turned = (*(0 for _ in above), *(index[dim] for dim in order))
        inner = turned[outer:]
        place = 0
        for at, count in zip((*turned[:outer], *map(operator.floordiv, inner, tile)), counts, strict=True):
            place = place * count + at
        for at, side in zip(map(operator.mod, inner, tile), tile, strict=True):
            place = place * side + at
        row, lane = divmod(place, LANES)
        result[row // together * LANES + lane] |= (element & (1 << bits) - 1) << bits * (row % together)
    return result
