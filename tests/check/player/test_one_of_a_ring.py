"""Kernels of which one device is simulated, as if all did the same: they take as long as all of
them, and where devices may differ all are simulated.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from benchmarks.programs import array
from flaxasync.check import compile_for, topology_devices, topology_mesh
from flaxasync.check.player.play import play_dump, play_kernel
from flaxasync.check.player.simulation import Simulation
from flaxasync.transport import direct

pytestmark = pytest.mark.slow


@pytest.fixture
def played(tmp_path):
    """A function (topology, mesh, local) -> the results of `play_kernel` and of `play_dump` for a
    function of the block [256, 512] of each device.
    """

    def played(topology, mesh, local):
        spec = P("x")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        x = array((mesh.shape["x"] * 256, 512), mesh, spec, jnp.bfloat16)
        program = compile_for(topology, jax.jit(mapped), x, keep_dumps=tmp_path)
        one = play_kernel(tmp_path, topology, program.coords, program.axes)
        return one, play_dump(tmp_path, topology=topology, coords=program.coords)

    return played


def times(result):
    """Returns the seconds of all phases of the device that takes longest."""
    return [(phase.name, phase.seconds, phase.exposed) for phase in result.slowest.phases]


def kernels(x):
    """A fused collective matmul and its gradients."""
    multiply = functools.partial(fa.all_gather_matmul, axis_name="x", backend="fused")
    y, pull = jax.vjp(multiply, x[None], jnp.ones((512, 512), x.dtype))
    dx, dw = pull(y)
    return dx[0] + dw[:256]


@pytest.mark.parametrize(
    ("topology", "shape"),
    [("v5e:2x2", (1, 4)), ("v5e:2x4", (2, 4)), ("v6e:2x4", (1, 8)), ("v5e:4x4", (1, 16))],
)
def test_one_device_of_a_ring_takes_as_long_as_all(played, topology, shape):
    one, whole = played(topology, topology_mesh(topology, shape, ("data", "x")), kernels)
    assert (len(one.devices), len(whole.devices)) == (1, shape[0] * shape[1])
    assert times(one) == times(whole)
    assert one.seconds == whole.seconds


def one_hop(pairs, x):
    return lax.ppermute(x, "x", pairs)


def direct_copies(x):
    """Between opposite corners of a square are two links, which two transfers use."""
    gather = direct.all_gather("x", 4, 0)
    return gather.done(*gather.start(x))[:256]


def more_on_each_device(x):
    """Nothing travels."""
    return lax.fori_loop(0, 1 + lax.axis_index("x"), lambda _, y: jnp.tanh(y @ x.T @ x), x)


def more_on_a_middle_device(x):
    """Nothing travels, and the first device and the last have as much to do."""
    turns = 1 + (lax.axis_index("x") == 2).astype(int)
    return lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ x.T @ x), x)


def more_on_a_middle_device_of_a_ring(x):
    return kernels(more_on_a_middle_device(x))


def both_ways_on_a_line(x):
    """The two ends have one neighbour, and less to do than the devices between them."""
    size = lax.axis_size("x")

    def kernel(x, o, send, receive):
        me = lax.axis_index("x")
        places = [me + 1, me - 1]
        there = [(place >= 0) & (place < size) for place in places]
        barrier = pltpu.get_barrier_semaphore()
        copies = [
            pltpu.make_async_remote_copy(x, o.at[n], send.at[n], receive, device_id=place)
            for n, place in enumerate(places)
        ]
        for place, is_there in zip(places, there, strict=True):
            pl.when(is_there)(functools.partial(pl.semaphore_signal, barrier, device_id=place))
        for is_there in there:
            pl.when(is_there)(functools.partial(pl.semaphore_wait, barrier))
        for copy, is_there in zip(copies, there, strict=True):
            pl.when(is_there)(copy.start)
        for copy, is_there in zip(copies, there, strict=True):
            pl.when(is_there)(copy.wait)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(collective_id=0),
    )
    return call(x)[0]


@pytest.mark.parametrize(
    "local",
    [
        both_ways_on_a_line,
        functools.partial(one_hop, [(0, 1)]),
        functools.partial(one_hop, [(1, 0)]),
        functools.partial(one_hop, [(2, 3)]),
        direct_copies,
        more_on_each_device,
        more_on_a_middle_device,
        more_on_a_middle_device_of_a_ring,
    ],
    ids=lambda local: getattr(local, "__name__", None),
)
def test_where_devices_may_differ_all_are_simulated(played, local):
    one, whole = played("v5e:2x2", topology_mesh("v5e:2x2", (4,), ("x",)), local)
    assert len(one.devices) == 4
    assert one.seconds == whole.seconds


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 7, 6, 5, 3, 1)],
    ids=["way home", "in the middle"],
)
def test_a_ring_with_a_longer_way_is_simulated_whole(played, order):
    """Some of its hops are longer than one link."""
    mesh = Mesh(np.array(topology_devices("v5e:2x4"))[list(order)], ("x",))
    one, whole = played("v5e:2x4", mesh, kernels)
    assert len(one.devices) == 8
    assert one.seconds == whole.seconds


def test_one_device_is_simulated_once(tmp_path, monkeypatch):
    runs = []
    run = Simulation.run
    monkeypatch.setattr(Simulation, "run", lambda self: runs.append(self) or run(self))
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    program = compile_for("v5e:1x1", jax.jit(lambda x: x @ x), x, keep_dumps=tmp_path)
    assert len(play_kernel(tmp_path, "v5e:1x1", program.coords, program.axes).devices) == 1
    assert len(runs) == 1
