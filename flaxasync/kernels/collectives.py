"""All-gather and all-reduce along one mesh axis, as Pallas TPU kernels.

`all_gather` moves blocks from HBM to HBM. Each block goes once around the ring, forwarded from
where it arrived, with two directions half of its rows each way (`engine.gather`). The own block is
copied while the first hop is on its way.

`all_reduce` is a grid over tiles, with hops in vector memory. Every tile of the result has a ring
reduction of its own, while the next tile's operand comes from HBM and the last tile's result goes
there. A block is some of a tile's rows. Partial sums travel in x's dtype and are added in float32.

```
hop s       device i sends its sum of block i - s - 1, and receives one of block i - s - 2
the end     device i has block i, summed over all devices    (direction 1 is the mirror image)
then        the finished blocks go around the ring once more
```

Receive buffers are not acknowledged. In the reduction every device adds to every sum, so when a
device has its sum of one tile, its neighbour has begun that tile, and has read all that it received
for the tile before: two sets of receive buffers, used in turn, suffice. For the second round one
set does. It begins when the own sum is there, to which the neighbour added its share after it had
stored the tile before.

Tiles may hang over the edges of the result. What lies there is whatever the memory held. It
travels, too, and is added up, but only to what lies there on other devices, and it is never stored.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.gather import BlockLayout, Gather, GatherSemaphores
from flaxasync.kernels.engine.operands import (
    HBM,
    LANES,
    Ref,
    Tiles,
    aligned,
    output,
    sublanes,
    when,
)
from flaxasync.kernels.engine.ring import Ring, choose_directions, half_blocks
from flaxasync.kernels.engine.slots import start_send, wait
from flaxasync.kernels.engine.tiling import Tiling, remainder
from flaxasync.kernels.engine.vector_memory import (
    check_semaphores,
    check_vmem,
    fitting,
    vmem_limit,
)

TILES = Tiles(1024, 1, 1024)  # of the result of an all-reduce; there is no k


def all_gather(
    x: jax.Array, axis_name: str, *, directions: int | None = 1, collective_id: int | None = None
) -> jax.Array:
    """Returns the rows of all R devices on an axis, for each of them: [m, n] -> [R*m, n].

    With two directions, half of the rows of x goes each way; None is 2 where that is faster and m
    can be halved.

    Raises:
      ValueError: with two directions, the rows have no halves of whole hardware tiles.
      NotImplementedError: there are more devices than semaphores.
    """
    caller = "all_gather"
    size = lax.axis_size(axis_name)
    m, n = x.shape
    unit = sublanes(x.dtype)
    directions = choose_directions(size, m, unit, directions)
    half_blocks(caller, "rows of x", m, unit, directions)  # raises if there are none
    ring = Ring(axis_name, size, directions)
    layout = BlockLayout.of(1, m, unit, directions)
    check_semaphores(caller, size, directions * size)

    def body(x_ref: Ref, o_ref: Ref, semaphores: GatherSemaphores) -> None:
        gather = Gather(ring, layout, x_ref, o_ref, semaphores)
        ring.enter(caller, collective_id)
        gather.start_copy_own()
        gather.send_own()
        for hop in range(1, size):
            gather.receive(hop)
            gather.send(hop)
        with jax.named_scope("finish"):
            gather.wait_for_own()
            gather.finish()

    moved = x.size * x.dtype.itemsize
    semaphores: Ref = GatherSemaphores.allocate(layout, size)
    gathered = pl.pallas_call(
        body,
        out_shape=output((1, size, m, n), x),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[semaphores],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=2 * size * moved,
            remote_bytes_transferred=(size - 1) * moved,
        ),
        name=caller,
    )(x.reshape(1, m, n))
    return gathered.reshape(size * m, n)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllReduceScratch:
    """Scratch memory of an all-reduce; m and n are the sides of a block."""

    outgoing: Ref  # [m, n] VMEM, the partial sum that is sent
    received: Ref  # [2, R - 1, m, n] VMEM, two sets of receive buffers
    send_sem: Ref  # [directions] DMA semaphores
    recv_sem: Ref  # [2, directions, R - 1] DMA semaphores


def all_reduce(
    x: jax.Array,
    axis_name: str,
    *,
    tiles: Tiles | None = None,
    directions: int | None = 1,
    collective_id: int | None = None,
) -> jax.Array:
    """Sums over the R devices on an axis, for each of them: [m, n] -> [m, n]. m is in R blocks of
    whole hardware tiles.

    The result's type says that it does not vary over the axis. `tiles` are m and n of a tile at
    most; None is `TILES`, or what fits. With two directions, half of the columns goes each way;
    None is 2 where that is faster and n can be halved.

    Raises:
      ValueError: with two directions, the columns of a tile have no halves of whole hardware tiles.
      NotImplementedError: there are more devices than semaphores.
    """
    caller = "all_reduce"
    size = lax.axis_size(axis_name)
    rows, width = x.shape
    ring = Ring(axis_name, size, choose_directions(size, width, LANES, directions))
    tile, vmem_bytes = _tile(caller, x, ring, tiles)
    m = tile.m // size
    n = tile.n
    hops = size - 1
    halves = half_blocks(caller, "columns of a tile", n, LANES, ring.directions)
    check_semaphores(caller, size, 3 * ring.directions * hops)

    def reduce(x_tile: Ref, scratch: AllReduceScratch, o_ref: Ref) -> None:
        """Puts this device's block of the sum over all devices into o_ref."""
        # the set that this tile uses
        buffers = remainder(pl.program_id(0) * pl.num_programs(1) + pl.program_id(1), 2)

        def partial_sum(direction: int, hop: int) -> jax.Array:
            """Returns what is sent in a hop: what this device has of that block, and what it has
            received.
            """
            block = ring.behind(hop + 1, direction)
            columns = halves[direction]
            own = x_tile[aligned(block * m, m, sublanes(x.dtype)), columns].astype(jnp.float32)
            if hop == 0:
                return own
            return own + scratch.received[buffers, hop - 1, :, columns].astype(jnp.float32)

        for hop in range(hops):
            with jax.named_scope("reduce"):
                for d in ring.both:
                    outgoing = scratch.outgoing.at[:, halves[d]]
                    outgoing[...] = partial_sum(d, hop).astype(x.dtype)
                    target = scratch.received.at[buffers, hop, :, halves[d]]
                    recv_sem = scratch.recv_sem.at[buffers, d, hop]
                    start_send(outgoing, target, scratch.send_sem.at[d], recv_sem, ring.receiver(d))
                for d in ring.both:
                    moved = scratch.outgoing.at[:, halves[d]]
                    wait(moved, scratch.send_sem.at[d])
                    wait(moved, scratch.recv_sem.at[buffers, d, hop])
        for d in ring.both:
            o_ref[:, halves[d]] = partial_sum(d, hops).astype(x.dtype)

    def kernel(
        x_tile: Ref,
        o_tile: Ref,
        scratch: AllReduceScratch,
        finished: Ref,
        send_sem: Ref,
        recv_sem: Ref,
    ) -> None:
        first_tile = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
        when(first_tile, ring.enter, caller, collective_id)
        reduce(x_tile, scratch, finished.at[ring.index])
        for hop in range(hops):
            with jax.named_scope("gather"):
                blocks = [finished.at[ring.behind(hop, d), :, halves[d]] for d in ring.both]
                for d, block in enumerate(blocks):
                    start_send(block, block, send_sem.at[d], recv_sem.at[d, hop], ring.receiver(d))
                for d, block in enumerate(blocks):
                    wait(block, send_sem.at[d])
                    wait(block, recv_sem.at[d, hop])
        for number in range(size):
            o_tile[number * m : (number + 1) * m, :] = finished[number]

    dma = pltpu.SemaphoreType.DMA
    grid = (pl.cdiv(rows, tile.m), pl.cdiv(width, n))
    itemsize = x.dtype.itemsize
    finished = pltpu.VMEM((size, m, n), x.dtype)
    scratch: Ref = AllReduceScratch(
        outgoing=pltpu.VMEM((m, n), x.dtype),
        received=pltpu.VMEM((2, hops, m, n), x.dtype),
        send_sem=dma((ring.directions,)),
        recv_sem=dma((2, ring.directions, hops)),
    )
    spec = pl.BlockSpec((tile.m, n), lambda i, j: (i, j))
    result = output(x.shape, x, invarying=(axis_name,))
    sent = 2 * hops * grid[0] * grid[1] * m * n * itemsize
    return pl.pallas_call(
        kernel,
        out_shape=result,
        grid=grid,
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[scratch, finished, dma((ring.directions,)), dma((ring.directions, hops))],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 2,
            collective_id=collective_id,
            vmem_limit_bytes=vmem_limit(vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=x.size,
            transcendentals=0,
            bytes_accessed=2 * x.size * itemsize,
            remote_bytes_transferred=sent,
        ),
        name=caller,
    )(x)


def _tile(caller: str, x: jax.Array, ring: Ring, tiles: Tiles | None) -> tuple[Tiles, int]:
    """Returns the largest tile of the result up to the one asked for, and the bytes of vector
    memory.
    """
    m, n = x.shape
    # a tile, too, is halved
    if n >= LANES * ring.directions:
        lanes = LANES * ring.directions
    else:
        lanes = LANES

    def fit(most: Tiles) -> Tiles:
        height = Tiling.overhanging(m, most.m, ring.size * sublanes(x.dtype)).size
        return Tiles(height, 1, Tiling.overhanging(n, most.n, lanes).size)

    def need(t: Tiles) -> int:
        # Two tiles each of the operand and the result, and the blocks that are sent, received and
        # finished.
        buffers = 2 + 2 + 1 + (2 * ring.size - 1) / ring.size
        return int(t.m * t.n * (buffers * x.dtype.itemsize + 8))  # and two values of float32

    tile = fitting(tiles, TILES, fit, need)
    return tile, check_vmem(caller, tile, need)
