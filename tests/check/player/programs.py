"""Programs that are simulated, and what holds of every result."""

import atexit
import functools
import shutil
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from benchmarks.player_kernels import Tiles, program
from flaxasync.check import topology_mesh
from flaxasync.check.player import Result, play
from tests.check.programs import on_all_devices

SHAPE, TILES = (2048, 2048, 1024), Tiles(256, 256, 256, 256)


def play_shards(topology, local, in_specs, out_specs, *shapes, dtype=jnp.bfloat16, typed=False, **options):
    """Plays a function of shards over the axis "x"."""
    program = on_all_devices(topology, local, in_specs, out_specs, *shapes, dtype=dtype, typed=typed)
    return play(*program, topology=topology, **options)


def play_exchange(fault="", **options):
    local, rows = functools.partial(exchange, fault=fault), P("x", None)
    return play_shards("v5e:2x2", local, (rows,), rows, (4 * 256, 512), dtype=jnp.float32, **options)


def exchange(x: jax.Array, *, fault: str = "") -> jax.Array:
    """Returns the block of the left neighbour, which arrives in HBM and is copied out, with one rule broken or none."""

    def body(x_ref, o_ref, slot, send_sem, recv_sem, copy_sem):
        here, count = lax.axis_index("x"), lax.axis_size("x")
        right, left = lax.rem(here + 1, count), lax.rem(here + count - 1, count)
        if fault != "no barrier":
            barrier = pltpu.get_barrier_semaphore()
            pl.semaphore_signal(barrier, device_id={"x": right})
            if fault != "wrong barrier":  # without it a device never hears from the device that it writes into
                pl.semaphore_signal(barrier, device_id={"x": left})
            pl.semaphore_wait(barrier, 1 if fault == "wrong barrier" else 2)
        target = jnp.where(here == 0, left, right) if fault == "wrong neighbour" else right
        send = pltpu.make_async_remote_copy(x_ref, slot, send_sem, recv_sem, device_id={"x": target})
        send.start()
        if fault == "reads early":
            early = pltpu.make_async_copy(slot, o_ref, copy_sem)
            early.start()
            early.wait()
        if fault != "no wait for the send":
            send.wait_send()
        if fault != "no wait for the receipt":
            send.wait_recv()
        if fault == "waits twice":
            send.wait_recv()
        rows = pl.ds(pl.multiple_of(here * 8, 8), x.shape[0])  # ends past the buffer on all devices but the first
        copy = pltpu.make_async_copy(slot, o_ref.at[rows, :] if fault == "too far" else o_ref, copy_sem)
        copy.start()
        copy.wait()

    # libtpu puts a barrier of its own before a kernel that has none, unless it is told not to.
    barrier = {"skip_device_barrier": True} if fault == "no barrier" else {"collective_id": 5}
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 3,
        compiler_params=pltpu.CompilerParams(has_side_effects=True, **barrier),
        name="exchange",
    )(x)[0]


@functools.cache
def simulated(variant: str) -> tuple[str, Result]:
    """Returns a folder with the dumps of a variant of the 2x2 study at a small size, and its result."""
    folder = tempfile.mkdtemp(prefix="flaxasync-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fn, *arguments = program(variant, topology_mesh("v5e:2x2", (2, 2), ("x", "y")), SHAPE, TILES)
    return folder, play(fn, *arguments, topology="v5e:2x2", keep_dumps=folder)


def assert_times_add_up(result: Result) -> None:
    """Asserts that the times of each device are its total, and that no part is longer than the whole."""
    for device in result.devices:
        added = device.issue + device.matrix_stall + sum(device.waits.values())
        assert device.seconds == pytest.approx(added, rel=1e-6)
        for times in (device, *device.phases):
            assert times.matrix_busy <= times.issue + times.matrix_stall + 1e-9
            assert all(wait >= 0 for wait in times.waits.values())


def sent_bytes(result: Result) -> list[int]:
    """Returns the bytes that leave each device over links."""
    return [sum(size for kind, size in d.bytes.items() if "remote" in kind) for d in result.devices]
