"""Shardings of arguments move to the topology, whatever mesh they are on."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import compile_for, parse, topology_mesh
from tests.check.compile.matmul_program import matmul


@pytest.fixture
def mesh():
    return topology_mesh("v5e:2x2", (2, 2), ("x", "y"))


def test_shardings_of_another_mesh_move_to_the_topology():
    cpu = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((8, 128)), NamedSharding(cpu, P("x", "y")))
    program = compile_for("v5e:2x2", lambda x: jnp.sin(x) * 2, {"x": x}["x"])
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


def test_a_mesh_of_another_size():
    with pytest.raises(ValueError, match="the mesh must have the 8 devices of v5e:2x4"):
        compile_for("v5e:2x4", *matmul(topology_mesh("v5e:2x2", (2, 2), ("x", "y"))))
