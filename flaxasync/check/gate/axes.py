"""Names the mesh axes over which a collective communicates.

HLO text mostly gives lists of devices and not names of axes. A list of groups has the name of an axis if it is the list
of the lines of the mesh along that axis. The mesh is the caller's, or one that the text itself names in a notation such
as `mesh['data'=2,'model'=4] {'data'}`.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping

from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.participants import permute_pairs, replica_groups

_MESH = re.compile(r"mesh\[([^\]]*)\]\s*\{")  # a mesh whose devices are in order
_AXIS = re.compile(r"""['"]([^'"]+)['"]\s*=\s*(\d{1,9})""")
_GENERATED = re.compile(r"axis_\d+|_axis_\d+")  # the names that XLA gives to axes that it does not know


class AxisNames:
    """The names of the axes of one program's mesh.

    Args:
      module: The program.
      axes: The sizes of the mesh axes, by name, in the order of the mesh. By default the axes that the text names.
    """

    def __init__(self, module: HloModule, axes: Mapping[str, int] | None = None):
        self.devices = module.num_partitions
        self.axes = dict(axes) if axes else _axes_in_text(module)
        if math.prod(self.axes.values()) != self.devices:
            self.axes = {}
        self._names = dict(self._groups_of_axes())

    def of(self, collective: Instruction) -> str:
        """Returns the axes of a collective: "model", "data and model", or "groups of 4" if they have no name."""
        pairs = [(a, b) for a, b in permute_pairs(collective) if a != b]
        if "source_target_pairs" in collective.attributes:
            return self._of_pairs(pairs)
        if "replica_groups" not in collective.attributes:
            return ""
        groups = replica_groups(collective, self.devices)
        if set(map(len, groups)) == {1}:
            return "no axis"
        return self._names.get(_canonical(groups)) or f"groups of {max(map(len, groups))}"

    def _of_pairs(self, pairs: list[tuple[int, int]]) -> str:
        """Returns the fewest axes that contain every pair of a permute."""
        for groups, name in self._names.items():
            group_of = {device: n for n, group in enumerate(groups) for device in group}
            if all(group_of.get(a) == group_of.get(b) for a, b in pairs):
                return name
        return "pairs"

    def _groups_of_axes(self) -> Iterable[tuple[tuple[tuple[int, ...], ...], str]]:
        """Yields the groups of each set of axes, with its name, the smallest sets first."""
        names = [name for name, size in self.axes.items() if size > 1]
        for count in range(1, len(names) + 1):
            for chosen in itertools.combinations(names, count):
                yield _canonical(self._lines(chosen)), " and ".join(chosen)

    def _lines(self, chosen: tuple[str, ...]) -> list[list[int]]:
        """Returns the devices of each line of the mesh along the chosen axes."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for device, at in enumerate(itertools.product(*(range(size) for size in self.axes.values()))):
            rest = tuple(n for n, name in zip(at, self.axes, strict=True) if name not in chosen)
            lines.setdefault(rest, []).append(device)
        return list(lines.values())


def _axes_in_text(module: HloModule) -> dict[str, int]:
    for computation in module.computations.values():
        for i in computation.instructions:
            if match := _MESH.match(i.attributes.get("replica_groups", "")):
                axes = {name: int(size) for name, size in _AXIS.findall(match[1])}
                if axes and not any(_GENERATED.fullmatch(name) for name in axes):
                    return axes
    return {}


def _canonical(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(group)) for group in groups))
