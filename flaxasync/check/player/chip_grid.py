"""Topology names -> chips: who sits where, and which links a transfer between two chips crosses."""

import dataclasses
import functools
import re

from flaxasync.check.player.errors import MeshMismatchError, PlayerError

CORES = {"tpu7x": 2}  # devices per chip
WRAP = 16  # a v5e or v6e torus closes on itself in a dimension of a full pod only
_NAME = re.compile(r"([a-z0-9]+):(\d+)x(\d+)(?:x(\d+))?")

Coords = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips on a grid, numbered with the first coordinate running fastest, as libtpu numbers them."""

    name: str
    shape: Coords
    cores: int

    @property
    def devices(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2] * self.cores

    def chip_id(self, coords: Coords) -> int:
        x, y, z = coords
        return x + self.shape[0] * (y + self.shape[1] * z)

    def coords(self, chip_id: int) -> Coords:
        x, rest = chip_id % self.shape[0], chip_id // self.shape[0]
        return (x, rest % self.shape[1], rest // self.shape[1])

    def _wraps(self, axis: int) -> bool:
        torus = self.name.startswith(("v5p", "tpu7x"))
        return self.shape[axis] >= (4 if torus else WRAP) and (not torus or self.shape[axis] % 4 == 0)

    @functools.cache  # noqa: B019  one topology a run
    def route(self, source: Coords, target: Coords) -> tuple[tuple[str, Coords, Coords], ...]:
        """Returns the directed links from one chip to another: along x, then y, then z, the short way round."""
        path, here = [], list(source)
        for axis, size in enumerate(self.shape):
            while here[axis] != target[axis]:
                step = 1 if target[axis] > here[axis] else -1
                if self._wraps(axis) and abs(target[axis] - here[axis]) > size / 2:
                    step = -step
                after = list(here)
                after[axis] = (here[axis] + step) % size if self._wraps(axis) else here[axis] + step
                path.append(("link", tuple(here), tuple(after)))
                here = after
        return tuple(path)


def topology(name: str) -> Topology:
    """Reads a topology's name: "v5e:2x4", "v5p:2x2x2".

    Raises:
      PlayerError: it is no such name.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise PlayerError(f"topology must be a chip and its grid, like 'v5e:2x4' or 'v5p:2x2x2': got {name!r}")
    shape = tuple(int(n or 1) for n in match.groups()[1:])
    return Topology(name, shape, CORES.get(match[1], 1))


def place_devices(grid: Topology, devices: int, coords: tuple[Coords, ...]) -> tuple[Coords, ...]:
    """Returns the chip of each partition.

    Args:
      grid: the topology.
      devices: partitions of the program.
      coords: the chip of each partition, where known; otherwise that of a mesh in the order of the devices.

    Raises:
      MeshMismatchError: the topology has another number of devices, or lacks a chip.
    """
    if devices != grid.devices:
        raise MeshMismatchError(
            f"the program was compiled for {devices} devices, but {grid.name} has {grid.devices}: "
            "name the topology that it was compiled for"
        )
    if not coords:
        return tuple(grid.coords(n // grid.cores) for n in range(devices))
    if len(coords) != devices:
        raise MeshMismatchError(
            f"the program has {devices} devices, but the order of the mesh names {len(coords)} chips"
        )
    full = tuple((*c, 0, 0)[:3] for c in coords)
    for c in full:
        if any(not 0 <= v < size for v, size in zip(c, grid.shape, strict=True)):
            raise MeshMismatchError(
                f"{grid.name} has no chip {c}: its grid is {grid.shape}; name the topology that it was compiled for"
            )
    counted = [full.count(c) for c in full]
    if set(counted) != {grid.cores}:
        raise MeshMismatchError(f"the order of the mesh must name each chip {grid.cores} time(s): got {full}")
    return full
