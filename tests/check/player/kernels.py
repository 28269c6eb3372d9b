"""A ring exchange in one kernel, and the same kernel with one rule broken, for the tests that plant a fault.

Four devices are on one axis. Each sends its block to the next one, which copies it out. The correct form has a barrier
with both neighbours, starts the transfer, waits for both of its ends, and copies only then.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, COLUMNS = 256, 512


def exchange(x: jax.Array, *, fault: str = "") -> jax.Array:
    """Returns the block of the left neighbour, which arrives in HBM and is copied out."""

    def body(x_ref, o_ref, slot, send_sem, recv_sem, copy_sem):
        here, count = lax.axis_index("ring"), lax.axis_size("ring")
        right, left = lax.rem(here + 1, count), lax.rem(here + count - 1, count)
        if fault != "no barrier":
            barrier = pltpu.get_barrier_semaphore()
            pl.semaphore_signal(barrier, device_id={"ring": right})
            if fault != "wrong barrier":  # without it a device never hears from the device that it writes into
                pl.semaphore_signal(barrier, device_id={"ring": left})
            pl.semaphore_wait(barrier, 1 if fault == "wrong barrier" else 2)
        target = jnp.where(here == 0, left, right) if fault == "wrong neighbour" else right
        send = pltpu.make_async_remote_copy(x_ref, slot, send_sem, recv_sem, device_id={"ring": target})
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
        rows = pl.ds(pl.multiple_of(here * 8, 8), ROWS)  # ends past the buffer on all devices but the first
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


def exchange_program(mesh: Mesh, fault: str = "") -> tuple:
    """Returns the jitted exchange on a mesh with the axis "ring", and its argument."""
    spec = P("ring", None)
    x = jax.ShapeDtypeStruct((ROWS * mesh.size, COLUMNS), jnp.float32, sharding=NamedSharding(mesh, spec))
    local = functools.partial(exchange, fault=fault)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)), x
