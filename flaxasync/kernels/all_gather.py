"""All-gather along one mesh axis as one Pallas TPU kernel, from HBM to HBM.

Each block goes once around the ring, forwarded from the place where it arrived; with `directions=2` its upper half goes
one way and its lower half the other, in half of the time. Every block has a place of its own at every device, so
nothing is acknowledged. The own block is copied while the first hop is on its way.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.neighbours import HBM, check_ring, enter, halves, ways
from flaxasync.kernels.tiles import check_operand, sublanes
from flaxasync.mesh import device_at


def all_gather(
    x: jax.Array, axis_name: str, *, directions: int | None = 1, collective_id: int | None = None
) -> jax.Array:
    """Returns the rows of all R devices on an axis: [R*m, n], the same on each. Inside `jax.shard_map`.

    Args:
      x: [m, n], this device's rows, float32 or bfloat16, in whole hardware tiles.
      axis_name: the mesh axis.
      directions: 1, or 2 to send half of each block each way; None is 2 where that is faster and m can be halved.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes that are no whole hardware tiles, or cannot be halved; an axis of size one.
      NotImplementedError: another dtype.
    """
    check_operand("all_gather", "x", x.shape, x.dtype)
    size = check_ring("all_gather", axis_name, directions or 1)
    m, n = x.shape
    directions = ways(size, m, sublanes(x.dtype), directions)
    parts = halves("all_gather", "rows of x", m, sublanes(x.dtype), directions)

    def body(x_ref: Any, o_ref: Any, copy_sem: Any, send_sem: Any, recv_sem: Any) -> None:
        index = lax.axis_index(axis_name)
        enter(
            f"all_gather {axis_name} {directions}", [device_at(axis_name, -shift) for shift, *_ in parts], collective_id
        )

        def rows(block: Any, first: int, length: int) -> Any:
            return pl.ds(pl.multiple_of(block * m + first, sublanes(x.dtype)), length)

        def hop(way: int, s: int) -> Any:
            shift, first, length = parts[way]
            place = o_ref.at[rows(lax.rem(index + (size - s) * shift % size, size), first, length), :]
            source = x_ref.at[pl.ds(first, length), :] if s == 0 else place
            sems = send_sem.at[way], recv_sem.at[way, s]
            return pltpu.make_async_remote_copy(source, place, *sems, device_id=device_at(axis_name, shift))

        own = pltpu.make_async_copy(x_ref, o_ref.at[rows(index, 0, m), :], copy_sem)
        own.start()
        for s in range(size - 1):
            with jax.named_scope("hop"):
                for way in range(len(parts)):
                    hop(way, s).start()
                for way in range(len(parts)):
                    hop(way, s).wait_recv()
        with jax.named_scope("finish"):
            own.wait()
            for way in range(len(parts)):
                for s in range(size - 1):
                    hop(way, s).wait_send()

    dma, moved = pltpu.SemaphoreType.DMA, x.size * x.dtype.itemsize
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((size * m, n), x.dtype, manual_axis_type=jax.typeof(x).mat),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[dma, dma((len(parts),)), dma((len(parts), size - 1))],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=2 * size * moved,
            remote_bytes_transferred=(size - 1) * moved,
        ),
        name="all_gather",
    )(x)
