"""all_gather(x).T @ dy as one Pallas TPU kernel: the weights' gradient of all_gather_matmul, while x travels again.

```
x     [B, m, k]       this device's rows                (R devices on the axis, B batches)
dy_i  [B, R*m, n_i]   all rows, this device's columns; several share one trip of x
dw_i  [k, n_i]        sums over all rows

chunk   0 of columns of x         1                            ...
core    own  s=1  s=2  ... R-1    own  s=1  ...                products with rows of dy; float32 sums of all columns
links    s=1  s=2  ...      | s=1  s=2                         each block one hop further, just before it is multiplied
```

A chunk of columns of x goes around the ring block by block, half of its rows each way, and is multiplied by all of dy's
columns where it is: its rows of dw are summed in vector memory and stored once. A hop moves a block while the block
before is multiplied, from the first chunk on, so that no chunk is waited for.

x is transposed first, by XLA and once: the matrix unit takes a left operand whose contraction lies along lanes.

Arrivals have two sets of places, for even and for odd chunks, and nothing is acknowledged. In each direction blocks
pass all devices in lockstep: when a device begins a chunk, its neighbour onward has begun the chunk before, and has
read, and sent on, what came in the chunk before that. `Body.begin` relies on it: it waits for the send of the step
before, and every product waits for its tiles before it begins the next step.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.neighbours import HBM, check_ring, enter
from flaxasync.kernels.outer_body import Body
from flaxasync.kernels.outer_walk import SETS, OuterWalk, Scratch, plan_outer
from flaxasync.kernels.tiles import LANES, Tiles, check_operand, vmem_limit
from flaxasync.mesh import device_at


def gather_outer(
    x: jax.Array,
    dys: tuple[jax.Array, ...],
    axis_name: str,
    *,
    tiles: Tiles | None = None,
    directions: int = 2,
    collective_id: int | None = None,
) -> tuple[jax.Array, ...]:
    """Returns dws, of x's dtype; see the file. Inside `jax.shard_map`.

    Args:
      x: [B, m, k], float32 or bfloat16, in whole hardware tiles; B*m a multiple of 128.
      dys: each [B, R*m, n_i], of x's dtype.
      axis_name: the mesh axis, of two devices or more.
      tiles: m columns of x in a chunk, k rows of x in a product, n columns of dy in one; at most. The last ones are
        narrower, where no tiles divide a side well.
      directions: 1, or 2 to send half of the rows each way.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes that do not fit each other or hardware tiles; tiles that exceed vector memory; an axis of size
        one.
      NotImplementedError: another dtype.
    """
    caller = "gather_outer"
    size = check_ring(caller, axis_name, directions)
    _check(caller, x, dys, size)
    (batch, m, k), dtype = x.shape, x.dtype
    widths = [dy.shape[2] for dy in dys]
    walk, need = plan_outer(caller, batch, m, k, widths, tiles, size, directions, dtype)
    kind = jax.typeof(x).mat
    kind = kind.update(varying=kind.varying.union(*(jax.typeof(dy).mat.varying for dy in dys)))
    shapes = [(k, n) for n in widths] + [(min(SETS, walk.chunks), size - 1, walk.chunk.size, batch * m)]
    itemsize = dtype.itemsize
    *dws, _ = pl.pallas_call(
        functools.partial(_kernel, axis_name, walk, collective_id),
        out_shape=[jax.ShapeDtypeStruct(s, dtype, manual_axis_type=kind) for s in shapes],
        in_specs=[HBM] * (1 + len(dys)),
        out_specs=[HBM] * len(shapes),
        scratch_shapes=[Scratch.shapes(walk, dtype)],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=vmem_limit(need)),
        cost_estimate=pl.CostEstimate(
            flops=2 * size * x.size * sum(widths),
            transcendentals=0,
            bytes_accessed=itemsize * ((walk.chunks * size * batch * m + k) * sum(widths) + (3 * size - 2) * x.size),
            remote_bytes_transferred=(size - 1) * x.size * itemsize,
        ),
        name=caller,
    )(x.reshape(batch * m, k).T, *(dy.reshape(batch, size, m, -1) for dy in dys))
    return tuple(dws)


def _check(caller: str, x: jax.Array, dys: tuple[jax.Array, ...], size: int) -> None:
    if x.ndim != 3 or not dys or any(dy.ndim != 3 or dy.shape[:2] != (x.shape[0], size * x.shape[1]) for dy in dys):
        raise ValueError(
            f"{caller} needs x [B, m, k] and dy [B, {size}*m, n]: got {list(x.shape)} and "
            f"{[list(dy.shape) for dy in dys]}"
        )
    for name, operand in (("x", x), *(("dy", dy) for dy in dys)):
        check_operand(caller, f"a batch of {name}", operand.shape[1:], operand.dtype)
        if operand.dtype != x.dtype:
            raise ValueError(f"{caller} needs operands of one dtype: got {x.dtype} and {operand.dtype}; cast them")
    check_operand(caller, "a batch of x", x.shape[1:], x.dtype)
    if x.shape[0] * x.shape[1] % LANES:
        raise ValueError(
            f"{caller} needs rows of x that are a multiple of {LANES} in all batches together: got "
            f"{x.shape[0]} * {x.shape[1]}; pad x"
        )


def _kernel(
    axis_name: str,
    walk: OuterWalk,
    collective_id: int | None,
    *refs: Any,  # x [k, B*m] HBM; dys [B, R, m, n_i] HBM; dws [k, n_i] HBM; places [sets, R-1, chunk, B*m] HBM; scratch
) -> None:
    count = len(walk.columns.sides)
    body = Body(axis_name, walk, refs[0], refs[1 : 1 + count], refs[1 + count : 1 + 2 * count], *refs[-2:])
    tag = f"gather_outer {axis_name} {walk.ways} {count}"
    enter(tag, [device_at(axis_name, -shift) for shift in body.shifts], collective_id)
    body.begin(walk.at(0))
    body.fetch(walk.at(0))
    pl.loop(0, walk.products)(body.product)
    body.finish()
