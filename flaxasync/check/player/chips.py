"""The chip table of the player: what each number means, and where it comes from.

Peak rates, bandwidths and clocks are those of `flaxasync.hardware`, which takes them from data sheets and from the
compiler. This table adds the timing of the matrix units, and the efficiencies of memory and links. Only v5e was
calibrated on measurements. The numbers of other chips that are marked "assumed" were not measured, and results on
those chips say so.

| number | v5e | other chips |
|---|---|---|
| `push`, `latency`, `results` | the spacing that the compiler keeps between a push, a multiply and its pop | the same |
| `occupancy` bf16 | 16: 4 units x 16x128x128 MACs / 16 cycles x 1.5 GHz = 197 TFLOP/s, the data sheet | likewise |
| `hbm_efficiency` | 0.801: a 128 MiB copy (read + write) in 0.41 ms, published with the 2x2 study | assumed equal |
| `link_efficiency` | 1.0367: a 128 MiB permute in 2.877 ms, same study | assumed 1 |
| `local_latency` | 0.45 us: JAX's matmul tutorial, 128-row blocks | assumed equal |
| `remote_latency`, `sync_latency` | 1 us, assumed: the sizes of the study do not resolve it | assumed equal |
| `link_latency` | 0, assumed; `benchmarks/few_rows.py` shows what depends on it | assumed equal |

The study is the published 2x2 matmul study on v5e, with which docs/player.md compares the player.
"""

import dataclasses
from collections.abc import Mapping

from flaxasync import hardware as data_sheets
from flaxasync.check.player.errors import PlayerError


@dataclasses.dataclass(frozen=True)
class PlayedChip:
    """A chip as the player models it. Cycles are those of its clock."""

    name: str
    sheet: data_sheets.Chip
    occupancy: Mapping[str, int]  # cycles for which one vmatmul occupies its unit, by type; "" is every one but bf16
    push: int  # cycles for which one weight push occupies the port of its unit
    latency: int  # cycles from a vmatmul to its first result
    results: Mapping[str, int]  # the number of pops for one vmatmul, by type
    link_efficiency: float = 1.0  # the share of the data sheet's bandwidth that transfers reach on links,
    hbm_efficiency: float = 0.801  # and in HBM
    local_latency: float = (
        0.45e-6  # seconds from the last byte of a transfer within a chip until its semaphore is raised
    )
    remote_latency: float = 1e-6  # the same of a transfer between chips
    sync_latency: float = 1e-6  # seconds that a semaphore signal takes to another chip
    link_latency: float = 0.0  # seconds that each link of a route after the first adds to either of these two
    branch_delay: int = 4  # the number of bundles after a branch that are still issued
    hbm_unit: int = 32  # bytes of the unit in which HBM addresses are counted
    known_error: str = ""  # how far simulated times were from a measurement, if one is known

    @property
    def clock(self) -> float:
        return self.sheet.clock

    @property
    def cores(self) -> int:
        """Cores of one device. A second core is assumed to do half of the work, in step with the first one."""
        return self.sheet.cores

    @property
    def hbm(self) -> float:
        """Bytes per second of one core's HBM, reads and writes together."""
        return self.sheet.hbm_bandwidth * self.hbm_efficiency / self.cores

    @property
    def link(self) -> float:
        """Bytes per second of one link in one direction."""
        return self.sheet.link_bandwidth * self.link_efficiency

    def route_latency(self, links: int, *, signal: bool = False) -> float:
        """Seconds that a transfer between chips, or a signal, takes over a route of some links beside its bytes."""
        return (self.sync_latency if signal else self.remote_latency) + max(0, links - 1) * self.link_latency

    def cycles(self, seconds: float) -> float:
        return seconds * self.clock

    def seconds(self, cycles: float) -> float:
        return cycles / self.clock


_V5E_ERROR = (
    "1 % on the totals and phases of the published 2x2 study (docs/player.md), two phases of which calibrate HBM and "
    "links; small programs, where latencies rule, were not compared"
)
_ASSUMED = "none of our own on {0}: the constants of {0} are assumed, see docs/player.md"


def _assumed(
    name: str,
    occupancy: Mapping[str, int],
    push: int,
    latency: int,
    results: Mapping[str, int],
    *,
    branch_delay: int = 4,
) -> PlayedChip:
    """Returns a chip whose other constants are taken to be those of v5e; those of links are taken from its sheet."""
    return PlayedChip(
        name, data_sheets.CHIPS[name], occupancy, push, latency, results,
        branch_delay=branch_delay, known_error=_ASSUMED.format(name),
    )  # fmt: skip


PLAYED_CHIPS = {
    "v5e": PlayedChip(
        "v5e", data_sheets.CHIPS["v5e"], {"bf16": 16, "": 8}, 4, 100, {"bf16": 2, "": 1}, 1.0367, hbm_unit=512,
        known_error=_V5E_ERROR,
    ),
    "v6e": _assumed("v6e", {"bf16": 8, "": 16}, 2, 160, {"bf16": 4, "": 2}),
    "v5p": _assumed("v5p", {"bf16": 16, "": 8}, 4, 100, {"bf16": 2, "": 1}),
    "tpu7x": _assumed("tpu7x", {"bf16": 8, "": 16}, 2, 160, {"bf16": 2, "": 1}, branch_delay=1),
}  # fmt: skip


def played_chip(topology: str) -> PlayedChip:
    """Returns the chip of a topology ("v5e:2x2"), or the chip of that name ("v5e").

    Raises:
      PlayerError: The player does not know the chip.
    """
    name = str(topology).partition(":")[0]
    if name not in PLAYED_CHIPS:
        raise PlayerError(f"topology must be of one of {', '.join(PLAYED_CHIPS)}, like 'v5e:2x2': got {topology!r}")
    return PLAYED_CHIPS[name]
