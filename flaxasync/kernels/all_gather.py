"""All-gather along one mesh axis as one Pallas TPU kernel, from HBM to HBM.

Each block goes once around the ring, forwarded from where it arrived; with two directions half of its rows goes each
way, in half of the time. See `engine.gather`. The own block is copied while the first hop is on its way.
"""

import jax

from flaxasync.kernels.engine.call import call
from flaxasync.kernels.engine.gather import BlockLayout, Gather, GatherSemaphores
from flaxasync.kernels.engine.operands import check_operand, output, sublanes
from flaxasync.kernels.engine.refs import Ref
from flaxasync.kernels.engine.ring import Ring, check_ring, choose_directions, half_blocks

CALLER = "all_gather"


def all_gather(
    x: jax.Array, axis_name: str, *, directions: int | None = 1, collective_id: int | None = None
) -> jax.Array:
    """Returns the rows of all R devices on an axis, [R*m, n], on each of them. For use inside `jax.shard_map`.

    Args:
      x: [m, n], this device's rows, float32 or bfloat16, in whole hardware tiles.
      axis_name: the mesh axis, of two devices or more.
      directions: 1, or 2 to send half of each block each way; None is 2 where that is faster and m can be halved.
      collective_id: the id of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: x is not in whole hardware tiles, or cannot be halved; the axis has one device.
      NotImplementedError: another dtype.
    """
    check_operand(CALLER, "x", x.shape, x.dtype)
    size = check_ring(CALLER, axis_name, directions or 1)
    (m, n), unit = x.shape, sublanes(x.dtype)
    directions = choose_directions(size, m, unit, directions)
    half_blocks(CALLER, "rows of x", m, unit, directions)  # raises if there are none
    ring, layout = Ring(axis_name, size, directions), BlockLayout.of(CALLER, 1, m, unit, directions)

    def body(x_ref: Ref, o_ref: Ref, semaphores: GatherSemaphores) -> None:
        gather = Gather(ring, layout, x_ref, o_ref, semaphores)
        ring.enter(CALLER, collective_id)
        gather.start_copy_own()
        gather.send_own()
        for hop in range(1, size):
            gather.receive(hop)
            gather.send(hop)
        with jax.named_scope("finish"):
            gather.wait_for_own()
            gather.finish()

    moved = x.size * x.dtype.itemsize
    (gathered,) = call(
        body,
        [x.reshape(1, m, n)],
        name=CALLER,
        results=[output((1, size, m, n), x)],
        scratch=[GatherSemaphores.allocate(layout, size)],
        collective_id=collective_id,
        vmem_bytes=None,
        flops=0,
        hbm_bytes=2 * size * moved,
        sent=(size - 1) * moved,
    )
    return gathered.reshape(size * m, n)
