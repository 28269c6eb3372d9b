"""The chip table of the player: what each number is, and where it comes from.

Peak rates, bandwidths and clocks are those of `flaxasync.hardware` (data sheets and the compiler's own clock). What
is added is how the matrix units keep time, and the calibrated efficiencies. Only v5e was calibrated on measurements;
the constants of other chips marked "assumed" are not measured, and results on those chips say so.

| number | v5e | others |
|---|---|---|
| `push`, `latency`, `results` | spacing that the compiler itself keeps between a push, a multiply and its pop | same |
| `occupancy` bf16 | 16: 4 units x 16x128x128 MACs / 16 cycles x 1.5 GHz = 197 TFLOP/s, the data sheet | likewise |
| `hbm_efficiency` | 0.801: a 128 MiB copy (read + write) in 0.41 ms, published with the 2x2 study | assumed equal |
| `link_efficiency` | 1.0367: a 128 MiB permute in 2.877 ms, same study | assumed 1 |
| `local_latency` | 0.45 us: JAX's matmul tutorial, 128-row blocks | assumed equal |
| `remote_latency`, `sync_latency` | 1 us a message, assumed: the study's sizes do not resolve it | assumed equal |
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flaxasync import hardware as data_sheets
from flaxasync.check.player.errors import PlayerError


@dataclasses.dataclass(frozen=True)
class PlayedChip:
    """A chip as the player sees it. Cycles are those of its clock."""

    name: str
    sheet: data_sheets.Chip
    occupancy: Mapping[str, int]  # cycles that one vmatmul holds its unit, by operand type; "" for the rest
    push: int  # cycles that one weight push holds the port of its unit
    latency: int  # cycles from a vmatmul to its first result
    results: Mapping[str, int]  # pops per vmatmul, by operand type
    hbm_efficiency: float
    link_efficiency: float
    local_latency: float  # seconds from the last byte of a local transfer to its semaphore
    remote_latency: float  # the same between chips
    sync_latency: float  # seconds of a semaphore signal to another chip
    branch_delay: int  # bundles after a branch that still issue
    granule: int  # bytes that a transfer is counted in
    hbm_unit: int  # bytes that an HBM address counts
    cores: int  # of one device: a second one is taken to do half of the work in step
    known_error: str

    @property
    def clock(self) -> float:
        return self.sheet.clock

    @property
    def hbm(self) -> float:
        """Bytes a second of one core, reads and writes together."""
        return self.sheet.hbm_bandwidth * self.hbm_efficiency / self.cores

    @property
    def link(self) -> float:
        """Bytes a second of one link in one direction."""
        return self.sheet.link_bandwidth * self.link_efficiency

    def cycles(self, seconds: float) -> float:
        return seconds * self.clock

    def seconds(self, cycles: float) -> float:
        return cycles / self.clock


_V5E_ERROR = (
    "1 % on the totals and phases of the published 2x2 study (docs/player.md), two phases of which calibrate HBM and "
    "links; small programs, where latencies rule, were not compared"
)
_SHARED: dict[str, Any] = {
    "local_latency": 0.45e-6,
    "remote_latency": 1e-6,
    "sync_latency": 1e-6,
    "granule": 32,
}
_ASSUMED = "none of our own on {0}: the constants of {0} are assumed, see docs/player.md"

PLAYED_CHIPS = {
    chip.name: chip
    for chip in (
        PlayedChip(
            "v5e", data_sheets.CHIPS["v5e"], {"bf16": 16, "": 8}, 4, 100, {"bf16": 2, "": 1}, 0.801, 1.0367,
            branch_delay=4, hbm_unit=512, cores=1, known_error=_V5E_ERROR,
            **_SHARED,
        ),
        PlayedChip(
            "v6e", data_sheets.CHIPS["v6e"], {"bf16": 8, "": 16}, 2, 160, {"bf16": 4, "": 2}, 0.801, 1.0,
            branch_delay=4, hbm_unit=32, cores=1, known_error=_ASSUMED.format("v6e"), **_SHARED,
        ),
        PlayedChip(
            "v5p", data_sheets.CHIPS["v5p"], {"bf16": 16, "": 8}, 4, 100, {"bf16": 2, "": 1}, 0.801, 1.0,
            branch_delay=4, hbm_unit=32, cores=2, known_error=_ASSUMED.format("v5p"), **_SHARED,
        ),
        PlayedChip(
            "tpu7x", data_sheets.CHIPS["tpu7x"], {"bf16": 8, "": 16}, 2, 160, {"bf16": 2, "": 1}, 0.801, 1.0,
            branch_delay=1, hbm_unit=32, cores=1, known_error=_ASSUMED.format("tpu7x"), **_SHARED,
        ),
    )
}  # fmt: skip


def played_chip(topology: str) -> PlayedChip:
    """Returns the chip of a topology ("v5e:2x2") or by its name."""
    name = str(topology).partition(":")[0]
    if name not in PLAYED_CHIPS:
        raise PlayerError(f"topology must be of one of {', '.join(PLAYED_CHIPS)}, like 'v5e:2x2': got {topology!r}")
    return PLAYED_CHIPS[name]
