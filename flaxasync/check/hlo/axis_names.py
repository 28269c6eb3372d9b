"""Names the mesh axes over which a collective communicates: those along which the devices of one group differ.

HLO text mostly gives lists of devices and not names of axes. The mesh is the caller's, or one that the text itself
names in a notation such as `mesh['data'=2,'model'=4] {'data'}`.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from flaxasync.check.hlo.module import HloModule, Instruction
from flaxasync.check.hlo.participants import permute_pairs, replica_groups

_MESH = re.compile(r"mesh\[([^\]]*)\]\s*\{")  # a mesh whose devices are in order
_AXIS = re.compile(r"""['"]([^'"]+)['"]\s*=\s*(\d{1,9})""")
_GENERATED = re.compile(r"_?axis_\d+")  # the names that XLA gives to axes that it does not know


class AxisNames:
    """The names of the axes of one program's mesh.

    Args:
      module: The program.
      axes: The sizes of the mesh axes, by name, in the order of the mesh. By default the axes that the text names.
    """

    def __init__(self, module: HloModule, axes: Mapping[str, int] | None = None):
        self.devices = module.num_partitions
        named = dict(axes) if axes else _axes_in_text(module)
        self.axes = named if math.prod(named.values()) == self.devices else {}

    def of(self, collective: Instruction) -> str:
        """Returns the axes of a collective: "model", "data and model", or "groups of 4" if they have no name."""
        if "source_target_pairs" in collective.attributes:
            return " and ".join(self._differing(permute_pairs(collective))) or "pairs"
        if "replica_groups" not in collective.attributes:
            return ""
        groups = replica_groups(collective, self.devices)
        sizes, differing = {len(group) for group in groups}, self._differing(groups)
        if sizes == {1}:
            return "no axis"
        if differing and sizes == {math.prod(self.axes[name] for name in differing)}:
            return " and ".join(differing)
        return f"groups of {max(sizes)}"

    def _differing(self, groups: Iterable[Sequence[int]]) -> list[str]:
        """Returns the axes along which the devices of at least one group differ."""
        differing, inner = [], self.devices
        for name, size in self.axes.items():
            inner //= size  # devices that follow one another without a step along this axis
            if any(len({device // inner % size for device in group}) > 1 for group in groups):
                differing.append(name)
        return differing


def _axes_in_text(module: HloModule) -> dict[str, int]:
    for computation in module.computations.values():
        for i in computation.instructions:
            if match := _MESH.match(i.attributes.get("replica_groups", "")):
                axes = {name: int(size) for name, size in _AXIS.findall(match[1])}
                if axes and not any(_GENERATED.fullmatch(name) for name in axes):
                    return axes
    return {}
