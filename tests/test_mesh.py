"""Tests of `make_mesh` and `mesh_report`: rings on the chip network, slices, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType

import flaxasync as fa


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a slice, as far as its place in a mesh is concerned."""

    id: int
    coords: tuple[int, int, int]
    device_kind: str = "TPU v5 lite"
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"


def report(topology, shape, names=("data", "model")):
    mesh = fa.make_mesh(shape, names, devices=fa.check.topology_devices(topology))
    return {axis.name: axis for axis in fa.mesh_report(mesh)}


@pytest.mark.parametrize(("topology", "shape", "data", "model"), [
    ("v5e:2x2", (2, 2), (1, 1), (1, 1)),
    ("v5e:2x4", (2, 4), (2, 2), (1, 1, 1, 1)),  # two squares
    ("v5e:4x4", (2, 8), (2, 2), (1,) * 8),  # two halves of 2x4
    ("v5e:4x4", (4, 4), (2, 2, 2, 2), (1,) * 4),  # four squares, in a square
    ("v5p:2x2x2", (2, 4), (1, 1), (1,) * 4),
    ("v5p:4x4x4", (8, 8), (1,) * 8, (1,) * 8),  # dimensions that wrap
])  # fmt: skip
def test_the_last_axis_gets_closed_rings_and_the_axis_before_it_the_shortest_hops(topology, shape, data, model):
    axes = report(topology, shape)
    assert (axes["data"].hops, axes["model"].hops) == (data, model)
    assert axes["model"].closed
    assert axes["data"].closed == (max(data) == 1)


def test_the_report_reads_like_a_sentence():
    axes = report("v5e:2x4", (2, 4))
    assert str(axes["model"]) == "model: closed ring, links per hop 4 x 1"
    assert str(axes["data"]) == "data: ring, links per hop 2, 2"
    line = fa.mesh_report(jax.sharding.Mesh(np.array(fa.check.topology_devices("v5e:2x4")), ("x",)))[0]
    assert str(line) == "x: ring, links per hop 1, 2, 1, 2, 1, 2, 1, 4"


def test_axes_are_explicit_by_default_as_in_jax():
    mesh = fa.make_mesh((2, 4), ("data", "model"))
    assert mesh == jax.make_mesh((2, 4), ("data", "model"))
    auto = fa.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert auto.axis_types == (AxisType.Auto,) * 2
    assert [str(axis) for axis in fa.mesh_report(mesh)] == [
        "data: the devices have no coordinates", "model: the devices have no coordinates",
    ]  # fmt: skip


def test_fewer_axes_than_devices_take_the_first_devices():
    assert fa.make_mesh((4,), ("model",)) == jax.make_mesh((4,), ("model",))


def test_no_ring_lies_across_slices():
    devices = topologies.get_topology_desc("v5p:2x2x1", platform="tpu", num_slices=2).devices
    mesh = fa.make_mesh((2, 2, 2), ("data", "fsdp", "model"), devices=devices)
    assert all(len({d.slice_index for d in row}) == 1 for row in mesh.devices.reshape(2, 4))
    axes = {axis.name: axis for axis in fa.mesh_report(mesh)}
    assert axes["data"].across_slices
    assert str(axes["data"]) == "data: across slices"
    assert axes["fsdp"].closed
    assert axes["model"].closed


def test_a_part_of_a_slice_begins_anywhere():
    """As the devices of one of several processes do."""
    devices = [Device(i, (2 + i % 2, 4 + i // 2, 0)) for i in range(8)]
    (axis,) = fa.mesh_report(fa.make_mesh((8,), ("model",), devices=devices))
    assert axis.closed


def test_an_unknown_chip_is_taken_for_a_grid_that_does_not_wrap():
    devices = [Device(i, (i, 0, 0), "TPU v9") for i in range(4)]
    (axis,) = fa.mesh_report(fa.make_mesh((4,), ("model",), devices=devices))
    assert max(axis.hops) == 2


TWO_SLICES = [Device(4 * s + i, (i % 2, i // 2, 0), slice_index=s) for s in range(2) for i in range(4)]


@pytest.mark.parametrize(("shape", "names", "devices", "message"), [
    ((2, 4), ("model",), None, r"one name for each axis: got axis_shapes=\(2, 4\) and axis_names=\('model',\)"),
    ((3, 4), ("data", "model"), None, r"multiply to the number of devices: got \(3, 4\), which is 12, and 8 devices"),
    ((2, 2), ("data", "model"), TWO_SLICES, r"got \(2, 2\), which is 4, and 8 devices"),
    ((8,), ("model",), TWO_SLICES, "divisible by the 2 slices: got {'model': 8}; add an axis of 2"),
])  # fmt: skip
def test_meshes_that_do_not_fit_the_devices_are_refused(shape, names, devices, message):
    with pytest.raises(ValueError, match=message):
        fa.make_mesh(shape, names, devices=devices)
