"""The chip table of the player agrees with the data sheets."""

import pytest

from flaxasync.check.player.chips import PLAYED_CHIPS, played_chip
from flaxasync.check.player.errors import PlayerError


def test_unknown_chip():
    with pytest.raises(PlayerError, match="got 'v4:2x2x1'"):
        played_chip("v4:2x2x1")


@pytest.mark.parametrize("chip", PLAYED_CHIPS.values(), ids=lambda chip: chip.name)
def test_occupancy_agrees_with_the_data_sheet(chip):
    """A multiply takes 16 packed rows, on units of 128 x 128 or 256 x 256.

    The clock on the data sheet of tpu7x is above that of libtpu, so its tolerance is larger.
    """
    side, units = (128, 4) if chip.name in ("v5e", "v5p") else (256, 2)
    rate = 2 * 16 * side * side / chip.occupancy["bf16"] * units * chip.clock * chip.cores
    assert rate == pytest.approx(chip.sheet.flops, rel=0.15 if chip.name == "tpu7x" else 0.005)
