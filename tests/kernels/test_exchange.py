"""The exchange of few rows between all devices: the kernel and backend "exchange" in the simulator;
what is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync.kernels import exchange as module
from flaxasync.kernels.exchange import exchange
from tests.kernels.conftest import arranged, as_float32, assert_close, draw, simulated
from tests.kernels.conftest import run as simulate
from tests.ops.matmul.conftest import check_parity

repeats = pytest.mark.slow


def run(size, steps, *, rows=8, columns=512, dtype="float32", mode="on_wait", data=1):
    """Returns the sum on each device, [data * size, rows, columns], and what it should be."""
    x, each = draw((data, size, rows, columns), dtype), P(("data", "ring"))

    def local(x):
        return jax.lax.pcast(exchange(x, "ring", steps=steps), "ring", to="varying")

    mesh = {"shape": (data, size), "names": ("data", "ring")}
    got = simulate(local, [x.reshape(-1, columns)], (each,), each, mode=mode, **mesh)
    return got.reshape(data * size, rows, columns), np.repeat(as_float32(x).sum(1), size, axis=0)


@pytest.mark.parametrize(
    ("size", "steps", "options"),
    [
        (4, 1, {"mode": "eager"}),
        (4, 2, {}),
        pytest.param(3, 1, {}, marks=repeats),
        # of two axes
        pytest.param(
            2, 2, {"rows": 16, "dtype": "bfloat16", "mode": "eager", "data": 2}, marks=repeats
        ),
    ],
)
def test_all_devices_have_the_same_sum(size, steps, options):
    got, want = run(size, steps, **options)
    assert_close(got, want, options.get("dtype", "float32"))
    each = got.reshape(-1, size, *got.shape[1:])  # the devices of each sum
    assert (each == each[:, :1]).all(), "to the last bit"


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=repeats)])
def test_a_sum_that_is_read_before_it_arrived_is_seen(monkeypatch, steps):
    """Negative test: a kernel that waits for nothing."""
    monkeypatch.setattr(module, "wait", lambda moved, sem: None)
    with pytest.raises(
        (jax.errors.JaxRuntimeError, AssertionError), match=r"RACE DETECTED|non-zero count"
    ):
        run(2, steps, mode="eager")


@pytest.mark.parametrize(("dtype", "batch", "rows", "n"), [
    ("bfloat16", 1, 1, 256),  # one step; the rows of a hardware tile
    pytest.param("float32", 3, 1, 320, marks=repeats),  # padded to whole hardware tiles
    pytest.param("bfloat16", 2, 40, 384, marks=repeats),  # two steps; columns are padded
])  # fmt: skip
def test_parity_and_gradients(monkeypatch, dtype, batch, rows, n):
    monkeypatch.setattr("flaxasync.ops.costs.collective_matmul.ONE_STEP_BYTES", 2**17)
    sizes = {"batch": batch, "m": rows, "k": 64, "ns": [n]}
    check_parity("matmul_all_reduce", 4, **sizes, dtype=dtype, mode="eager", backend="exchange")


@pytest.mark.parametrize(
    ("size", "dtype", "rows", "message"),
    [
        (
            1,
            "bfloat16",
            1,
            "sends to other devices: got an axis 'model' of size 1; use backend='none'",
        ),
        # two steps, too
        (
            8,
            "bfloat16",
            2**17,
            "has all sums in vector memory, 120 MiB: got 256 MiB; give it fewer rows",
        ),
        (2, "float16", 1, "has kernels for float32 and bfloat16: got float16"),
        (
            2,
            "bfloat16",
            2**16,
            "has all sums in vector memory, 120 MiB: got 128 MiB; give it fewer rows",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(size, dtype, rows, message):
    with pytest.raises(NotImplementedError, match=message):
        traced(size, dtype, rows, 256)


@pytest.mark.parametrize(("rows", "columns"), [(0, 256), (3, 0)])
def test_a_sum_without_elements_is_one_without_a_kernel(rows, columns):
    jaxpr = traced(2, "bfloat16", rows, columns)
    assert [aval.shape for aval in jaxpr.out_avals] == [(rows, columns)]
    assert "pallas_call" not in str(jaxpr)


def sum_over_ring(x, w):
    return fa.matmul_all_reduce(x, w, "model", backend="exchange")


def traced(size, dtype, rows, columns):
    with simulated((size,), ("model",)):
        fn = jax.shard_map(sum_over_ring, in_specs=(P(None, "model"), P("model")), out_specs=P())
        shapes = (rows, 64), (64, columns)
        return jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


@pytest.mark.parametrize(("steps", "arrays"), [(1, 7), (2, 4)])
def test_the_bytes_of_vector_memory_are_those_of_the_kernels_buffers(steps, arrays):
    mesh = fa.check.topology_mesh("v5e:2x2", (4,), ("ring",))
    local = jax.shard_map(
        functools.partial(exchange, axis_name="ring", steps=steps),
        mesh=mesh,
        in_specs=P("ring"),
        out_specs=P(),
    )
    (mapped,) = jax.make_jaxpr(local)(jax.ShapeDtypeStruct((32, 512), jnp.float32)).jaxpr.eqns
    (call,) = (eqn for eqn in mapped.params["jaxpr"].eqns if eqn.primitive.name == "pallas_call")
    refs = [var.aval for var in call.params["jaxpr"].invars]
    buffers = sum(ref.size * 4 for ref in refs if ref.dtype == jnp.float32)
    assert buffers == module.vmem_bytes(4, 8 * 512 * 4, steps) == arrays * 8 * 512 * 4


@repeats
def test_eight_devices_play_without_a_finding():
    """One row and sixteen of an 8B layer on a v5e:2x4: one step and two. The player raises for a
    broken rule.
    """
    mesh = fa.check.topology_mesh("v5e:2x4", (8,), ("model",))
    specs = P(None, "model"), P(None, "model"), P("model")
    fn = jax.shard_map(
        lambda x, y, w: (sum_over_ring(x, w), sum_over_ring(y, w)),
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
    )
    arguments = arranged(mesh, [(1, 1024), (16, 1024), (1024, 4096)], specs)
    result = fa.check.play(jax.jit(fn), *arguments, topology="v5e:2x4")
    assert not result.notes
    assert [phase.name.partition(".")[0] for phase in result.slowest.phases].count("exchange") == 2
