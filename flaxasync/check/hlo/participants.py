"""Which devices take part in a collective, read from its attributes."""

import math
import re

from flaxasync.check.hlo.module import Instruction

MAX_DEVICES = 1 << 16  # groups of more devices than this are not expanded, so that no text can exhaust the memory

_AXIS = re.compile(r"'([^']+)'\s*=\s*(\d{1,9})")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIR = re.compile(r"\{\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")


def permute_pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Returns the (source, target) pairs of a collective-permute."""
    return tuple((int(a), int(b)) for a, b in _PAIR.findall(instruction.attributes.get("source_target_pairs", "")))


def replica_groups(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that exchange data in a collective.

    All three notations are read: lists ({{0,1},{2,3}}), iota ([2,4]<=[8]T(1,0)) and named axes (mesh['x'=2,'y'=4]
    {'y'}). Where the text names no groups, or names them in a way that cannot be read, all devices are one group.
    """
    text = instruction.attributes.get("replica_groups", "")
    everyone = (tuple(range(devices)),)
    if match := _IOTA.search(text):
        groups = _iota_groups(match)
    elif text.startswith("mesh["):
        groups = _mesh_groups(text)
    else:
        lists = [tuple(int(n[:9]) for n in re.findall(r"\d+", group)) for group in re.findall(r"\{([\d,\s]+)\}", text)]
        groups = tuple(group for group in lists if group)
    return groups or everyone


def _iota_groups(match: re.Match) -> tuple[tuple[int, ...], ...]:
    shape, dims = ([int(n[:9]) for n in match[i].split(",") if n] for i in (1, 2))
    count = math.prod(dims)
    if not shape or count != math.prod(shape) or not 0 < count <= MAX_DEVICES:
        return ()
    order = [int(n[:9]) for n in (match[3] or "").split(",") if n] or list(range(len(dims)))
    if sorted(order) != list(range(len(dims))):
        return ()
    ids = _transposed_iota(dims, order)
    size = shape[-1]
    return tuple(tuple(ids[i : i + size]) for i in range(0, count, size))


def _mesh_groups(text: str) -> tuple[tuple[int, ...], ...]:
    inside, _, chosen = text.partition("]")
    axes = [(name, int(size)) for name, size in _AXIS.findall(inside)]
    wanted = re.findall(r"'([^']+)'", chosen)
    dims = [size for _, size in axes]
    count = math.prod(dims)
    if not axes or not wanted or "(" in chosen or not 0 < count <= MAX_DEVICES:
        return ()  # this notation can also name a part of an axis, which is not read
    last = [i for i, (name, _) in enumerate(axes) if name in wanted]
    first = [i for i in range(len(axes)) if i not in last]
    ids = _transposed_iota(dims, first + last)
    size = math.prod(dims[i] for i in last)
    return tuple(tuple(ids[i : i + size]) for i in range(0, count, size))


def _transposed_iota(dims: list[int], order: list[int]) -> list[int]:
    """Returns the numbers 0, 1, ... in an array of shape `dims`, with its axes permuted to `order`, as a flat list."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    ids = [0]
    for axis in order:
        ids = [base + k * strides[axis] for base in ids for k in range(dims[axis])]
    return ids
