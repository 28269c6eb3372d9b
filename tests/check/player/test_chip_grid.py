"""The chips of a topology, the links between them, and meshes that do not fit."""

import pytest

from flaxasync.check.player.chips import chip_grid, coords_of_partitions
from flaxasync.check.player.errors import MeshMismatchError, PlayerError


def test_chips_and_routes():
    grid = chip_grid("v5e:2x4")
    assert grid.devices == 8
    assert grid.coords(grid.chip_id((1, 3, 0))) == (1, 3, 0)
    assert grid.route((0, 0, 0), (1, 2, 0)) == (
        ("link", (0, 0, 0), (1, 0, 0)), ("link", (1, 0, 0), (1, 1, 0)), ("link", (1, 1, 0), (1, 2, 0)),
    )  # fmt: skip
    torus = chip_grid("v5e:16x16")
    assert torus.route((0, 0, 0), (15, 0, 0)) == (("link", (0, 0, 0), (15, 0, 0)),)


@pytest.mark.parametrize(
    ("name", "coords", "message"),
    [
        ("v5e:2x4", (), "compiled for 4 devices, but v5e:2x4 has 8"),
        ("v5e:2x2", ((0, 0), (1, 0)), "each chip of v5e:2x2 1 time"),
        ("v5e:2x2", ((0, 0), (1, 0), (0, 1), (0, 2)), "each chip of v5e:2x2 1 time"),
        ("v5e:2x2", ((0, 0), (1, 0), (0, 1), (0, 1)), "each chip of v5e:2x2 1 time"),
    ],
)
def test_meshes_that_do_not_fit(name, coords, message):
    with pytest.raises(MeshMismatchError, match=message):
        coords_of_partitions(chip_grid(name), 4, coords)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:2x4*2", r"simulates one slice: got 'v5e:2x4\*2'; compile for 'v5e:2x4'"),
        ("v5e:4", "topology must be"),
        ("v5e:2x", "topology must be"),
    ],
)
def test_what_is_not_a_topology(name, message):
    with pytest.raises(PlayerError, match=message):
        chip_grid(name)
