"""The gather and the matmul of LHS[M_X, K_Y] . RHS[K_X, N] as one kernel: the study's fused variant, on any mesh.

```
x  [m, k]   this mesh row's rows, this mesh column's part of the contraction
w  [k', n]  the part of the contraction that this mesh *row* holds
o  [m, n]   sums over this mesh column's part: the column axis is still to be summed over
```

The rows of RHS that a mesh column needs go around it in blocks; `weights` says from whom they come, in which order.
A device multiplies with its own blocks while they travel, and with each other block once it has arrived, and adds the
products in o. On 2 x 2 devices there is one block: the devices on the diagonal own it and multiply at once, and the
others begin when it has arrived. `overlapped` has no such wait; this kernel is kept for comparison. From block to block
the sums lie in o, rounded to x's dtype.

Where a block travels more than one hop it is cut into slices, so that its next hop begins before all of it has arrived.
Every block has a receive buffer of its own at every device, and every slice a semaphore. So nothing is acknowledged.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels import gemm
from flaxasync.kernels.engine.call import call
from flaxasync.kernels.engine.operands import LANES, Tiles, largest_divisor, output, sublanes
from flaxasync.kernels.engine.refs import Ref, Scalar
from flaxasync.kernels.engine.ring import Ring
from flaxasync.kernels.engine.slots import start_send, wait
from flaxasync.kernels.engine.vmem import check_vmem
from flaxasync.kernels.mesh_matmul.schedule import largest_block
from flaxasync.kernels.mesh_matmul.weights import WeightBlocks

SLICES = 8  # of a block that travels more than one hop, about


def gather_gemm(
    x: jax.Array,
    w: jax.Array,
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    tiles: Tiles = gemm.TILES,
    directions: int | None = None,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns o; see the head of this file. The mesh has two rows or more, and shapes are whole hardware tiles.

    The arguments are those of `flaxasync.mesh_matmul`, and `collective_id`, the id of the entry barrier: by default one
    that no other kernel of the program has.

    Raises:
      ValueError: tiles exceed vector memory, or the contraction cannot be divided into blocks.
    """
    (m, k), (held, n), itemsize = x.shape, w.shape, x.dtype.itemsize
    size, unit = lax.axis_size(axis_names[0]), sublanes(x.dtype)
    rows = largest_block("gather_gemm", axis_names, k, held)
    directions = 2 if size > 2 and directions != 1 and rows % (2 * LANES) == 0 else 1
    rows //= directions
    blocks = WeightBlocks(Ring(axis_names[0], size, directions), axis_names[1], rows, k // rows, held // rows)
    tiles = tiles.within(m, rows, n)
    read = 0 if blocks.needed == 1 else 2  # tiles of o, for the sums of earlier blocks
    vmem_bytes = check_vmem("gather_gemm", tiles, lambda t: gemm.vmem_bytes(t, x.dtype) + read * t.m * t.n * itemsize)
    slice_rows = rows if size == 2 else largest_divisor(rows, max(rows // SLICES, unit), unit)
    cost, received_bytes = gemm.cost(tiles, m, k, n, itemsize), k * n * itemsize
    dma, accumulator = pltpu.SemaphoreType.DMA, pltpu.VMEM((tiles.m, tiles.n), jnp.float32)
    o, _ = call(
        functools.partial(_kernel, blocks, tiles, slice_rows, collective_id),
        [x, w],
        name="fused",
        results=[output((m, n), x), output((k, n), x)],
        scratch=[dma, dma((blocks.needed, rows // slice_rows)), *blocks.tables(), accumulator],
        collective_id=collective_id,
        vmem_bytes=vmem_bytes,
        flops=cost.flops,
        hbm_bytes=cost.bytes_accessed + 2 * received_bytes,
        sent=received_bytes,
    )
    return o


def _kernel(
    blocks: WeightBlocks,
    tiles: Tiles,
    slice_rows: int,
    collective_id: int | None,
    x_ref: Ref,  # [m, k] HBM
    w_ref: Ref,  # [k', n] HBM
    o_ref: Ref,  # [m, n] HBM
    received: Ref,  # [k, n] HBM: the blocks of other devices
    send_sem: Ref,
    recv_sem: Ref,  # [needed, slices]
    order: Ref,  # [needed + 1] SMEM: blocks in the order of their use
    first: Ref,  # [mesh rows] SMEM: where in `order` the blocks of each number of hops begin
    accumulator: Ref,  # [tiles.m, tiles.n] VMEM, float32
) -> None:
    slices = [(i, pl.ds(i * slice_rows, slice_rows)) for i in range(blocks.rows // slice_rows)]

    def own(t: Scalar) -> Ref:
        return w_ref.at[blocks.held_rows(t), :]

    def arrived(t: Scalar) -> Ref:
        return received.at[blocks.needed_rows(t), :]

    def send(t: Scalar, i: int, rows: pl.Slice, block: Ref) -> None:
        start_send(block.at[rows, :], arrived(t).at[rows, :], send_sem, recv_sem.at[t, i], blocks.receiver(t))

    def multiply(q: Scalar, t: Scalar, block: Ref) -> None:
        one = blocks.needed == 1
        columns, add_if = (x_ref, None) if one else (x_ref.at[:, blocks.needed_rows(t)], q > 0)
        gemm.stream(columns, block, o_ref, accumulator, tiles=tiles, add_if=add_if)

    blocks.enter("gather_gemm", collective_id)
    blocks.sort(order, first)

    @pl.loop(0, blocks.needed)
    def _(t: Scalar) -> None:
        for i, rows in slices:
            pl.when(blocks.hops(t) == 0)(functools.partial(send, t, i, rows, own(t)))

    @pl.loop(0, blocks.needed)
    def _(q: Scalar) -> None:
        t = order[q]
        is_own = blocks.hops(t) == 0
        pl.when(is_own)(lambda: multiply(q, t, own(t)))

        @pl.when(jnp.logical_not(is_own))
        def _() -> None:
            with jax.named_scope("wait"):
                for i, rows in slices:
                    wait(arrived(t).at[rows, :], recv_sem.at[t, i])
                    pl.when(blocks.goes_on(t))(functools.partial(send, t, i, rows, arrived(t)))
            multiply(q, t, arrived(t))

    with jax.named_scope("finish"):
        pl.loop(0, blocks.needed)(lambda t: pl.when(blocks.goes_on(t))(lambda: wait(arrived(t), send_sem)))
