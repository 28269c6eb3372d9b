"""The chip table agrees with the data sheets; routes between chips; topologies and meshes that are refused."""

import itertools

import pytest

from flaxasync.check.player import MeshMismatchError, PlayerError
from flaxasync.check.player.chips import PLAYED_CHIPS, chip_grid, coords_of_partitions, played_chip


@pytest.mark.parametrize("chip", PLAYED_CHIPS.values(), ids=lambda chip: chip.name)
def test_occupancy_agrees_with_the_data_sheet(chip):
    """A multiply takes 16 packed rows, on units of 128 x 128 or 256 x 256.

    The clock on the data sheet of tpu7x is above that of libtpu, so its tolerance is larger.
    """
    side, units = (128, 4) if chip.name in ("v5e", "v5p") else (256, 2)
    rate = 2 * 16 * side * side / chip.occupancy["bf16"] * units * chip.clock * chip.cores
    assert rate == pytest.approx(chip.sheet.flops, rel=0.15 if chip.name == "tpu7x" else 0.005)


def test_routes():
    grid = chip_grid("v5e:2x4")
    assert (grid.devices, grid.coords(grid.chip_id((1, 3, 0)))) == (8, (1, 3, 0))
    path = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0)]
    assert grid.route(path[0], path[-1]) == tuple(("link", *ends) for ends in itertools.pairwise(path))
    assert chip_grid("v5e:16x16").route((0, 0, 0), (15, 0, 0)) == (("link", (0, 0, 0), (15, 0, 0)),)


@pytest.mark.parametrize(("name", "coords", "message"), [
    ("v5e:2x4", (), "compiled for 4 devices, but v5e:2x4 has 8"),
    ("v5e:2x2", ((0, 0), (1, 0)), "each chip of v5e:2x2 1 time"),
    ("v5e:2x2", ((0, 0), (1, 0), (0, 1), (0, 2)), "each chip of v5e:2x2 1 time"),
    ("v5e:2x2", ((0, 0), (1, 0), (0, 1), (0, 1)), "each chip of v5e:2x2 1 time"),
])  # fmt: skip
def test_meshes_that_do_not_fit(name, coords, message):
    with pytest.raises(MeshMismatchError, match=message):
        coords_of_partitions(chip_grid(name), 4, coords)


@pytest.mark.parametrize(("read", "name", "message"), [
    (chip_grid, "v5e:2x4*2", r"simulates one slice: got 'v5e:2x4\*2'; compile for 'v5e:2x4'"),
    (chip_grid, "v5e:2x", "topology must be a chip and its grid"),
    (chip_grid, "v4:2x2x1", "topology must be a chip and its grid"),
    (played_chip, "v4:2x2x1", "topology must be of one of v5e.*: got 'v4:2x2x1'"),
])  # fmt: skip
def test_what_is_not_a_topology(read, name, message):
    with pytest.raises(PlayerError, match=message):
        read(name)
