"""Compiling for topologies that are not there: the same program as jax makes, in a process that may die."""

import contextlib
import itertools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxasync.check import CHIPS, HbmError, compile_for, parse, topology_mesh, topology_size
from flaxasync.check.compile.hbm_error import hbm_error
from flaxasync.check.compile.mesh_order import closed_walk
from flaxasync.check.compile.process import CompilerProcess, shared_process


def matmul(mesh):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", "y")))
    w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", None)))
    return jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None))), x, w


@pytest.fixture
def mesh():
    return topology_mesh("v5e:2x2", (2, 2), ("x", "y"))


def test_it_is_the_program_that_jax_compiles(mesh):
    fn, *args = matmul(mesh)
    program = compile_for("v5e:2x2", fn, *args)
    here = fn.lower(*args).compile()
    assert program.as_text() == here.as_text()
    assert program.memory_analysis().temp_size_in_bytes == here.memory_analysis().temp_size_in_bytes
    assert program.cost_analysis()["flops"] == here.cost_analysis()["flops"]
    assert (program.chip, program.topology) == ("v5e", "v5e:2x2")


def test_bytes_by_kind(mesh):
    kinds = compile_for("v5e:2x2", *matmul(mesh)).bytes_by_kind
    assert kinds["arguments"] == 2 * (512 * 512 + 512 * 512)  # a device's shards, bfloat16
    assert kinds["outputs"] == 2 * 512 * 512
    assert kinds["total"] == sum(kinds.values()) - kinds["total"]


def test_donated_arguments_count_once(mesh):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", "y")))
    kinds = compile_for("v5e:2x2", jax.jit(lambda x: x + 1, donate_argnums=0), x).bytes_by_kind
    assert (kinds["arguments"], kinds["outputs"]) == (2 * 512 * 512, 0)


def hops(coords):
    """Links between each chip of a ring and the next; a chip's two cores are no link apart."""
    following = [*coords[1:], coords[0]]
    return {sum(abs(a - b) for a, b in zip(p, q, strict=True)) for p, q in zip(coords, following, strict=True)}


@pytest.mark.parametrize(
    ("topology", "shape", "axis"),
    [
        ("v5e:2x2", (4,), 0),
        ("v5e:2x4", (8,), 0),
        ("v5e:4x4", (16,), 0),
        ("v5p:2x2x2", (8,), 0),
        ("v5p:2x2x2", (2, 4), 1),
        ("v5p:2x2x4", (4, 4), 1),
        ("tpu7x:2x2x1", (8,), 0),
        ("v6e:2x4", (2, 4, 1), 0),
    ],
)
def test_neighbours_on_a_ring_are_neighbours_on_the_network(topology, shape, axis):
    mesh = topology_mesh(topology, shape, tuple("xyz"[: len(shape)]))
    rows = np.moveaxis(mesh.devices, axis, -1).reshape(-1, shape[axis])
    for row in rows:
        assert hops([device.coords for device in row]) <= {0, 1}
    assert len({device.id for device in mesh.devices.flat}) == mesh.devices.size


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_walk_visits_every_point_by_single_steps(sizes):
    walk = closed_walk(sizes)
    assert sorted(walk) == list(itertools.product(*(range(size) for size in sizes)))
    steps = [sum(abs(a - b) for a, b in zip(p, q, strict=True)) for p, q in itertools.pairwise([*walk, walk[0]])]
    closed = sum(size > 1 for size in sizes) > 1 and any(size % 2 == 0 for size in sizes)
    assert set(steps[:-1]) <= {1}
    assert not closed or steps[-1] == 1


def test_a_mesh_that_cuts_through_a_dimension_takes_jaxs_order():
    assert topology_mesh("v5e:4x4", (8, 2), ("x", "y")).devices.shape == (8, 2)


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


def test_explicit_axes():
    mesh = topology_mesh("v5e:2x2", (4,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((4096, 128), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        assert parse(compile_for("v5e:2x2", lambda x: x * 2, x).text).num_partitions == 4


def abstract_and_concrete(mesh, axes):
    """x as `nnx.eval_shape` leaves it, on an abstract mesh; y on a mesh of devices."""
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


def test_options_reach_the_compiler(mesh):
    with pytest.raises(RuntimeError, match=r"refused.*no_such_option"):
        compile_for("v5e:2x2", *matmul(mesh), compiler_options={"no_such_option": "1"})


@pytest.mark.parametrize(
    "chip", [name if name == "v5e" else pytest.param(name, marks=pytest.mark.slow) for name in CHIPS]
)
def test_a_program_that_does_not_fit_is_refused_with_the_compilers_numbers(chip):
    topology = f"{chip}:1x1" if chip in ("v5e", "v6e") else f"{chip}:1x1x1"
    with pytest.raises(HbmError, match=r"refused.*HBM") as refused:
        compile_for(topology, lambda x: (x @ x).sum(), jax.ShapeDtypeStruct((2**19, 2**19), jnp.bfloat16))
    assert refused.value.needed == 2 * 2**38
    assert refused.value.available == pytest.approx(CHIPS[chip].hbm_bytes, rel=1e-4)  # what the chip table says


def test_refusals_are_read_in_both_forms():
    late = hbm_error("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.32G of 15.75G hbm. Exceeded")
    assert (late.needed, late.available) == (round(18.32 * 2**30), round(15.75 * 2**30))
    assert hbm_error("INVALID_ARGUMENT: No such compile option") is None


def test_the_size_of_a_topology():
    assert (topology_size("v5e:2x4"), topology_size("tpu7x:2x2x1")) == (8, 8)
    with pytest.raises(ValueError, match="topology must be one that libtpu describes"):
        topology_size("v5e:5")


def test_dumps(mesh, tmp_path):
    """Of one process that compiles all of them: each program's own, and all of it the second time, too."""
    fn, *arguments = matmul(mesh)
    names = []
    for number, now in enumerate((fn, jax.jit(lambda *a: fn(*a) + 1), fn)):
        program = compile_for("v5e:2x2", now, *arguments, keep_dumps=tmp_path / str(number))
        assert program.dumps == tmp_path / str(number)
        assert len(list(program.dumps.glob("*-TLP-*-final_bundles.txt"))) == 1
        names.append({path.name.split("-", 1)[1] for path in program.dumps.iterdir()})
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("name", ["v9:2x2", "v5e", "v5e:axb", "v5e:0x2", "v5e:3x3", "v5e:9999x9999", "", 5])
def test_unknown_topologies_list_those_that_exist(name):
    with pytest.raises(ValueError, match=r"v5e: 1x1, 2x2, 2x4.*tpu7x: 1x1x1"):
        topology_mesh(name, (2, 2), ("x", "y"))


def test_a_mesh_of_another_size():
    with pytest.raises(ValueError, match=r"must multiply to the 8 devices of v5e:2x4: got \(2, 2\), which is 4"):
        topology_mesh("v5e:2x4", (2, 2), ("x", "y"))
    with pytest.raises(ValueError, match="one name per axis"):
        topology_mesh("v5e:2x2", (2, 2), ("x",))
    with pytest.raises(ValueError, match="the mesh must have the 8 devices of v5e:2x4"):
        compile_for("v5e:2x4", *matmul(topology_mesh("v5e:2x2", (2, 2), ("x", "y"))))


def test_host_callbacks_are_refused(mesh):
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))
    with pytest.raises(NotImplementedError, match="host callbacks"):
        compile_for("v5e:2x2", lambda x: jax.debug.print("{}", x.sum()), x)


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


def test_a_compiler_that_dies_is_an_error_and_the_next_call_works(mesh):
    compile_for("v5e:2x2", *matmul(mesh))
    os.kill(shared_process().process.pid, signal.SIGSEGV)
    shared_process().process.wait()
    assert compile_for("v5e:2x2", *matmul(mesh)).text


def test_a_death_while_compiling_names_the_signal():
    with contextlib.closing(CompilerProcess()) as process:
        os.kill(process.process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"did not finish in 0\.1 s"):
            process.compile({}, 0.1)
    with contextlib.closing(CompilerProcess()) as process:
        os.kill(process.process.pid, signal.SIGSEGV)
        with pytest.raises(RuntimeError, match="died of SIGSEGV"):
            process.compile({}, 60)
