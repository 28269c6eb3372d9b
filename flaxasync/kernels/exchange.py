"""All-reduce of few rows along one mesh axis, as one Pallas TPU kernel in which every device sends
to every other one.

```
one step    every device sends its whole array to all others, and adds what it received
two steps   device d adds column block d of all devices, then sends the finished block to all others
```

A ring has many hops one after the other. Here are one or two, but more bytes cross the links. Each
device adds in float32 in the order of the devices, so all have the same result to the last bit. The
entry barrier is with all others, because all write here. Each receive buffer is written once in a
call, and is read before the barrier of the next call.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.call import call
from flaxasync.kernels.engine.operands import LANES, Ref, Scalar, aligned, output
from flaxasync.kernels.engine.ring import Ring, enter
from flaxasync.kernels.engine.slots import start_send, wait
from flaxasync.mesh import device_at


def vmem_bytes(size: int, nbytes: int, steps: int) -> int:
    """Returns the bytes of x, the result, what is received and the finished sums, for x of `nbytes`
    on R devices.
    """
    return (3 + (size if steps == 1 else 1)) * nbytes


def exchange(
    x: jax.Array, axis_name: str, *, steps: int = 1, collective_id: int | None = None
) -> jax.Array:
    """Sums over the R devices on an axis, for each of them: [m, n] -> [m, n]. Two steps need R
    blocks of columns.

    The result's type says that it does not vary over the axis. `vmem_bytes` says what lies in
    vector memory.
    """
    size = lax.axis_size(axis_name)
    m, n = x.shape
    ring = Ring(axis_name, size, 1)
    width = n if steps == 1 else n // size
    others = sorted(range(1, size), key=lambda hop: -min(hop, size - hop))  # the farthest first

    def block(device: Scalar) -> tuple[slice, pl.Slice]:
        return slice(None), aligned(0 if steps == 1 else device * width, width, LANES)

    def kernel(
        x_ref: Ref, o_ref: Ref, received: Ref, finished: Ref, send_sem: Ref, recv_sem: Ref
    ) -> None:
        me = ring.index
        there = {hop: device_at(axis_name, hop) for hop in others}
        enter(f"exchange {axis_name} {steps}", there.values(), collective_id)
        with jax.named_scope("reduce"):
            for hop in others:
                source = x_ref.at[block(ring.behind(size - hop, 0))]
                start_send(source, received.at[me], send_sem.at[0], recv_sem.at[0, me], there[hop])
            received[me] = x_ref[block(me)]
            for hop in others:
                wait(received.at[0], recv_sem.at[0, ring.behind(hop, 0)])
            total = received[0].astype(jnp.float32)
            for device in range(1, size):
                total += received[device].astype(jnp.float32)
            finished[block(me)] = total.astype(x.dtype)
        with jax.named_scope("gather"):
            own = finished.at[block(me)]
            for hop in others if steps == 2 else ():
                start_send(own, own, send_sem.at[1], recv_sem.at[1, me], there[hop])
            for hop in others if steps == 2 else ():
                wait(own, recv_sem.at[1, ring.behind(hop, 0)])
            o_ref[...] = finished[...]
        for step in range(steps):
            for _ in others:
                wait(own, send_sem.at[step])

    dma = pltpu.SemaphoreType.DMA
    nbytes = x.size * x.dtype.itemsize
    buffers = pltpu.VMEM((size, m, width), x.dtype), pltpu.VMEM((m, n), x.dtype)
    (total,) = call(
        kernel,
        [x],
        name="exchange",
        results=[output(x.shape, x, invarying=(axis_name,))],
        scratch=[*buffers, dma((steps,)), dma((steps, size))],
        collective_id=collective_id,
        vmem_bytes=vmem_bytes(size, nbytes, steps),
        flops=size * m * width,
        hbm_bytes=2 * nbytes,
        sent=steps * (size - 1) * m * width * x.dtype.itemsize,
        memory=pl.BlockSpec(memory_space=pltpu.VMEM),
    )
    return total
