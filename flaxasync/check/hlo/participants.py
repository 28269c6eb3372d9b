"""Which devices take part in a collective, read from its attributes.

XLA writes the groups of a collective in four notations:

```
{{0,1},{2,3}}                                        lists of device ids; {} for one group of all devices
[2,4]<=[4,2]T(1,0)                                   two groups of four: 0..7 as [4, 2], transposed, split in two
mesh['x'=2,'y'=4] {'y'}                              one group for each line of a mesh along the named axes
mesh['x'=2,'y'=4], device_ids=(0,4,...) {'y':(1)2}   the same with other devices, or along a sub-axis
```

A sub-axis `'y':(p)n` is the middle factor of an axis that is split into p times n times the rest. Any other notation
raises HloError, because groups that were guessed would make every later result wrong.
"""

import functools
import itertools
import math
import re
from collections.abc import Sequence

from flaxasync.check.hlo.error import HloError
from flaxasync.check.hlo.module import Instruction

MAX_DEVICES = 1 << 16  # groups of more devices than this are refused, so that no text can exhaust the memory


def _several(one: str) -> str:
    """Returns a pattern that matches one or more times the pattern `one`, with commas between them."""
    return rf"{one}(?:\s*,\s*{one})*"


_NUMBER = "[0-9]{1,9}"
_LIST = re.compile(rf"\{{\s*(?:{_several(_NUMBER)}\s*)?\}}")
_LISTS = re.compile(rf"\{{\s*(?:{_several(_LIST.pattern)}\s*)?\}}")
_PAIR = re.compile(rf"\{{\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\}}")
_PAIRS = re.compile(rf"\{{\s*(?:{_several(_PAIR.pattern)}\s*)?\}}")
_DIMENSIONS = r"\[([0-9,\s]*)\]"
_TRANSPOSE = r"(?:T\(([0-9,\s]*)\))?"
_IOTA = re.compile(rf"{_DIMENSIONS}<={_DIMENSIONS}{_TRANSPOSE}")
_DEVICE_IDS = re.compile(rf"{_DIMENSIONS}{_TRANSPOSE}")
_NAME = r"""(?:'[^']+'|"[^"]+")"""
_AXIS = rf"{_NAME}\s*=\s*{_NUMBER}"
_MESH = re.compile(rf"mesh\[\s*({_several(_AXIS)})\s*\]\s*(?:,\s*device_ids\s*=\s*\(([^{{}}]*)\)\s*)?\{{([^{{}}]*)\}}")
_CHOSEN = re.compile(rf"\s*({_NAME})\s*(?::\s*\(({_NUMBER})\)\s*({_NUMBER})\s*)?")


def permute_pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Returns the (source, target) pairs of a collective-permute.

    Raises:
      HloError: The pairs are written in another way than {{0,1},{1,0}}.
    """
    text = instruction.attributes.get("source_target_pairs", "{}")
    pairs = _pairs(text)
    if pairs is None:
        raise _error(instruction, "source_target_pairs", text)
    return pairs


def replica_groups(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that exchange data in a collective.

    Args:
      instruction: The collective.
      devices: The number of devices of the program. They are one group if the text names no groups.

    Raises:
      HloError: The notation of the groups is unknown, or a device is in two groups.
    """
    text = instruction.attributes.get("replica_groups", "{}")
    groups = _groups(text, devices)
    if groups is None:
        raise _error(instruction, "replica_groups", text)
    return groups


def check_participants(instruction: Instruction) -> None:
    """Raises HloError if the devices that take part in an instruction cannot be read."""
    if "replica_groups" in instruction.attributes:
        replica_groups(instruction, 1)
    if "source_target_pairs" in instruction.attributes:
        permute_pairs(instruction)


@functools.lru_cache(maxsize=64)  # a program repeats few of them, and asks for each one often
def _pairs(text: str) -> tuple[tuple[int, int], ...] | None:
    """Returns the (source, target) pairs; None if the text cannot be read."""
    return tuple((int(a), int(b)) for a, b in _PAIR.findall(text)) if _PAIRS.fullmatch(text) else None


@functools.lru_cache(maxsize=64)
def _groups(text: str, devices: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the groups; None if the text cannot be read."""
    groups: Sequence[Sequence[int]] | None = None
    if match := _IOTA.fullmatch(text):
        groups = _iota_groups(match)
    elif match := _MESH.fullmatch(text):
        groups = _mesh_groups(match)
    elif _LISTS.fullmatch(text):
        groups = [_numbers(group) for group in _LIST.findall(text[1:-1])] or [range(devices)]
    if not groups or not all(groups) or len({d for group in groups for d in group}) != sum(map(len, groups)):
        return None
    return tuple(map(tuple, groups))


def _iota_groups(match: re.Match) -> list[list[int]] | None:
    shape, ids = _numbers(match[1]), _iota(match[2], match[3])
    if ids is None or len(shape) != 2 or len(ids) != math.prod(shape):
        return None
    return _cut(ids, shape[1])


def _mesh_groups(match: re.Match) -> list[list[int]] | None:
    axes = [(name[1:-1], int(size)) for name, size in re.findall(rf"({_NAME})\s*=\s*({_NUMBER})", match[1])]
    sizes = dict(axes)
    count, chosen = math.prod(sizes.values()), _chosen_axes(match[3], sizes)
    if len(sizes) != len(axes) or not 0 < count <= MAX_DEVICES or chosen is None:
        return None
    ids = list(range(count))
    if match[2] is not None:
        iota = _DEVICE_IDS.fullmatch(match[2])
        ids = (_iota(iota[1], iota[2]) or []) if iota else _numbers(match[2])
        if sorted(ids) != list(range(count)):
            return None
    groups: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}  # by what a group has in common: by chosen digits
    for device, at in zip(ids, itertools.product(*map(range, sizes.values())), strict=True):
        coordinates = dict(zip(sizes, at, strict=True))
        digits = tuple(coordinates[axis] // stride % inside for axis, stride, inside in chosen)
        for (axis, stride, _), digit in zip(chosen, digits, strict=True):
            coordinates[axis] -= digit * stride
        groups.setdefault(tuple(coordinates.values()), {})[digits] = device
    whole = math.prod(inside for _, _, inside in chosen)
    if any(len(group) != whole for group in groups.values()):
        return None  # sub-axes overlap
    return [[group[digits] for digits in sorted(group)] for group in groups.values()]


def _chosen_axes(text: str, sizes: dict[str, int]) -> list[tuple[str, int, int]] | None:
    """Returns (axis, stride along the axis, size) for each axis or sub-axis in `{'y':(1)2}`; None if unreadable."""
    chosen = []
    for one in text.split(",") if text.strip() else []:
        match = _CHOSEN.fullmatch(one)
        name = match[1][1:-1] if match else ""
        if match and name not in sizes and name.isascii() and name.isdecimal() and int(name) < len(sizes):
            name = list(sizes)[int(name)]
        if not match or name not in sizes:
            return None
        before, inside = (int(match[2]), int(match[3])) if match[2] else (1, sizes[name])
        if not before or inside < (2 if match[2] else 1) or sizes[name] % (before * inside):
            return None
        chosen.append((name, sizes[name] // (before * inside), inside))
    return chosen


def _iota(dimensions: str, permutation: str | None) -> list[int] | None:
    """Returns 0, 1, ... in an array of these dimensions, transposed, as a flat list."""
    dims = _numbers(dimensions)
    order = list(range(len(dims))) if permutation is None else _numbers(permutation)
    if sorted(order) != list(range(len(dims))) or not dims or not 0 < math.prod(dims) <= MAX_DEVICES:
        return None
    return _transposed(dims, order)


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """Returns the numbers 0, 1, ... in an array of shape `dims`, with its axes permuted to `order`, as a flat list."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    ids = [0]
    for axis in order:
        ids = [base + k * strides[axis] for base in ids for k in range(dims[axis])]
    return ids


def _cut(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def _numbers(text: str) -> list[int]:
    return [int(number[:9]) for number in re.findall("[0-9]+", text)]


def _error(instruction: Instruction, name: str, text: str) -> HloError:
    excerpt = text if len(text) < 120 else text[:120] + "..."
    return HloError(f"{name} of '{instruction.name}' cannot be read: got {excerpt!r}", instruction.line, 1)
