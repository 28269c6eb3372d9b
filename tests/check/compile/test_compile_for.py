"""Compiling for a topology that is not there: the program is the one that JAX makes, or the refusal
says why not.

The mesh of a topology has neighbours that are one link apart, and arguments on other meshes move to
it.
"""

import contextlib
import os
import pickle
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.programs import array
from flaxasync.check import CHIPS, HbmError, audit, compile_for, parse, topology_mesh, topology_size
from flaxasync.check.compile.compile_for import CompilerProcess, _request, lent_process
from flaxasync.check.compile.program import hbm_error
from flaxasync.check.compile.topologies import topology_arguments
from flaxasync.check.hlo.origins import callback_name, is_host_callback


@pytest.fixture(scope="module")
def mesh():
    return topology_mesh("v5e:2x2", (2, 2), ("x", "y"))


@pytest.fixture(scope="module")
def matmul(mesh):
    """A jitted matmul and its two arguments."""
    x, w = array((1024, 1024), mesh, P("x", "y")), array((1024, 512), mesh, P("x", None))
    return jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None))), x, w


def test_it_is_the_program_that_jax_compiles(matmul):
    fn, *args = matmul
    program = compile_for("v5e:2x2", fn, *args)
    here = fn.lower(*args).compile()
    assert program.as_text() == here.as_text()
    assert program.memory_analysis().temp_size_in_bytes == here.memory_analysis().temp_size_in_bytes
    assert program.cost_analysis()["flops"] == here.cost_analysis()["flops"]
    assert (program.chip, program.topology) == ("v5e", "v5e:2x2")


def test_a_program_of_several_slices():
    """The sum over "data" leaves its slice as a send of the partial sum of one device; the other
    stays within it.
    """
    mesh = topology_mesh("v5e:2x2*2", (2, 4), ("data", "model"))
    x = array((8192, 512), mesh, P("data", "model"), jnp.float32)
    total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P("model")))
    program = compile_for("v5e:2x2*2", total, x)
    assert (program.chip, program.topology) == ("v5e", "v5e:2x2*2")
    assert len(program.coords) == 8
    (sent,) = (i for i in parse(program.text).entry.instructions if i.opcode == "send")
    assert "xla_megascale" in sent.attributes["frontend_attributes"]
    (pair,) = (p for p in audit(program).pairs if p.kind == "send")
    assert pair.bytes == 512 // 4 * 4
    assert "between slices" in " ".join(audit(program).notes)


def test_bytes_by_kind(mesh, matmul):
    kinds = compile_for("v5e:2x2", *matmul).bytes_by_kind
    assert kinds["arguments"] == 2 * (512 * 512 + 512 * 512)  # of one device's shards in bfloat16
    assert kinds["outputs"] == 2 * 512 * 512
    assert kinds["total"] == sum(kinds.values()) - kinds["total"]
    x = array((1024, 1024), mesh, P("x", "y"))
    donated = compile_for("v5e:2x2", jax.jit(lambda x: x + 1, donate_argnums=0), x).bytes_by_kind
    assert (donated["arguments"], donated["outputs"]) == (2 * 512 * 512, 0)


def test_options_reach_the_compiler(matmul):
    with pytest.raises(RuntimeError, match=r"refused.*no_such_option"):
        compile_for("v5e:2x2", *matmul, compiler_options={"no_such_option": "1"})


@pytest.mark.parametrize(
    "chip",
    [name if name == "v5e" else pytest.param(name, marks=pytest.mark.slow) for name in CHIPS],
)
def test_a_program_that_does_not_fit_is_refused_with_the_compilers_numbers(chip):
    topology = f"{chip}:1x1" if chip in ("v5e", "v6e") else f"{chip}:1x1x1"
    with pytest.raises(HbmError, match=r"refused.*HBM") as refused:
        compile_for(
            topology, lambda x: (x @ x).sum(), jax.ShapeDtypeStruct((2**19, 2**19), jnp.bfloat16)
        )
    assert refused.value.needed == 2 * 2**38
    # the chip table has this number
    assert refused.value.available == pytest.approx(CHIPS[chip].hbm_bytes, rel=1e-4)


def test_both_messages_of_the_compiler_are_read():
    late = hbm_error(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.32G of 15.75G hbm. "
        "Exceeded"
    )
    assert (late.needed, late.available) == (round(18.32 * 2**30), round(15.75 * 2**30))
    assert hbm_error("INVALID_ARGUMENT: No such compile option") is None


def test_dumps(matmul, tmp_path):
    """One process compiles all three. Each folder has the dumps of its own program, even of one
    seen before.
    """
    fn, *arguments = matmul
    names = []
    for number, now in enumerate((fn, jax.jit(lambda *a: fn(*a) + 1), fn)):
        program = compile_for("v5e:2x2", now, *arguments, keep_dumps=tmp_path / str(number))
        assert program.dumps == tmp_path / str(number)
        assert len(list(program.dumps.glob("*-TLP-*-final_bundles.txt"))) == 1
        names.append({path.name.split("-", 1)[1] for path in program.dumps.iterdir()})
    assert names[0] == names[2] != names[1]


def test_host_callbacks_compile(mesh):
    """A callback is needed only where the program runs."""

    def fn(x):
        jax.debug.print("{}", x.sum())
        return io_callback(
            lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x.sum(), ordered=True
        )

    entry = parse(
        compile_for("v5e:2x2", fn, array((8, 128), mesh, P("x", "y"), jnp.float32)).text
    ).entry
    assert {callback_name(i) for i in entry.instructions if is_host_callback(i)} == {
        "jax.debug.print",
        "io_callback",
    }


@pytest.mark.slow
def test_after_a_compiler_died_the_next_call_works(matmul):
    compile_for("v5e:2x2", *matmul)
    with lent_process() as compiler:
        os.kill(compiler.process.pid, signal.SIGSEGV)
        compiler.process.wait()
    assert compile_for("v5e:2x2", *matmul).text


@pytest.mark.slow
def test_a_process_with_other_flags_takes_the_place_of_an_idle_one(monkeypatch):
    """libtpu reads its flags once, so a program must not be compiled by a process that has those of
    before.
    """
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    with lent_process() as before:
        pass
    with lent_process() as again, lent_process() as second:
        assert again is before
        assert second is not before  # which is lent already
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768")
    with lent_process() as other:
        assert other not in (before, second)
    for replaced in (before, second):
        assert replaced.process.poll() is not None
    assert other.flags == "--xla_tpu_scoped_vmem_limit_kib=32768"
    monkeypatch.undo()
    with lent_process() as last:
        assert last is not other


@pytest.mark.parametrize(("sent", "seconds", "message"), [
    (signal.SIGSTOP, 0.1, r"did not finish in 0\.1 s"), (signal.SIGSEGV, 60, "died of SIGSEGV"),
])  # fmt: skip
def test_a_hang_or_a_death_while_compiling_is_named(sent, seconds, message):
    with contextlib.closing(CompilerProcess()) as process:
        os.kill(process.process.pid, sent)
        with pytest.raises(RuntimeError, match=message):
            process.compile({}, seconds)


def test_a_compiler_ends_with_its_parent_in_the_middle_of_a_program():
    """It would go on for minutes, with the step of a large model. When its parent is killed, its
    stream is closed.
    """
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    request = _request("v5e:1x1", jax.jit(lambda x: x @ x).lower(x), {})
    with contextlib.closing(CompilerProcess()) as compiler:
        pickle.dump(request, compiler.process.stdin)
        compiler.process.stdin.close()
        assert compiler.process.stdout.read() == b"", "it answered"
        assert compiler.process.wait() == 0


def test_a_compiler_ends_if_its_parent_is_killed_while_it_writes():
    with contextlib.closing(CompilerProcess()) as compiler:
        compiler.process.stdin.write(pickle.dumps({"module": b"a program"})[:-9])
        compiler.process.stdin.close()
        assert compiler.process.stdout.read() == b"", "it answered"
        assert compiler.process.wait() == 1


def hops(coords):
    """Returns the numbers of links between neighbours on a ring. Two cores of one chip are no link
    apart.
    """
    following = [*coords[1:], coords[0]]
    return {
        sum(abs(a - b) for a, b in zip(p, q, strict=True))
        for p, q in zip(coords, following, strict=True)
    }


@pytest.mark.parametrize(
    ("topology", "shape", "axis"),
    [
        ("v5e:2x4", (8,), 0),
        ("v5p:2x2x4", (4, 4), 1),
        ("tpu7x:2x2x1", (8,), 0),
        ("v6e:2x4", (2, 4, 1), 1),
    ],
)
def test_neighbours_on_a_ring_are_neighbours_on_the_network(topology, shape, axis):
    mesh = topology_mesh(topology, shape, tuple("xyz"[: len(shape)]))
    rows = np.moveaxis(mesh.devices, axis, -1).reshape(-1, shape[axis])
    for row in rows:
        assert hops([device.coords for device in row]) <= {0, 1}
    assert len({device.id for device in mesh.devices.flat}) == mesh.devices.size


@pytest.mark.parametrize(
    ("topology", "wraps"),
    [
        ("v5e:4x8", (False, False, False)),
        ("v6e:8x16", (False, True, False)),
        ("v5e:16x16*2", (True, True, False)),
        ("v5p:2x4x4", (False, False, False)),
        ("v5p:4x4x8", (True, True, True)),
    ],
)
def test_a_topology_is_described_with_the_links_that_close_its_rings(topology, wraps):
    assert topology_arguments(topology)["wrap"] == wraps


def test_a_permute_over_a_closing_link_is_asynchronous():
    """libtpu makes it synchronous on v5e where it takes the row for open."""
    mesh = topology_mesh("v5e:16x16", (16, 16), ("row", "ring"))
    size = mesh.shape["ring"]

    def around(x):
        return lax.ppermute(x, "ring", [(n, (n + 1) % size) for n in range(size)])

    rows = P(None, "ring")
    mapped = jax.shard_map(around, mesh=mesh, in_specs=rows, out_specs=rows)
    x = array((256, size * 1024), mesh, rows, jnp.bfloat16)
    assert "collective-permute-start" in compile_for("v5e:16x16", jax.jit(mapped), x).text


def test_a_mesh_of_several_slices():
    """The first axis that can be divided among the slices goes across them, and the rings of the
    last one do not.
    """
    assert topology_size("v5e:2x2*2") == 8
    mesh = topology_mesh("v5e:2x2*2", (1, 2, 4), ("stage", "data", "model"))
    assert [{d.slice_index for d in row} for row in mesh.devices.reshape(2, 4)] == [{0}, {1}]
    for row in mesh.devices.reshape(2, 4):
        assert hops([device.coords for device in row]) == {1}


@pytest.mark.parametrize(
    "name", ["v5e:2x2*0", "v5e:16x16*99", "v9:2x2", "v5e:0x2", "v5e:3x3", "v5e:9999x9999", 5]
)
def test_an_unknown_topology_lists_those_that_exist(name):
    with pytest.raises(ValueError, match=r"v5e: 1x1, 2x2, 2x4.*tpu7x: 1x1x1"):
        topology_mesh(name, (2, 2), ("x", "y"))


@pytest.mark.parametrize(
    ("topology", "shape", "axes", "message"),
    [
        (
            "v5e:2x4",
            (2, 2),
            ("x", "y"),
            r"must multiply to the 8 devices of v5e:2x4: got \(2, 2\), which is 4",
        ),
        ("tpu7x:2x2x1", (2, 2), ("x", "y"), "the 8 devices of tpu7x:2x2x1"),
        ("v5e:2x2", (2, 2), ("x",), "one name per axis"),
        ("v5e:2x2*2", (8,), ("model",), r"must be divisible by the 2 slices: got \{'model': 8\}"),
    ],
)
def test_axes_that_do_not_fit(topology, shape, axes, message):
    with pytest.raises(ValueError, match=message):
        topology_mesh(topology, shape, axes)


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


def test_shardings_of_another_mesh_move_to_the_topology_and_without_any_it_is_one_chip():
    cpu = jax.make_mesh(
        (2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )
    x = jax.device_put(jnp.ones((8, 128)), NamedSharding(cpu, P("x", "y")))
    program = compile_for("v5e:2x2", lambda x: jnp.sin(x) * 2, x)
    assert parse(program.text).num_partitions == 4
    assert ":T(" in program.text  # a TPU layout
    unsharded = compile_for(
        "v5e:2x2", lambda x: x @ x, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    )
    assert parse(unsharded.text).num_partitions == 1


def test_the_ambient_mesh_of_the_topology_is_used():
    def fn(x):
        return jax.shard_map(lambda x: jax.lax.psum(x, "x"), in_specs=P("x"), out_specs=P())(x)

    mesh = topology_mesh("v5e:2x2", (4,), ("x",))
    with jax.set_mesh(mesh):
        assert (
            "all-reduce"
            in compile_for("v5e:2x2", fn, array((4096, 128), mesh, P("x"), jnp.float32)).text
        )


def abstract_and_concrete(mesh, axes):
    """Returns x on an abstract mesh, as `nnx.eval_shape` leaves it, and y on a mesh of devices."""
    abstract = jax.sharding.AbstractMesh((2, 2), axes, axis_types=(AxisType.Explicit,) * 2)
    return array((8, 128), abstract, P(*axes)), array((8, 128), mesh, P("x", "y"))


@pytest.mark.parametrize("place", ["topology", "CPU"])
def test_an_abstract_mesh_goes_where_a_mesh_with_its_axes_goes(place):
    explicit = (AxisType.Explicit,) * 2
    mesh = topology_mesh("v5e:2x2", (2, 2), ("x", "y"), axis_types=explicit)
    if place == "CPU":
        mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=explicit)
    program = compile_for("v5e:2x2", lambda x, y: x + y, *abstract_and_concrete(mesh, ("x", "y")))
    assert parse(program.text).num_partitions == 4


def test_meshes_with_other_axes_do_not_mix(mesh):
    with pytest.raises(
        ValueError, match=r"must lie on one mesh: got .*'x': 2.*same topology_mesh\('v5e:2x2'"
    ):
        compile_for("v5e:2x2", lambda x, y: x + y, *abstract_and_concrete(mesh, ("a", "b")))


def test_a_mesh_of_another_size(matmul):
    with pytest.raises(ValueError, match="the mesh must have the 8 devices of v5e:2x4"):
        compile_for("v5e:2x4", *matmul)


@pytest.mark.slow
def test_temporaries_are_what_the_compiler_allocates():
    """The carry of a loop and six results, of 1 GiB each; libtpu 0.0.50 reports 8 GiB of
    temporaries.
    """

    def loop(x, y):
        def step(carry, _):
            following = jnp.tanh(carry @ y)
            return following, following

        last, every = jax.lax.scan(step, x, length=6)
        return last, jnp.sin(every).sum(0)

    x, y = (jax.ShapeDtypeStruct((rows, 16384), jnp.bfloat16) for rows in (32768, 16384))
    program = compile_for("v5e:1x1", loop, x, y)
    assert program.bytes_by_kind["temporaries"] == pytest.approx(7 << 30, rel=1e-3)
