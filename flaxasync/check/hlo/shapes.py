"""Shapes and layouts of HLO values: their data and their text. `HloError` is the only error of
reading a text.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# The memory space that a TPU layout names as S(n). A layout without S(n) means HBM.
HBM = 0
VMEM = 1
SEMAPHORE = 2
SMEM = 4
HOST = 5

# Bits per element of the types whose name does not contain their size.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
# The greatest depth of tuples within tuples that is read. Real programs stay below ten; without a
# limit a hostile text would exhaust the stack.
MAX_DEPTH = 200

ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\[\](){}]*)\](\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})?")
_LAYOUT = re.compile(r"\{\s*([\d,\s]*)(?::(.*))?\}", re.DOTALL)
_SPACE = re.compile(r"(?<![A-Z])S\((\d{1,9})\)")
_DIMENSION = re.compile(r"\s*(<=)?(\d{1,18}|\?)\s*", re.ASCII)
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[{}()\[\],]', re.DOTALL)


class HloError(ValueError):
    """The text is not HLO that can be read, at `line` and `column`: counted from 1, and 0 if they
    are not known.
    """

    def __init__(self, message: str, line: int = 0, column: int = 0):
        super().__init__(f"line {line}, column {column}: {message}" if line else message)
        self.line = line
        self.column = column


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in memory."""

    minor_to_major: tuple[int, ...] = ()  # the dimensions, from the fastest-varying to the slowest
    tiling: str = ""  # as it was printed
    memory_space: int = HBM  # the n of S(n)

    def __str__(self) -> str:
        if self.memory_space:
            space = f"S({self.memory_space})"
        else:
            space = ""
        rest = self.tiling + space
        return "{" + ",".join(map(str, self.minor_to_major)) + (":" + rest if rest else "") + "}"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The shape of an array, or a tuple of shapes."""

    element_type: str  # "bf16", "f32", ...; "tuple" for a tuple
    dimensions: tuple[int, ...] = ()  # a size of -1 is unbounded
    layout: Layout | None = None  # None if the text has none
    elements: tuple["Shape", ...] = ()  # the shapes in a tuple
    # for each dimension, whether its size is only an upper bound; () if none is
    dynamic: tuple[bool, ...] = ()
    is_buffer: bool = False  # whether the text names a buffer that holds the array, b(f32[8])

    @property
    def is_tuple(self) -> bool:
        return self.element_type == "tuple"

    @property
    def memory_space(self) -> int:
        if self.layout:
            return self.layout.memory_space
        return HBM

    @property
    def bytes(self) -> int:
        """The bytes of all elements, without the padding of tiles. For a tuple, the sum over its
        elements.
        """
        if self.is_tuple:
            return sum(element.bytes for element in self.elements)
        return _array_bytes(self.element_type, self.dimensions)

    def leaves(self, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], "Shape"]]:
        """Yields (index path, shape) of every array in this shape."""
        if not self.is_tuple:
            yield path, self
        for i, element in enumerate(self.elements):
            yield from element.leaves((*path, i))

    def at(self, path: tuple[int, ...]) -> "Shape | None":
        """Returns the shape at an index path, or None if the path leads nowhere."""
        shape = self
        for i in path:
            if i >= len(shape.elements):
                return None
            shape = shape.elements[i]
        return shape

    def without_layout(self) -> str:
        """Returns the text of the shape as the signature of a computation prints it, without
        layouts.
        """
        if self.is_tuple:
            return "(" + ", ".join(element.without_layout() for element in self.elements) + ")"
        dynamic = self.dynamic or (False,) * len(self.dimensions)
        dims = (
            "?" if d < 0 else f"<={d}" if b else str(d)
            for d, b in zip(self.dimensions, dynamic, strict=True)
        )
        array = f"{self.element_type}[{','.join(dims)}]"
        if self.is_buffer:
            return f"b({array})"
        return array

    def is_like(self, other: "Shape") -> bool:
        """Says whether two shapes are the same but for their layouts, and for buffers that hold
        their arrays.
        """
        if self.is_tuple and other.is_tuple and len(self.elements) == len(other.elements):
            return all(
                one.is_like(two) for one, two in zip(self.elements, other.elements, strict=True)
            )
        mine = (self.element_type, self.dimensions, len(self.elements))
        return mine == (other.element_type, other.dimensions, len(other.elements))

    def __str__(self) -> str:
        if self.is_tuple:
            return "(" + ", ".join(map(str, self.elements)) + ")"
        if self.is_buffer:
            return f"b({dataclasses.replace(self, is_buffer=False)})"
        return self.without_layout() + (str(self.layout) if self.layout else "")


# a program repeats few shapes, and asks for the size of each one often
@functools.lru_cache(maxsize=4096)
def _array_bytes(element_type: str, dimensions: tuple[int, ...]) -> int:
    return -(-math.prod(max(d, 0) for d in dimensions) * element_bits(element_type) // 8)


def element_bits(element_type: str) -> int:
    """Returns the bits of one element: 16 for bf16, 8 for pred and f8e4m3fn, 4 for s4, 0 for a
    token.
    """
    if element_type in _BITS:
        return _BITS[element_type]
    match = re.match(r"[a-z]+(\d+)", element_type)
    if match:
        return int(match[1])
    return 0


def read_shape(text: str) -> Shape:
    """Reads `bf16[8,128]{1,0:T(8,128)S(1)}`, `(f32[2], (s32[], pred[4]))` or `b(f32[8])`.

    Its HloError has no line and column.
    """
    if _depth(text) > MAX_DEPTH:
        raise HloError(f"tuples nested deeper than {MAX_DEPTH}")
    return _read(text)


def split_at_commas(text: str) -> list[str]:
    """Splits a text at the commas that are outside of every bracket, string and comment."""
    parts = []
    depth = 0
    start = 0
    for token in _MARK.finditer(text):
        mark = token[0]
        if mark in "{([":
            depth += 1
        elif mark in "})]":
            depth -= 1
        elif mark == "," and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def _read(text: str) -> Shape:
    text = text.strip()
    if text.startswith("("):
        if not text.endswith(")"):
            raise HloError(f"expected a shape: got {text[:40]!r}")
        inside = text[1:-1]
        if inside.strip():
            parts = split_at_commas(inside)
        else:
            parts = []
        return Shape("tuple", elements=tuple(_read(part) for part in parts))
    is_buffer = text.startswith("b(") and text.endswith(")")
    match = ARRAY.fullmatch(text[2:-1].strip() if is_buffer else text)
    if not match:
        raise HloError(f"expected a shape: got {text[:40]!r}")
    dims = []
    dynamic = []
    for part in match[2].split(",") if match[2].strip() else ():
        size = _DIMENSION.fullmatch(part)
        if not size:
            raise HloError(f"expected the size of a dimension: got {part[:40]!r}")
        dims.append(-1 if size[2] == "?" else int(size[2]))
        dynamic.append(bool(size[1]))
    if match[3]:
        layout = _read_layout(match[3])
    else:
        layout = None
    return Shape(
        match[1], tuple(dims), layout, (), tuple(dynamic) if any(dynamic) else (), is_buffer
    )


def _read_layout(text: str) -> Layout:
    match = _LAYOUT.fullmatch(text)
    if match:
        order = [part.strip() for part in match[1].split(",") if part.strip()]
    else:
        order = [""]
    if match is None or any(len(part) > 9 or not part.isdigit() for part in order):
        raise HloError(f"expected a layout: got {text[:40]!r}")
    rest = match[2] or ""
    space = _SPACE.search(rest)
    tiling = _SPACE.sub("", rest, count=1)
    if _SPACE.search(tiling):
        raise HloError(f"a layout has one memory space: got {text[:40]!r}")
    return Layout(tuple(map(int, order)), tiling, int(space[1]) if space else 0)


def _depth(text: str) -> int:
    depth = deepest = 0
    for mark in text if text.startswith("(") else ():
        depth += (mark == "(") - (mark == ")")
        deepest = max(deepest, depth)
    return deepest
