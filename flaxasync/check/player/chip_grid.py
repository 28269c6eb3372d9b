"""The chips of a topology: their coordinates, and the links that a transfer between two of them crosses."""

import dataclasses
import functools
import math
import re

from flaxasync.check.player.errors import MeshMismatchError, PlayerError
from flaxasync.hardware import CHIPS

_DEVICES_PER_CHIP = {"tpu7x": 2}  # one for every other chip
_NAME = re.compile(r"([a-z0-9]+):(\d+)x(\d+)(?:x(\d+))?")

Coords = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ChipGrid:
    """Chips on a grid. They are numbered with the first coordinate running fastest, as libtpu numbers them."""

    name: str
    shape: Coords  # the number of chips in each of three dimensions
    cores: int  # the number of devices of one chip
    wraps: tuple[bool, ...]  # whether each dimension closes into a ring

    @property
    def devices(self) -> int:
        return math.prod(self.shape) * self.cores

    def chip_id(self, coords: Coords) -> int:
        x, y, z = coords
        return x + self.shape[0] * (y + self.shape[1] * z)

    def coords(self, chip_id: int) -> Coords:
        x, rest = chip_id % self.shape[0], chip_id // self.shape[0]
        return (x, rest % self.shape[1], rest // self.shape[1])

    @functools.cache  # noqa: B019, there is one grid in a simulation
    def route(self, source: Coords, target: Coords) -> tuple[tuple[str, Coords, Coords], ...]:
        """Returns the directed links from one chip to another: along x, then y, then z, in the shorter direction."""
        path, here = [], list(source)
        for axis, size in enumerate(self.shape):
            while here[axis] != target[axis]:
                step = 1 if target[axis] > here[axis] else -1
                if self.wraps[axis] and abs(target[axis] - here[axis]) > size / 2:
                    step = -step
                before = tuple(here)
                here[axis] = (here[axis] + step) % size  # the modulus changes nothing where the dimension does not wrap
                path.append(("link", before, tuple(here)))
        return tuple(path)


def chip_grid(name: str) -> ChipGrid:
    """Reads a topology's name: "v5e:2x4", "v5p:2x2x2"."""
    match = _NAME.fullmatch(name)
    if not match and "*" in name:
        raise PlayerError(f"the player simulates one slice: got {name!r}; compile for {name.partition('*')[0]!r}")
    if not match:
        raise PlayerError(f"topology must be a chip and its grid, like 'v5e:2x4' or 'v5p:2x2x2': got {name!r}")
    shape = tuple(int(n or 1) for n in match.groups()[1:])
    chip = CHIPS.get(match[1])
    wraps = chip.wraps(shape) if chip is not None else (False,) * len(shape)
    return ChipGrid(name, shape, _DEVICES_PER_CHIP.get(match[1], 1), wraps)


def coords_of_partitions(grid: ChipGrid, devices: int, coords: tuple[Coords, ...]) -> tuple[Coords, ...]:
    """Returns the chip of each partition, as three coordinates: that in `coords`, or if it is empty, of its number."""
    if devices != grid.devices:
        raise MeshMismatchError(
            f"the program was compiled for {devices} devices, but {grid.name} has {grid.devices}: "
            "name the topology that it was compiled for"
        )
    in_order = tuple(grid.coords(n // grid.cores) for n in range(devices))
    full = tuple((*c, 0, 0)[:3] for c in coords) or in_order
    if sorted(full) != sorted(in_order):
        raise MeshMismatchError(
            f"the order of the mesh must name each chip of {grid.name} {grid.cores} time(s), within {grid.shape}: "
            f"got {full}"
        )
    return full
