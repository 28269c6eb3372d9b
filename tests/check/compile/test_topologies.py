"""Meshes over topologies, whose neighbours are one link apart, and the move of arguments to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import compile_for, parse, topology_mesh, topology_size


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


def test_shardings_of_another_mesh_move_to_the_topology():
    cpu = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((8, 128)), NamedSharding(cpu, P("x", "y")))
    program = compile_for("v5e:2x2", lambda x: jnp.sin(x) * 2, x)
    assert parse(program.text).num_partitions == 4
    assert ":T(" in program.text  # a TPU layout


def test_the_ambient_mesh_of_the_topology_is_used():
    def fn(x):
        return jax.shard_map(lambda x: jax.lax.psum(x, "x"), in_specs=P("x"), out_specs=P())(x)

    mesh = topology_mesh("v5e:2x2", (4,), ("x",))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4096, 128), jnp.float32, sharding=NamedSharding(mesh, P("x")))
        assert "all-reduce" in compile_for("v5e:2x2", fn, x).text


def abstract_and_concrete(mesh, axes):
    """Returns x on an abstract mesh, as `nnx.eval_shape` leaves it, and y on a mesh of devices."""
    abstract = jax.sharding.AbstractMesh((2, 2), axes, axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=NamedSharding(abstract, P(axes[0], axes[1])))
    return x, jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))


@pytest.mark.parametrize("place", ["topology", "CPU"])
def test_an_abstract_mesh_goes_where_a_mesh_with_its_axes_goes(place):
    explicit = (AxisType.Explicit,) * 2
    mesh = topology_mesh("v5e:2x2", (2, 2), ("x", "y"), axis_types=explicit)
    if place == "CPU":
        mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=explicit)
    program = compile_for("v5e:2x2", lambda x, y: x + y, *abstract_and_concrete(mesh, ("x", "y")))
    assert parse(program.text).num_partitions == 4


def test_meshes_with_other_axes_do_not_mix(mesh):
    with pytest.raises(ValueError, match=r"must lie on one mesh: got .*'x': 2.*same topology_mesh\('v5e:2x2'"):
        compile_for("v5e:2x2", lambda x, y: x + y, *abstract_and_concrete(mesh, ("a", "b")))


def test_without_any_sharding_it_is_one_chip():
    program = compile_for("v5e:2x2", lambda x: x @ x, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16))
    assert parse(program.text).num_partitions == 1


def test_a_mesh_of_another_size(matmul):
    with pytest.raises(ValueError, match="the mesh must have the 8 devices of v5e:2x4"):
        compile_for("v5e:2x4", *matmul)
