"""Tests of the order of devices: each mesh axis is a ring of neighbours, and never worse than in JAX's own order."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxasync as fa
from flaxasync.check.compile.topologies import TOPOLOGIES
from flaxasync.device_order import DeviceGrid, _rings, ring_order

SMALL = 16  # chips; larger topologies have hundreds of meshes, whose tests are marked slow


def chips(topology):
    return math.prod(map(int, topology.partition(":")[2].split("x")))


EVERY = [f"{family}:{size}" for family, sizes in TOPOLOGIES.items() for size in sizes if chips(f":{size}") <= 64]
CASES = [pytest.param(name, marks=[pytest.mark.slow] if chips(name) > SMALL else []) for name in EVERY]


def shapes(devices):
    """All shapes of two and of three axes for a number of devices."""
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    every = (shape for axes in (2, 3) for shape in itertools.product(divisors, repeat=axes))
    return [shape for shape in every if math.prod(shape) == devices]


def longest_hops(grid, mesh):
    """The longest hop of each axis of a mesh, the last axis first."""
    order = np.array([grid.position(device) for device in mesh.devices.flat]).reshape(*mesh.devices.shape, -1)
    return [int(grid.hops(order, axis).max()) for axis in reversed(range(mesh.devices.ndim))]


def has_closed_ring(grid, size):
    """Says whether the chips can be cut into boxes of `size` devices that each hold a closed ring of single links.

    This follows from the sides of a box alone: the cores of a chip are no distance apart; two chips are a ring, and so
    are a whole dimension that wraps and every box with an even side and a second side longer than one.
    """
    for box in itertools.product(*([d for d in range(1, n + 1) if n % d == 0] for n in grid.sizes)):
        if math.prod(box) != size:
            continue
        *sides, cores = box
        wide = [(side, n, wraps) for side, n, wraps in zip(sides, grid.sizes, grid.wraps, strict=False) if side > 1]
        if not wide or ((len(wide) > 1 or cores > 1) and any(side % 2 == 0 for side, *_ in [*wide, (cores,)])):
            return True
        if len(wide) == 1 and (wide[0][0] == 2 or (wide[0][0] == wide[0][1] and wide[0][2])):
            return True
    return False


@pytest.mark.parametrize("topology", CASES)
def test_no_mesh_is_worse_than_jax_makes_it_and_the_last_axis_is_closed_wherever_it_can_be(topology):
    devices = fa.check.topology_devices(topology)
    grid = DeviceGrid.of(devices)
    refused = 0
    for shape in shapes(len(devices)):
        names = ("a", "b", "c")[: len(shape)]
        mesh = fa.make_mesh(shape, names, devices=devices)
        assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}
        ours = longest_hops(grid, mesh)
        try:
            theirs = longest_hops(grid, jax.make_mesh(shape, names, devices=devices))
        except (NotImplementedError, ValueError):
            refused += 1
        else:
            assert ours <= theirs, shape
        assert (ours[0] <= 1) == has_closed_ring(grid, shape[-1]), shape
    assert refused < len(shapes(len(devices)))


@pytest.mark.parametrize(("topologies", "wraps"), [
    (["v5p:2x2x4", "v5p:2x4x4", "tpu7x:2x2x4", "v5e:4x4"], (False, False, False)),
    (["v5p:4x4x4", "v5p:4x4x8"], (True, True, True)),
    (["v5e:8x16"], (False, True, False)),
    (["v5e:16x16"], (True, True, False)),
])  # fmt: skip
def test_the_dimensions_that_wrap(topologies, wraps):
    for topology in topologies:
        assert DeviceGrid.of(fa.check.topology_devices(topology)).wraps == (*wraps, False), topology


def test_a_part_of_a_slice_wraps_only_where_it_spans_the_slice():
    devices = fa.check.topology_devices("v5p:4x4x8")
    half = [device for device in devices if device.coords[2] < 4]
    assert DeviceGrid.of(half).wraps == (True, True, False, False)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
def test_rings_visit_every_point_of_a_box_and_close_where_that_is_possible(box):
    closes = math.prod(box) <= 2 or (sum(side > 1 for side in box) > 1 and any(side % 2 == 0 for side in box))
    longest = []
    for ring in _rings(box):
        assert sorted(ring) == list(itertools.product(*map(range, box)))
        steps = [
            sum(abs(a - b) for a, b in zip(p, q, strict=True)) for p, q in zip(ring, [*ring[1:], ring[0]], strict=True)
        ]
        longest.append(max(steps))
    assert (min(longest) <= 1) == closes


def test_a_mesh_that_does_not_fit_the_grid_is_refused():
    with pytest.raises(ValueError, match=r"a mesh of shape \(3, 2\) needs 6 devices: got a grid of \(2, 4, 1, 1\)"):
        ring_order(DeviceGrid((2, 4, 1, 1), (False,) * 4, (0,) * 4), (3, 2))
