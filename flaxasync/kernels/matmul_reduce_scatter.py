"""reduce_scatter(sum of x_i @ w_i) as one Pallas TPU kernel: each sum leaves, tile by tile, as soon as it is finished.

```
x_i  [B, R*m, k_i]   all rows, this device's part of the contraction     (R devices on the axis, B batches)
w_i  [k_i, n]        or [n, k_i], where transposed
y    [B, m, n]       this device's rows of the sum over all devices

step         0             1             ...   R - 1
core         a b c d       a b c d             a b c d      tiles of a block of rows: others' first, the own one last
link           a b c d       a b c d                        from vector memory into the neighbour's place for that tile
neighbour                  + a b c d           + a b c d    adds what came, in float32, rounds, sends on or keeps
```

A tile that came is needed one step after it was sent: it has all of a step for its trip. Half of the tiles of a block
run around the ring one way and half the other way, each for the owner whose turn it is that way (`ring.reduced_owner`).
The products are one flat walk (`reduce_walk`) in which tiles are fetched one product ahead, over all borders
(`reduce_body`). Where no tiles divide a side well, the last one is narrower.

A neighbour's places are two sets, used in turn. A place is written again only when the neighbour has said that it has
read it: one count each way, since tiles are sent and read in one order. All waits are for what an earlier tile left
behind, so no circle of waits can close.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.neighbours import HBM, check_ring, enter
from flaxasync.kernels.reduce_body import Body
from flaxasync.kernels.reduce_walk import ReduceWalk, Scratch, check_reduce, plan_reduce
from flaxasync.kernels.tiles import Tiles, vmem_limit
from flaxasync.mesh import device_at


def matmul_reduce_scatter(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    axis_name: str,
    *,
    transposed: bool = False,
    tiles: Tiles | None = None,
    directions: int = 2,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns y, of x's dtype; see the file. Inside `jax.shard_map`. Sums travel in that dtype.

    Args:
      xs: each [B, R*m, k_i], float32 or bfloat16, in whole hardware tiles; so is m.
      ws: each [k_i, n]; or [n, k_i], where `transposed`.
      axis_name: the mesh axis, of two devices or more.
      transposed: the products are x @ w.T.
      tiles: of a product, at most. Those used divide rows, k_i and n, or the last ones are narrower: see `Cut`.
      directions: 1, or 2 to send half of the tiles each way.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes that do not fit each other or hardware tiles; tiles that exceed vector memory; an axis of size
        one.
      NotImplementedError: another dtype; more tiles than there are semaphores.
    """
    caller = "matmul_reduce_scatter"
    size = check_ring(caller, axis_name, directions)
    check_reduce(caller, xs, ws, transposed, size)
    (batch, all_rows, _), dtype = xs[0].shape, xs[0].dtype
    m, n = all_rows // size, ws[0].shape[0 if transposed else 1]
    ks = [x.shape[2] for x in xs]
    walk, need = plan_reduce(caller, batch, m, ks, n, tiles, size, directions, dtype)
    kind = jax.typeof(xs[0]).mat
    kind = kind.update(varying=kind.varying.union(*(jax.typeof(v).mat.varying for v in (*xs, *ws))))
    moved = batch * m * n * dtype.itemsize
    streamed = size * sum(ks) * (walk.columns.count * batch * m + walk.rows.count * n) * dtype.itemsize
    kernel = functools.partial(_kernel, axis_name, walk, transposed, collective_id)
    return pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, m, n), dtype, manual_axis_type=kind),
            jax.ShapeDtypeStruct((2, batch, m, n), dtype, manual_axis_type=kind),
        ],
        in_specs=[HBM] * (2 * len(xs)),
        out_specs=[HBM, HBM],
        scratch_shapes=[Scratch.shapes(walk, transposed, dtype)],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=vmem_limit(need)),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * all_rows * sum(ks) * n,
            transcendentals=0,
            bytes_accessed=streamed + moved + 2 * (size - 1) * moved,
            remote_bytes_transferred=(size - 1) * moved,
        ),
        name=caller,
    )(*(x.reshape(batch, size, m, -1) for x in xs), *ws)[0]


def _kernel(
    axis_name: str,
    walk: ReduceWalk,
    transposed: bool,
    collective_id: int | None,
    *refs: Any,  # xs [B, R, m, k_i] HBM; ws [k_i, n] or [n, k_i] HBM; y [B, m, n] HBM; places [2, B, m, n] HBM; scratch
) -> None:
    count = len(walk.contraction.sides)
    body = Body(axis_name, walk, transposed, refs[:count], refs[count : 2 * count], *refs[-3:])
    tag = f"matmul_reduce_scatter {axis_name} {walk.ways} {transposed} {count}"
    enter(tag, [device_at(axis_name, -shift) for shift in body.shifts], collective_id)
    body.fetch(walk.at(0))
    body.clear_sums()
    pl.loop(0, walk.products)(body.product)
    body.finish()
