"""Topologies and meshes over them: neighbours are one link apart, and a wrong name lists the right ones."""

import jax
import numpy as np
import pytest

from flaxasync.check import topology_mesh, topology_size


def hops(coords):
    """Returns the numbers of links between neighbours on a ring. Two cores of one chip are no link apart."""
    following = [*coords[1:], coords[0]]
    return {sum(abs(a - b) for a, b in zip(p, q, strict=True)) for p, q in zip(coords, following, strict=True)}


@pytest.mark.parametrize(
    ("topology", "shape", "axis"),
    [("v5e:2x4", (8,), 0), ("v5p:2x2x4", (4, 4), 1), ("tpu7x:2x2x1", (8,), 0), ("v6e:2x4", (2, 4, 1), 1)],
)
def test_neighbours_on_a_ring_are_neighbours_on_the_network(topology, shape, axis):
    mesh = topology_mesh(topology, shape, tuple("xyz"[: len(shape)]))
    rows = np.moveaxis(mesh.devices, axis, -1).reshape(-1, shape[axis])
    for row in rows:
        assert hops([device.coords for device in row]) <= {0, 1}
    assert len({device.id for device in mesh.devices.flat}) == mesh.devices.size


def test_several_slices():
    """The first axis that can be divided among the slices goes across them, and the rings of the last one do not."""
    assert topology_size("v5e:2x2*2") == 8
    mesh = topology_mesh("v5e:2x2*2", (1, 2, 4), ("stage", "data", "model"))
    assert [{d.slice_index for d in row} for row in mesh.devices.reshape(2, 4)] == [{0}, {1}]
    for row in mesh.devices.reshape(2, 4):
        assert hops([device.coords for device in row]) == {1}
    with pytest.raises(ValueError, match=r"must be divisible by the 2 slices: got \{'model': 8\}"):
        topology_mesh("v5e:2x2*2", (8,), ("model",))


@pytest.mark.parametrize("name", ["v5e:2x2*0", "v5e:16x16*99", "v9:2x2", "v5e:0x2", "v5e:3x3", "v5e:9999x9999", 5])
def test_an_unknown_topology_lists_those_that_exist(name):
    with pytest.raises(ValueError, match=r"v5e: 1x1, 2x2, 2x4.*tpu7x: 1x1x1"):
        topology_mesh(name, (2, 2), ("x", "y"))


@pytest.mark.parametrize(
    ("topology", "axes", "message"),
    [
        ("v5e:2x4", ("x", "y"), r"must multiply to the 8 devices of v5e:2x4: got \(2, 2\), which is 4"),
        ("tpu7x:2x2x1", ("x", "y"), "the 8 devices of tpu7x:2x2x1"),
        ("v5e:2x2", ("x",), "one name per axis"),
    ],
)
def test_axes_that_do_not_fit(topology, axes, message):
    with pytest.raises(ValueError, match=message):
        topology_mesh(topology, (2, 2), axes)


def test_no_libtpu(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"libtpu, no TPU.*'tpu' or 'dev' extra"):
        topology_mesh("v5e:2x2", (2, 2), ("x", "y"))


def test_a_busy_libtpu_says_what_to_do(monkeypatch):
    def busy(*_, **__):
        raise jax.errors.JaxRuntimeError("ABORTED: The TPU is already in use by process with pid 7")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", busy)
    with pytest.raises(RuntimeError, match="ALLOW_MULTIPLE_LIBTPU_LOAD=1"):
        topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
