"""Which devices take part in a collective, and the mesh axes along which they differ.

XLA writes the groups of a collective in four notations:

```
{{0,1},{2,3}}                                        lists of device ids; {} for one group of all devices
[2,4]<=[4,2]T(1,0)                                   two groups of four: 0..7 as [4, 2], transposed, split in two
mesh['x'=2,'y'=4] {'y'}                              one group for each line of a mesh along the named axes
mesh['x'=2,'y'=4], device_ids=(0,4,...) {'y':(1)2}   the same with other devices, or along a sub-axis
```

A sub-axis `'y':(p)n` is the middle factor of an axis that is split into p times n times the rest.
Any other notation raises HloError, because groups that were guessed would make every later result
wrong.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.shapes import HloError

# groups of more devices than this are refused, so that no text can exhaust the memory
MAX_DEVICES = 1 << 16

_LISTS = re.compile(r"\{[0-9,{}\s]*\}")
_DIMENSIONS = r"\[([0-9,\s]*)\]"
_TRANSPOSE = r"(?:T\(([0-9,\s]*)\))?"
_IOTA = re.compile(rf"{_DIMENSIONS}<={_DIMENSIONS}{_TRANSPOSE}")
_DEVICE_IDS = re.compile(rf"{_DIMENSIONS}{_TRANSPOSE}")
_MESH = re.compile(r"mesh\[([^\[\]{}]+)\]\s*(?:,\s*device_ids\s*=\s*\(([^{}]*)\)\s*)?\{([^{}]*)\}")
_AXIS = re.compile(r"""\s*['"]([^'"]+)['"]\s*=\s*([0-9]{1,9})\s*""")
_CHOSEN = re.compile(r"""\s*['"]([^'"]+)['"]\s*(?::\s*\(([0-9]{1,9})\)\s*([0-9]{1,9})\s*)?""")
_GENERATED = re.compile(r"_?axis_\d+")  # the names that XLA gives to axes that it does not know

type Groups = tuple[tuple[int, ...], ...]


def permute_pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Returns the (source, target) pairs of a collective-permute. HloError says that they are not
    {{0,1},{1,0}}.
    """
    text = instruction.attributes.get("source_target_pairs", "{}")
    pairs = _pairs(text)
    if pairs is None:
        raise _error(instruction, "source_target_pairs", text)
    return pairs


def groups_in(collective: Instruction) -> Groups:
    """Returns the groups of devices that exchange data in a collective of a program.

    A collective that names no groups is one of all devices. Without a channel it is one of all
    replicas, if the program has several.
    """
    module = collective.computation.module
    between_replicas = module.num_replicas > 1 and "channel_id" not in collective.attributes
    return replica_groups(
        collective, module.num_replicas if between_replicas else module.num_devices
    )


def replica_groups(instruction: Instruction, devices: int) -> Groups:
    """Returns the groups of devices that exchange data in a collective; one group of all if the
    text names none.
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


class AxisNames:
    """The names of the axes of one program's mesh: `axes`, in the order of the mesh, or those that
    the text names.
    """

    def __init__(self, module: HloModule, axes: Mapping[str, int] | None = None):
        self.devices = module.num_devices
        if axes:
            named = dict(axes)
        else:
            named = _axes_in_text(module)
        self.axes = named if math.prod(named.values()) == self.devices else {}

    def of(self, collective: Instruction) -> str:
        """Returns the axes of a collective: "model", "data and model", or "groups of 4" if they
        have no name.
        """
        if "source_target_pairs" in collective.attributes:
            return " and ".join(self._differing(permute_pairs(collective))) or "pairs"
        if "replica_groups" not in collective.attributes:
            return ""
        groups = groups_in(collective)
        sizes = {len(group) for group in groups}
        differing = self._differing(groups)
        if sizes == {1}:
            return "no axis"
        if differing and sizes == {math.prod(self.axes[name] for name in differing)}:
            return " and ".join(differing)
        return f"groups of {max(sizes)}"

    def _differing(self, groups: Iterable[Sequence[int]]) -> list[str]:
        """Returns the axes along which the devices of at least one group differ."""
        differing = []
        inner = self.devices
        for name, size in self.axes.items():
            inner //= size  # devices that follow one another without a step along this axis
            if any(len({device // inner % size for device in group}) > 1 for group in groups):
                differing.append(name)
        return differing


def _axes_in_text(module: HloModule) -> dict[str, int]:
    """Returns the axes of a mesh that the text names, whose devices are in order; {} if there is
    none.
    """
    for i in module.instructions:
        match = _MESH.fullmatch(i.attributes.get("replica_groups", ""))
        if (
            match
            and match[2] is None
            and not any(_GENERATED.fullmatch(name) for name in _axes(match[1]))
        ):
            return _axes(match[1])
    return {}


# a program repeats few of these texts, and asks for each one often
@functools.lru_cache(maxsize=64)
def _pairs(text: str) -> tuple[tuple[int, int], ...] | None:
    """Reads {{0,1},{1,0}}; None if the text is something else."""
    pairs = _lists(text)
    if pairs is None or any(len(pair) != 2 for pair in pairs):
        return None
    return tuple((source, target) for source, target in pairs)


@functools.lru_cache(maxsize=64)
def _groups(text: str, devices: int) -> Groups | None:
    """Returns the groups; None if the text cannot be read, or if a device is in two of them."""
    groups = _in_any_notation(text, devices)
    if not groups or not all(groups):
        return None
    members = [device for group in groups for device in group]
    if len(set(members)) < len(members):
        return None
    return groups


def _in_any_notation(text: str, devices: int) -> Groups | None:
    if match := _IOTA.fullmatch(text):
        shape = _numbers(match[1])
        ids = _iota(match[2], match[3])
        fits = len(shape) == 2 and len(ids) == math.prod(shape) > 0
        if fits:
            return tuple(itertools.batched(ids, shape[1]))
        return None
    if match := _MESH.fullmatch(text):
        return _mesh_groups(*match.groups())
    if text == "{}":
        return (tuple(range(devices)),)
    return _lists(text)


def _lists(text: str) -> Groups | None:
    """Reads {{0,1},{2,3}}; None if the text is something else."""
    try:
        if _LISTS.fullmatch(text):
            lists = json.loads(text.replace("{", "[").replace("}", "]"))
        else:
            lists = None
    except (ValueError, RecursionError):
        return None
    if lists is None or not all(
        isinstance(one, list) and all(isinstance(n, int) for n in one) for one in lists
    ):
        return None
    return tuple(map(tuple, lists))


def _mesh_groups(axes: str, device_ids: str | None, chosen: str) -> Groups | None:
    """Returns the groups of mesh[axes], device_ids=(device_ids) {chosen}; None if the text cannot
    be read.
    """
    sizes = _axes(axes)
    factors = _factors(chosen, sizes)
    count = math.prod(sizes.values())
    if not sizes or not 0 < count <= MAX_DEVICES or factors is None:
        return None
    ids = list(range(count))
    if device_ids is not None:
        iota = _DEVICE_IDS.fullmatch(device_ids)
        if iota:
            ids = _iota(iota[1], iota[2])
        else:
            ids = _numbers(device_ids)
        if sorted(ids) != list(range(count)):
            return None
    # The devices of a group differ in the chosen digits of their coordinates alone. Here they are
    # by the rest of their coordinates, and then by these digits.
    groups: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    for device, at in zip(ids, itertools.product(*map(range, sizes.values())), strict=True):
        rest = dict(zip(sizes, at, strict=True))
        digits = tuple(rest[axis] // stride % size for axis, stride, size in factors)
        for (axis, stride, _), digit in zip(factors, digits, strict=True):
            rest[axis] -= digit * stride
        groups.setdefault(tuple(rest.values()), {})[digits] = device
    if any(len(group) != math.prod(size for _, _, size in factors) for group in groups.values()):
        return None  # sub-axes overlap
    return tuple(tuple(group[digits] for digits in sorted(group)) for group in groups.values())


def _axes(text: str) -> dict[str, int]:
    """Returns the sizes in 'x'=2,'y'=4 by name; {} if the text is something else, or names an axis
    twice.
    """
    matches = [_AXIS.fullmatch(one) for one in text.split(",")]
    sizes = {match[1]: int(match[2]) for match in matches if match}
    if len(sizes) == len(matches):
        return sizes
    return {}


def _factors(text: str, sizes: Mapping[str, int]) -> list[tuple[str, int, int]] | None:
    """Returns (axis, stride along the axis, size) for each axis or sub-axis in 'y':(1)2; None if
    unreadable.
    """
    factors = []
    for one in text.split(",") if text.strip() else []:
        match = _CHOSEN.fullmatch(one)
        if not match or match[1] not in sizes:
            return None
        whole = sizes[match[1]]
        before, size = (int(match[2]), int(match[3])) if match[2] else (1, whole)
        if not before or size < (2 if match[2] else 1) or whole % (before * size):
            return None
        factors.append((match[1], whole // (before * size), size))
    return factors


def _iota(dimensions: str, permutation: str | None) -> list[int]:
    """Returns 0, 1, ... in an array of these dimensions, transposed, as a flat list; [] if they
    cannot be.
    """
    dims = _numbers(dimensions)
    if permutation is None:
        order = list(range(len(dims)))
    else:
        order = _numbers(permutation)
    if sorted(order) != list(range(len(dims))) or not dims or math.prod(dims) > MAX_DEVICES:
        return []
    ids = [0]
    for axis in order:
        stride = math.prod(dims[axis + 1 :])
        ids = [base + k * stride for base in ids for k in range(dims[axis])]
    return ids


def _numbers(text: str) -> list[int]:
    return [int(number[:9]) for number in re.findall("[0-9]+", text)]


def _error(instruction: Instruction, name: str, text: str) -> HloError:
    if len(text) < 120:
        excerpt = text
    else:
        excerpt = text[:120] + "..."
    return instruction.error(f"{name} of '{instruction.name}' cannot be read: got {excerpt!r}")
