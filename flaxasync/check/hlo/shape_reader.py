"""Reads the text of one shape: an array with its layout and memory space, or a tuple of shapes."""

import re

from flaxasync.check.hlo.error import HloError
from flaxasync.check.hlo.shapes import Layout, Shape

# The greatest depth of tuples within tuples that is read. Real programs stay below ten; without a limit a hostile text
# would exhaust the stack.
MAX_DEPTH = 200

ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\[\](){}]*)\](\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})?")
_LAYOUT = re.compile(r"\{\s*([\d,\s]*)(?::(.*))?\}", re.DOTALL)
_SPACE = re.compile(r"(?<![A-Z])S\((\d{1,9})\)")
_DIMENSION = re.compile(r"\s*(<=)?(\d{1,18}|\?)\s*", re.ASCII)
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[{}()\[\],]', re.DOTALL)


def read_shape(text: str) -> Shape:
    """Reads `bf16[8,128]{1,0:T(8,128)S(1)}` or `(f32[2], (s32[], pred[4]))`.

    Raises:
      HloError: The text is not a shape. The error has no line and column, because only the caller knows them.
    """
    if _depth(text) > MAX_DEPTH:
        raise HloError(f"tuples nested deeper than {MAX_DEPTH}")
    return _read(text)


def split_at_commas(text: str) -> list[str]:
    """Splits a text at the commas that are outside of every bracket, string and comment."""
    parts, depth, start = [], 0, 0
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
        parts = split_at_commas(inside) if inside.strip() else []
        return Shape("tuple", elements=tuple(_read(part) for part in parts))
    match = ARRAY.fullmatch(text)
    if not match:
        raise HloError(f"expected a shape: got {text[:40]!r}")
    dims, dynamic = [], []
    for part in match[2].split(",") if match[2].strip() else ():
        size = _DIMENSION.fullmatch(part)
        if not size:
            raise HloError(f"expected the size of a dimension: got {part[:40]!r}")
        dims.append(-1 if size[2] == "?" else int(size[2]))
        dynamic.append(bool(size[1]))
    layout = _read_layout(match[3]) if match[3] else None
    return Shape(match[1], tuple(dims), layout, (), tuple(dynamic) if any(dynamic) else ())


def _read_layout(text: str) -> Layout:
    match = _LAYOUT.fullmatch(text)
    order = [part.strip() for part in match[1].split(",") if part.strip()] if match else [""]
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
    for mark in text if text.startswith("((") else ():
        depth += (mark == "(") - (mark == ")")
        deepest = max(deepest, depth)
    return deepest
