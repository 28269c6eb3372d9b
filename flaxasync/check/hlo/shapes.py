"""Shapes and layouts of HLO values, and the memory spaces of TPU layouts."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# The memory space that a TPU layout names as S(n). A layout without S(n) means HBM.
HBM, VMEM, SEMAPHORE, SMEM, HOST = 0, 1, 2, 4, 5

# Bits per element of the types whose name does not contain their size.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in memory."""

    minor_to_major: tuple[int, ...] = ()  # the dimensions, from the fastest-varying to the slowest
    tiling: str = ""  # as it was printed
    memory_space: int = HBM  # the n of S(n)

    def __str__(self) -> str:
        space = f"S({self.memory_space})" if self.memory_space else ""
        rest = self.tiling + space
        return "{" + ",".join(map(str, self.minor_to_major)) + (":" + rest if rest else "") + "}"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The shape of an array, or a tuple of shapes."""

    element_type: str  # "bf16", "f32", ...; "tuple" for a tuple
    dimensions: tuple[int, ...] = ()  # a size of -1 is unbounded
    layout: Layout | None = None  # None if the text has none
    elements: tuple["Shape", ...] = ()  # the shapes in a tuple
    dynamic: tuple[bool, ...] = ()  # for each dimension, whether its size is only an upper bound; () if none is

    @property
    def is_tuple(self) -> bool:
        return self.element_type == "tuple"

    @property
    def memory_space(self) -> int:
        return self.layout.memory_space if self.layout else HBM

    @property
    def bytes(self) -> int:
        """The bytes of all elements, without the padding of tiles. For a tuple, the sum over its elements."""
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
        """Returns the text of the shape as the signature of a computation prints it, without layouts."""
        if self.is_tuple:
            return "(" + ", ".join(element.without_layout() for element in self.elements) + ")"
        dynamic = self.dynamic or (False,) * len(self.dimensions)
        dims = ("?" if d < 0 else f"<={d}" if b else str(d) for d, b in zip(self.dimensions, dynamic, strict=True))
        return f"{self.element_type}[{','.join(dims)}]"

    def __str__(self) -> str:
        if self.is_tuple:
            return "(" + ", ".join(map(str, self.elements)) + ")"
        return self.without_layout() + (str(self.layout) if self.layout else "")


@functools.lru_cache(maxsize=4096)  # a program repeats few shapes, and asks for the size of each one often
def _array_bytes(element_type: str, dimensions: tuple[int, ...]) -> int:
    return -(-math.prod(max(d, 0) for d in dimensions) * element_bits(element_type) // 8)


def element_bits(element_type: str) -> int:
    """Returns the bits of one element: 16 for bf16, 8 for pred and f8e4m3fn, 4 for s4, 0 for a token."""
    if element_type in _BITS:
        return _BITS[element_type]
    match = re.match(r"[a-z]+(\d+)", element_type)
    return int(match[1]) if match else 0
