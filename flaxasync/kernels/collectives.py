"""All-gather, reduce-scatter and all-reduce along one mesh axis, as Pallas TPU kernels.

`all_gather` moves blocks from HBM to HBM. Each block goes once around the ring, forwarded from where it arrived, with
two directions half of its rows each way (`engine.gather`). The own block is copied while the first hop is on its way.

`reduce_scatter` and `all_reduce` are a grid over tiles, with hops in vector memory. Every tile of the result has a ring
reduction of its own, while the next tile's operand comes from HBM and the last tile's result goes there. What travels
never lies in HBM. Partial sums travel in x's dtype and are added in float32.

```
hop s       device i sends its partial sum of block i - s - 1, and receives its neighbour's of block i - s - 2
the end     device i has block i, summed over all devices          (direction 0; direction 1 is its mirror image)
all-reduce  a block is some of a tile's rows; the finished blocks go around the ring once more
```

Receive buffers are not acknowledged. In the reduction every device adds to every sum, so when a device has its sum of
one tile, its neighbour has begun that tile, and has read all that it received for the tile before: two sets of receive
buffers, used in turn, suffice. For the second round of an all-reduce one set does. It begins when the own sum is there,
to which the neighbour added its share after it had stored the tile before.

Tiles may hang over the edges of the result. What lies there is whatever the memory held. It travels, too, and is added
up, but only to what lies there on other devices, and it is never stored.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.call import call, check_vmem, fitting, vmem_limit
from flaxasync.kernels.engine.gather import BlockLayout, Gather, GatherSemaphores
from flaxasync.kernels.engine.operands import LANES, Ref, Scalar, Tiles, aligned, output, sublanes
from flaxasync.kernels.engine.ring import Ring, choose_directions, half_blocks
from flaxasync.kernels.engine.slots import start_send, wait
from flaxasync.kernels.engine.tiling import Tiling, remainder

TILES = Tiles(1024, 1, 1024)  # of the result of a reduction; there is no k


def all_gather(
    x: jax.Array, axis_name: str, *, directions: int | None = 1, collective_id: int | None = None
) -> jax.Array:
    """Returns the rows of all R devices on an axis, for each of them: [m, n] -> [R*m, n].

    With two directions, half of the rows of x goes each way; None is 2 where that is faster and m can be halved.

    Raises:
      ValueError: with two directions, the rows have no halves of whole hardware tiles.
    """
    caller, size, (m, n), unit = "all_gather", lax.axis_size(axis_name), x.shape, sublanes(x.dtype)
    directions = choose_directions(size, m, unit, directions)
    half_blocks(caller, "rows of x", m, unit, directions)  # raises if there are none
    ring, layout = Ring(axis_name, size, directions), BlockLayout.of(1, m, unit, directions)

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
    (gathered,) = call(
        body,
        [x.reshape(1, m, n)],
        name=caller,
        results=[output((1, size, m, n), x)],
        scratch=[GatherSemaphores.allocate(layout, size)],
        collective_id=collective_id,
        vmem_bytes=None,
        flops=0,
        hbm_bytes=2 * size * moved,
        sent=(size - 1) * moved,
    )
    return gathered.reshape(size * m, n)


def reduce_scatter(
    x: jax.Array,
    axis_name: str,
    *,
    tiles: Tiles | None = None,
    directions: int | None = 1,
    collective_id: int | None = None,
) -> jax.Array:
    """Sums over the R devices on an axis; each gets its block of rows: [R*m, n] -> [m, n].

    `tiles` are m and n of a tile of the result, at most; R tiles of x lie in vector memory. None is `TILES`, or what
    fits. With two directions, half of the columns goes each way; None is 2 where that is faster and n can be halved.

    Raises:
      ValueError: with two directions, the columns of a tile have no halves of whole hardware tiles.
    """
    reduction = _reduction(x, axis_name, tiles, directions, collective_id, rounds=1)

    def body(x_tile: Ref, o_tile: Ref, scratch: _Scratch) -> None:
        reduction.reduce(lambda block, columns: x_tile[block, :, columns], scratch, o_tile)

    x = x.reshape(reduction.ring.size, -1, x.shape[1])
    return reduction.call(body, x, output(x.shape[1:], x))


def all_reduce(
    x: jax.Array,
    axis_name: str,
    *,
    tiles: Tiles | None = None,
    directions: int | None = 1,
    collective_id: int | None = None,
) -> jax.Array:
    """Sums over the R devices on an axis, for each of them: [m, n] -> [m, n]. m is in R blocks of whole hardware tiles.

    The result's type says that it does not vary over the axis. Arguments and errors are those of `reduce_scatter`.
    """
    reduction = _reduction(x, axis_name, tiles, directions, collective_id, rounds=2)
    ring, (m, n) = reduction.ring, reduction.block

    def body(x_tile: Ref, o_tile: Ref, scratch: _Scratch, finished: Ref, send_sem: Ref, recv_sem: Ref) -> None:
        def operand(block: Scalar, columns: pl.Slice) -> jax.Array:
            return x_tile[aligned(block * m, m, sublanes(x.dtype)), columns]

        reduction.reduce(operand, scratch, finished.at[ring.index])
        for hop in range(ring.size - 1):
            with jax.named_scope("gather"):
                blocks = [finished.at[ring.behind(hop, d), :, reduction.columns[d]] for d in ring.both]
                for d, block in enumerate(blocks):
                    start_send(block, block, send_sem.at[d], recv_sem.at[d, hop], ring.receiver(d))
                for d, block in enumerate(blocks):
                    wait(block, send_sem.at[d])
                    wait(block, recv_sem.at[d, hop])
        for block in range(ring.size):
            o_tile[block * m : (block + 1) * m, :] = finished[block]

    finished, dma = pltpu.VMEM((ring.size, m, n), x.dtype), pltpu.SemaphoreType.DMA
    semaphores = dma((ring.directions,)), dma((ring.directions, ring.size - 1))
    return reduction.call(body, x, output(x.shape, x, invarying=(axis_name,)), finished, *semaphores)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Scratch memory of a reduction."""

    outgoing: Ref  # [m, n] VMEM, the partial sum that is sent
    received: Ref  # [2, R - 1, m, n] VMEM, two sets of receive buffers
    send_sem: Ref  # [directions] DMA semaphores
    recv_sem: Ref  # [2, directions, R - 1] DMA semaphores


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """The reduction of one tile, [R, m, n] to [m, n], in vector memory."""

    caller: str  # the name of the kernel
    ring: Ring
    tile: Tiles  # of the result: one block, or in an all-reduce R blocks
    rounds: int  # how many times blocks go around the ring
    vmem_bytes: int
    collective_id: int | None

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of what travels for a tile."""
        return self.tile.m // (1 if self.rounds == 1 else self.ring.size), self.tile.n

    @property
    def columns(self) -> list[pl.Slice]:
        """The columns that travel in each direction."""
        return half_blocks(self.caller, "columns of a tile", self.tile.n, LANES, self.ring.directions)

    def reduce(self, operand: Callable[[Scalar, pl.Slice], jax.Array], scratch: _Scratch, o_ref: Ref) -> None:
        """Puts the sum over all devices of operand(block, columns) into o_ref."""
        ring, buffers = self.ring, _buffer_set()

        def partial_sum(direction: int, hop: int) -> jax.Array:
            """Returns what is sent in a hop: what this device has of that block, and what it has received."""
            columns = self.columns[direction]
            own = operand(ring.behind(hop + 1, direction), columns).astype(jnp.float32)
            return own if hop == 0 else own + scratch.received[buffers, hop - 1, :, columns].astype(jnp.float32)

        for hop in range(ring.size - 1):
            with jax.named_scope("reduce"):
                for d in ring.both:
                    outgoing = scratch.outgoing.at[:, self.columns[d]]
                    outgoing[...] = partial_sum(d, hop).astype(o_ref.dtype)
                    target = scratch.received.at[buffers, hop, :, self.columns[d]]
                    recv_sem = scratch.recv_sem.at[buffers, d, hop]
                    start_send(outgoing, target, scratch.send_sem.at[d], recv_sem, ring.receiver(d))
                for d in ring.both:
                    moved = scratch.outgoing.at[:, self.columns[d]]
                    wait(moved, scratch.send_sem.at[d])
                    wait(moved, scratch.recv_sem.at[buffers, d, hop])
        for d in ring.both:
            o_ref[:, self.columns[d]] = partial_sum(d, ring.size - 1).astype(o_ref.dtype)

    def call(
        self, body: Callable[..., None], x: jax.Array, result: jax.ShapeDtypeStruct, *more_scratch: Ref
    ) -> jax.Array:
        """Calls a kernel on the tiles of the result. x is [m, n] as the result, or [R, m, n]."""
        ring, tile, leading, dma = self.ring, self.tile, x.shape[:-2], pltpu.SemaphoreType.DMA
        grid = (pl.cdiv(result.shape[0], tile.m), pl.cdiv(result.shape[1], tile.n))
        hops, itemsize = ring.size - 1, x.dtype.itemsize
        outgoing, received = pltpu.VMEM(self.block, x.dtype), pltpu.VMEM((2, hops, *self.block), x.dtype)
        scratch: Ref = _Scratch(outgoing, received, dma((ring.directions,)), dma((2, ring.directions, hops)))
        limit, accessed = vmem_limit(self.vmem_bytes), (x.size + math.prod(result.shape)) * itemsize
        sent = self.rounds * hops * math.prod(grid) * math.prod(self.block) * itemsize

        def kernel(*refs: Ref) -> None:
            first_tile = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
            pl.when(first_tile)(lambda: ring.enter(self.caller, self.collective_id))
            body(*refs)

        return pl.pallas_call(
            kernel,
            out_shape=result,
            grid=grid,
            in_specs=[pl.BlockSpec((*leading, tile.m, tile.n), lambda i, j: (*(0 for _ in leading), i, j))],
            out_specs=pl.BlockSpec((tile.m, tile.n), lambda i, j: (i, j)),
            scratch_shapes=[scratch, *more_scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",) * 2, collective_id=self.collective_id, vmem_limit_bytes=limit
            ),
            cost_estimate=pl.CostEstimate(
                flops=x.size, transcendentals=0, bytes_accessed=accessed, remote_bytes_transferred=sent
            ),
            name=self.caller,
        )(x)


def _reduction(
    x: jax.Array, axis_name: str, tiles: Tiles | None, directions: int | None, collective_id: int | None, rounds: int
) -> _Reduction:
    """Chooses the tiles of the result, which one round of a reduce-scatter or the two of an all-reduce give."""
    caller = "reduce_scatter" if rounds == 1 else "all_reduce"
    size, (rows, n) = lax.axis_size(axis_name), x.shape
    ring = Ring(axis_name, size, choose_directions(size, n, LANES, directions))
    m, blocks = (rows // size, 1) if rounds == 1 else (rows, size)
    lanes = LANES * ring.directions if n >= LANES * ring.directions else LANES  # a tile, too, is halved

    def fit(most: Tiles) -> Tiles:
        height = Tiling.overhanging(m, most.m, blocks * sublanes(x.dtype)).size
        return Tiles(height, 1, Tiling.overhanging(n, most.n, lanes).size)

    def need(t: Tiles) -> int:
        # Two tiles each of the operand and the result, and the blocks that are sent, received and finished.
        buffers = 2 * (rows // m) + 2 + (rounds - 1) + (2 * size - 1) / blocks
        return int(t.m * t.n * (buffers * x.dtype.itemsize + 8))  # and two values of float32

    tile = fitting(tiles, TILES, fit, need)
    return _Reduction(caller, ring, tile, rounds, check_vmem(caller, tile, need), collective_id)


def _buffer_set() -> jax.Array:
    """Returns which of the two sets of receive buffers a tile uses."""
    return remainder(pl.program_id(0) * pl.num_programs(1) + pl.program_id(1), 2)
