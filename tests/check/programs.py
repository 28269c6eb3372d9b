"""Programs that the tests compile for topologies that are not there, and simulate, each once in a
process.
"""

import atexit
import functools
import shutil
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.compute_on import compute_on
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.player_kernels import Tiles, program
from benchmarks.programs import array
from flaxasync.check import HLO_ONLY, CompiledProgram, compile_for, topology_mesh, topology_size
from flaxasync.check.player import Result, play
from tests.check import async_forms


def all_gather(x, w):
    return x @ w + lax.all_gather(x, "x", tiled=True).sum(0, keepdims=True)


def all_gather_and_matmul(x, w):
    return lax.all_gather(x, "x", tiled=True).sum(0, keepdims=True) + jnp.tanh(x @ w) @ w


def psum(x, w):
    return lax.psum(x @ w, "x")


def reduce_scatter(x, w):
    return lax.psum_scatter(x @ w, "x", tiled=True)


def all_to_all(x, w):
    return lax.all_to_all(x @ w, "x", 0, 1, tiled=True)


def ppermute(x, w):
    n = lax.axis_size("x")
    return lax.ppermute(x, "x", [(i, (i + 1) % n) for i in range(n)]) + jnp.tanh(x @ w) @ w


def scan_of_collectives(x, w):
    n = lax.axis_size("x")

    def step(carry, _):
        moved = lax.ppermute(carry, "x", [(i, (i + 1) % n) for i in range(n)])
        return moved + lax.psum(carry @ w, "x"), None

    return lax.scan(step, x, None, length=4)[0]


def host(x, w):
    on_host = compute_on(
        lambda x: x * 2 + 1, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device
    )
    return on_host(x) + x @ w


COLLECTIVES = (all_gather, psum, reduce_scatter, all_to_all, ppermute, scan_of_collectives)


def on_all_devices(topology, local, in_specs, out_specs, *shapes, dtype=jnp.bfloat16, typed=False):
    """Returns a jitted function of shards over the axis "x" of all devices, and its arguments of
    these global shapes.

    With `typed`, JAX tracks over which axes values vary.
    """
    kind = AxisType.Explicit if typed else AxisType.Auto
    mesh = topology_mesh(topology, (topology_size(topology),), ("x",), axis_types=(kind,))
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=typed
    )
    return jax.jit(mapped), *(
        array(shape, mesh, spec, dtype) for shape, spec in zip(shapes, in_specs, strict=True)
    )


@functools.cache
def compiled(fn, topology: str, rows: int = 512) -> CompiledProgram:
    """Returns `fn(x, w)` of local shards x [rows, rows] and w [rows, rows], compiled for a
    topology.
    """
    shapes = (topology_size(topology) * rows, rows), (rows, rows)
    mapped = on_all_devices(topology, fn, (P("x"), P()), P("x"), *shapes)
    return compile_for(topology, *mapped, compiler_options=HLO_ONLY)


@functools.cache
def async_form(
    name: str, topology: str = "v5e:2x2", rows: int = 1024, keep_dumps: object = False
) -> CompiledProgram:
    """Returns one of the forms of async_forms.py, compiled for a topology."""
    shape = topology_size(topology) * rows, 1024
    mapped = on_all_devices(topology, getattr(async_forms, name), (P("x"),), P("x"), shape)
    options = {} if keep_dumps else HLO_ONLY
    return compile_for(topology, *mapped, keep_dumps=keep_dumps, compiler_options=options)


@functools.cache
def mesh_matmul() -> CompiledProgram:
    """Returns LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] of the 2x2 study on v5e."""
    mesh = topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    lhs, rhs = array((16384, 16384), mesh, P("x", "y")), array((16384, 8192), mesh, P("x", None))
    fn = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None)))
    return compile_for("v5e:2x2", fn, lhs, rhs, compiler_options=HLO_ONLY)


@functools.cache
def on_cpu(fn) -> str:
    """Returns the text of a program compiled for eight CPU devices."""
    mesh = jax.make_mesh((8,), ("x",))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    x, w = array((8 * 64, 64), mesh, P("x"), jnp.float32), array((64, 64), mesh, P(), jnp.float32)
    return jax.jit(mapped).lower(x, w).compile().as_text()


# Programs that are simulated, and what holds of every result.

SHAPE, TILES = (2048, 2048, 1024), Tiles(256, 256, 256, 256)


def play_shards(
    topology, local, in_specs, out_specs, *shapes, dtype=jnp.bfloat16, typed=False, **options
):
    """Simulates a function of shards over the axis "x" of all devices."""
    mapped = on_all_devices(topology, local, in_specs, out_specs, *shapes, dtype=dtype, typed=typed)
    return play(*mapped, topology=topology, **options)


def play_exchange(fault="", **options):
    local, rows = functools.partial(exchange, fault=fault), P("x", None)
    return play_shards(
        "v5e:2x2", local, (rows,), rows, (4 * 256, 512), dtype=jnp.float32, **options
    )


def exchange(x: jax.Array, *, fault: str = "") -> jax.Array:
    """Returns the block of the left neighbour, which arrives in HBM and is copied out, with one
    rule broken or none.
    """

    def body(x_ref, o_ref, slot, send_sem, recv_sem):
        here, count = lax.axis_index("x"), lax.axis_size("x")
        right, left = lax.rem(here + 1, count), lax.rem(here + count - 1, count)
        if fault != "no barrier":
            barrier = pltpu.get_barrier_semaphore()
            pl.semaphore_signal(barrier, device_id={"x": right})
            # without it a device never hears from the device that it writes into
            if fault != "wrong barrier":
                pl.semaphore_signal(barrier, device_id={"x": left})
            pl.semaphore_wait(barrier, 1 if fault == "wrong barrier" else 2)
        target = jnp.where(here == 0, left, right) if fault == "wrong neighbour" else right
        send = pltpu.make_async_remote_copy(
            x_ref, slot, send_sem, recv_sem, device_id={"x": target}
        )
        send.start()
        if fault == "reads early":
            pltpu.sync_copy(slot, o_ref)
        if fault != "no wait for the send":
            send.wait_send()
        if fault != "no wait for the receipt":
            send.wait_recv()
        if fault == "waits twice":
            send.wait_recv()
        # ends past the buffer on all devices but the first
        rows = pl.ds(pl.multiple_of(here * 8, 8), x.shape[0])
        pltpu.sync_copy(slot, o_ref.at[rows, :] if fault == "too far" else o_ref)

    # libtpu puts a barrier of its own before a kernel that has none, unless it is told not to.
    barrier = {"skip_device_barrier": True} if fault == "no barrier" else {"collective_id": 5}
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        compiler_params=pltpu.CompilerParams(has_side_effects=True, **barrier),
        name="exchange",
    )(x)[0]


@functools.cache
def simulated(variant: str) -> tuple[str, Result]:
    """Returns a folder with the dumps of a variant of the 2x2 study at a small size, and its
    result.
    """
    folder = tempfile.mkdtemp(prefix="flaxasync-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fn, *arguments = program(variant, topology_mesh("v5e:2x2", (2, 2), ("x", "y")), SHAPE, TILES)
    return folder, play(fn, *arguments, topology="v5e:2x2", keep_dumps=folder)


def assert_times_add_up(result: Result) -> None:
    """Asserts that the times of each device are its total, and that no part is longer than the
    whole.
    """
    for device in result.devices:
        added = device.issue + device.matrix_stall + sum(device.waits.values())
        assert device.seconds == pytest.approx(added, rel=1e-6)
        for times in (device, *device.phases):
            assert times.matrix_busy <= times.issue + times.matrix_stall + 1e-9
            assert all(wait >= 0 for wait in times.waits.values())


def sent_bytes(result: Result) -> list[int]:
    """Returns the bytes that leave each device over links."""
    return [sum(size for kind, size in d.bytes.items() if "remote" in kind) for d in result.devices]
