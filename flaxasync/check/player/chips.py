"""The chips that the player models: the timing of one chip, and the grid that links the chips of a
topology.

Peak rates, bandwidths and clocks are those of `flaxasync.hardware`, which takes them from data
sheets and from the compiler, and so are the efficiency of HBM (`hbm_efficiency`) and the latency of
transfers within a chip (`memory_latency`). This table adds the timing of the matrix units, the
efficiency of links and the latencies between chips. Only v5e was calibrated on measurements. The
numbers of other chips that are marked "assumed" were not measured, and results on those chips say
so.

| number | v5e | other chips |
|---|---|---|
| `push`, `latency`, `results` | the spacing that the compiler keeps between a push, a multiply and its pop | the same |
| `occupancy` bf16 | 16: 4 units x 16x128x128 MACs / 16 cycles x 1.5 GHz = 197 TFLOP/s, the data sheet | likewise |
| `occupancy` 8 bits | 16, for 32 rows: the int8 rate of the data sheet, twice that of bf16 | likewise; fp8 on tpu7x |
| `occupancy` others | 8: as many rows in a cycle | likewise; libtpu issues a float32 multiply every 4 cycles on v6e |
| `link_efficiency` | 1.0367: a 128 MiB permute in 2.877 ms, same study | assumed 1 |
| `remote_latency`, `sync_latency` | 1 us, assumed: the sizes of the study do not resolve it | assumed equal |
| `link_latency` | 0, assumed; few rows depend on it | assumed equal |

The study is the published 2x2 matmul study on v5e, with which docs/player.md compares the player.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from flaxasync.check.player.errors import MeshMismatchError, PlayerError, UnsimulatedError
from flaxasync.hardware import CHIPS, DEVICES_PER_CHIP, Chip

_TOPOLOGY = re.compile(r"([a-z0-9]+):(\d+)x(\d+)(?:x(\d+))?")
_V5E_ERROR = (
    "1 % on the totals of the published 2x2 study and 7 % on its phases (docs/player.md), two of "
    "which calibrate HBM and links, more on single waits; small programs, where latencies rule, "
    "were not compared"
)
_V6E_ERROR = (
    "2 % on the one kernel with a published time on v6e, and 3 % on its waits for HBM "
    "(docs/player.md); links and latencies of v6e are assumed"
)
_ASSUMED = "none of our own on {0}: the constants of {0} are assumed, see docs/player.md"

Coords = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayedChip:
    """A chip as the player models it. Cycles are those of its clock. The defaults are the constants
    of v5e.
    """

    sheet: Chip
    known_error: str  # how far simulated times were from a measurement, if one is known
    # cycles for which one vmatmul occupies its unit, by type; "" is every other type
    occupancy: Mapping[str, int]
    push: int  # cycles for which one weight push occupies the port of its unit
    latency: int  # cycles from a vmatmul to its first result
    results: Mapping[str, int]  # the number of pops for one vmatmul, by type
    # the share of the data sheet's bandwidth that transfers reach on links
    link_efficiency: float = 1.0
    # seconds from the last byte of a transfer between chips until its semaphore rises; those of one
    # within a chip are in the data sheet
    remote_latency: float = 1e-6
    sync_latency: float = 1e-6  # seconds that a semaphore signal takes to another chip
    # seconds that each link of a route after the first adds to either of these two
    link_latency: float = 0.0
    branch_delay: int = 4  # the number of bundles after a branch that are still issued
    hbm_unit: int = 32  # bytes of the unit in which HBM addresses are counted

    @property
    def name(self) -> str:
        return self.sheet.name

    @property
    def clock(self) -> float:
        return self.sheet.clock

    @property
    def cores(self) -> int:
        """Cores of one device. A second core is assumed to do half of the work, in step with the
        first one.
        """
        return self.sheet.cores

    @property
    def hbm(self) -> float:
        """Bytes per second of one core's HBM, reads and writes together."""
        return self.sheet.hbm_bandwidth * self.sheet.hbm_efficiency / self.cores

    @property
    def link(self) -> float:
        """Bytes per second of one link in one direction."""
        return self.sheet.link_bandwidth * self.link_efficiency

    def route_latency(self, links: int, *, signal: bool = False) -> float:
        """Seconds that a transfer between chips, or a signal, takes over a route of some links
        beside its bytes.
        """
        if signal:
            first = self.sync_latency
        else:
            first = self.remote_latency
        return first + max(0, links - 1) * self.link_latency

    def cycles(self, seconds: float) -> float:
        return seconds * self.clock

    def seconds(self, cycles: float) -> float:
        return cycles / self.clock


def _chip(name: str, known_error: str = _ASSUMED, **constants: Any) -> PlayedChip:
    return PlayedChip(sheet=CHIPS[name], known_error=known_error.format(name), **constants)


_UNIT_128: dict[str, Any] = {
    "occupancy": {"8 bits": 16, "bf16": 16, "": 8},
    "push": 4,
    "latency": 100,
    "results": {"8 bits": 4, "bf16": 2, "": 1},
}
_UNIT_256: dict[str, Any] = {
    "occupancy": {"8 bits": 8, "bf16": 8, "": 4},
    "push": 2,
    "latency": 160,
}
PLAYED_CHIPS = {
    "v5e": _chip("v5e", _V5E_ERROR, **_UNIT_128, link_efficiency=1.0367, hbm_unit=512),
    "v6e": _chip("v6e", _V6E_ERROR, **_UNIT_256, results={"8 bits": 8, "bf16": 4, "": 2}),
    "v5p": _chip("v5p", **_UNIT_128),
    "tpu7x": _chip("tpu7x", **_UNIT_256, results={"8 bits": 4, "bf16": 2, "": 1}, branch_delay=1),
}


def played_chip(topology: str) -> PlayedChip:
    """Returns the chip of a topology ("v5e:2x2"), or the chip of that name. PlayerError says that
    there is none.
    """
    name = topology.partition(":")[0]
    if name not in PLAYED_CHIPS:
        raise PlayerError(
            f"topology must be of one of {', '.join(PLAYED_CHIPS)}, like 'v5e:2x2': got "
            f"{topology!r}"
        )
    return PLAYED_CHIPS[name]


@dataclasses.dataclass(frozen=True)
class ChipGrid:
    """The chips of a topology. They are numbered with the first coordinate running fastest, as
    libtpu numbers them.
    """

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
        x = chip_id % self.shape[0]
        rest = chip_id // self.shape[0]
        return (x, rest % self.shape[1], rest // self.shape[1])

    @functools.cache  # noqa: B019, there is one grid in a simulation
    def route(self, source: Coords, target: Coords) -> tuple[tuple[str, Coords, Coords], ...]:
        """Returns the directed links from one chip to another: along x, then y, then z, in the
        shorter direction.
        """
        path = []
        here = list(source)
        for axis, size in enumerate(self.shape):
            while here[axis] != target[axis]:
                if target[axis] > here[axis]:
                    step = 1
                else:
                    step = -1
                if self.wraps[axis] and abs(target[axis] - here[axis]) > size / 2:
                    step = -step
                before = tuple(here)
                # the modulus changes nothing where the dimension does not wrap
                here[axis] = (here[axis] + step) % size
                path.append(("link", before, tuple(here)))
        return tuple(path)


def chip_grid(name: str) -> ChipGrid:
    """Reads a topology's name: "v5e:2x4", "v5p:2x2x2"."""
    match = _TOPOLOGY.fullmatch(name)
    if match is None and "*" in name:
        raise UnsimulatedError(
            f"the player simulates one slice: got {name!r}; compile for {name.partition('*')[0]!r}"
        )
    if match is None or match[1] not in CHIPS:
        raise PlayerError(
            f"topology must be a chip and its grid, like 'v5e:2x4' or 'v5p:2x2x2': got {name!r}"
        )
    shape = tuple(int(n or 1) for n in match.groups()[1:])
    return ChipGrid(name, shape, DEVICES_PER_CHIP.get(match[1], 1), CHIPS[match[1]].wraps(shape))


def places_of_partitions(
    grid: ChipGrid, devices: int, coords: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Coords, int], ...]:
    """Returns the chip of each partition, as three coordinates, and its core on it.

    They are those in `coords`, which may end with the core. Without cores, the partitions of a chip
    take its cores in their order; without coordinates, all partitions are in order.
    """
    if devices != grid.devices:
        raise MeshMismatchError(
            f"the program was compiled for {devices} devices, but {grid.name} has {grid.devices}: "
            "name the topology that it was compiled for"
        )
    in_order = tuple((grid.coords(n // grid.cores), n % grid.cores) for n in range(devices))
    chips = [(*c[:3], 0, 0)[:3] for c in coords]
    full = tuple(
        (chip, c[3] if len(c) > 3 else chips[:n].count(chip))
        for n, (chip, c) in enumerate(zip(chips, coords, strict=True))
    )
    full = full or in_order
    if sorted(full) != sorted(in_order):
        raise MeshMismatchError(
            f"the order of the mesh must name each chip of {grid.name} {grid.cores} time(s), "
            f"within {grid.shape}: got {tuple(chips)}"
        )
    return full
