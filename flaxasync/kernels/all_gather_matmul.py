"""all_gather(x) @ w as one Pallas TPU kernel: each block is multiplied while the next ones travel.

```
x  [B, m, k]     this device's rows           (R devices on axis_name, B batches)
w  [k, n]        this device's columns; several share one trip of x
y  [B, R*m, n]   all rows, this device's columns
```

Every block goes once around the ring, forwarded from where it arrived; with two directions half of it goes each way.
Each has a place of its own in a gathered copy in HBM, so nothing is acknowledged. `hops` has the trips, `stream` and
`resident` have the orders of work.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.gather import resident, resident_plan, stream, stream_walk
from flaxasync.kernels.gather.hops import Hops, HopSemaphores, cut
from flaxasync.kernels.neighbours import HBM, check_ring
from flaxasync.kernels.tiles import LANES, Tiles, check_operand, sublanes, vmem_limit


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    transposed: bool = False,
    keep_gathered: bool = False,
    tiles: Tiles | None = None,
    directions: int = 2,
    collective_id: int | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Returns ys, and the gathered x or None; see the file. Inside `jax.shard_map`.

    Args:
      x: [B, m, k], float32 or bfloat16, in whole hardware tiles.
      ws: one or more [k, n], of x's dtype; or [n, k], where `transposed`.
      axis_name: the mesh axis, of two devices or more.
      transposed: y = all_gather(x) @ w.T.
      keep_gathered: the gathered x, [B, R*m, k], is a result, too.
      tiles: of a step, at most.
      directions: 1, or 2 to send half of each block each way.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes that do not fit each other or hardware tiles, or cannot be halved; tiles that exceed vector
        memory; an axis of size one.
      NotImplementedError: another dtype.
    """
    caller = "all_gather_matmul"
    size = check_ring(caller, axis_name, directions)
    ws = tuple(ws)
    _check(caller, x, ws, transposed)
    batch, m, k = x.shape
    widths = [w.shape[0 if transposed else 1] for w in ws]
    parts = cut(caller, batch, m, sublanes(x.dtype), directions)
    chosen: resident_plan.Plan | stream_walk.Walk = resident_plan.plan(
        parts, size, k, widths, tiles or resident_plan.TILES, x.dtype
    ) or stream_walk.plan(caller, parts, size, k, widths, tiles or stream_walk.TILES, x.dtype)
    streams = isinstance(chosen, stream_walk.Walk)
    kind = _kinds(x, ws)
    shapes = [(batch, size, m, n) for n in widths] + [(batch, size, m, k)] * (streams or keep_gathered)
    scratch = (stream if streams else resident).Scratch.shapes(chosen, transposed, x.dtype)
    tag = f"{caller} {axis_name} {directions} {transposed} {keep_gathered} {len(ws)} {streams}"
    itemsize = x.dtype.itemsize
    outputs = pl.pallas_call(
        functools.partial(_kernel, tag, axis_name, chosen, len(ws), transposed, keep_gathered, collective_id),
        out_shape=[jax.ShapeDtypeStruct(s, x.dtype, manual_axis_type=kind) for s in shapes],
        in_specs=[HBM] * (1 + len(ws)),
        out_specs=[HBM] * len(shapes),
        scratch_shapes=[scratch, HopSemaphores.shapes(chosen.parts, size)],
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id,
            vmem_limit_bytes=vmem_limit(chosen.vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * size * batch * m * k * sum(widths),
            transcendentals=0,
            bytes_accessed=itemsize * (chosen.elements_read + size * batch * m * (sum(widths) + keep_gathered * k)),
            remote_bytes_transferred=(size - 1) * x.size * itemsize,
        ),
        name=caller,
    )(x, *ws)
    ys = tuple(y.reshape(batch, size * m, -1) for y in outputs[: len(ws)])
    return ys, outputs[-1].reshape(batch, size * m, k) if keep_gathered else None


def _check(caller: str, x: jax.Array, ws: tuple[jax.Array, ...], transposed: bool) -> None:
    form = "[n, k]" if transposed else "[k, n]"
    if x.ndim != 3 or not ws or any(w.ndim != 2 for w in ws):
        raise ValueError(
            f"{caller} needs x [B, m, k] and one or more w {form}: got {list(x.shape)} and "
            f"{[list(w.shape) for w in ws]}"
        )
    check_operand(caller, "a batch of x", x.shape[1:], x.dtype)
    for w in ws:
        n, k = w.shape if transposed else w.shape[::-1]
        check_operand(caller, "w", w.shape, w.dtype)
        if k != x.shape[2] or w.dtype != x.dtype:
            raise ValueError(
                f"{caller} contracts x [B, m, k] with w {form} of one dtype: got {jax.typeof(x)} and {jax.typeof(w)}"
            )
        if transposed and n % LANES:
            raise ValueError(f"{caller} needs n of w [n, k] to be a multiple of 128: got {n}; pad it")


def _kinds(x: jax.Array, ws: tuple[jax.Array, ...]) -> Any:
    """The manual axis type of what varies wherever x or a w does."""
    kind = jax.typeof(x).mat
    return kind.update(varying=kind.varying.union(*(jax.typeof(w).mat.varying for w in ws)))


def _kernel(
    tag: str,
    axis_name: str,
    chosen: resident_plan.Plan | stream_walk.Walk,
    count: int,
    transposed: bool,
    keep_gathered: bool,
    collective_id: int | None,
    x: Any,  # [B, m, k] HBM
    *refs: Any,  # ws [k, n] or [n, k] HBM; ys [B, R, m, n] HBM; perhaps gathered [B, R, m, k] HBM; scratch
) -> None:
    ws, ys, (*gathered, scratch, semaphores) = refs[:count], refs[count : 2 * count], refs[2 * count :]
    hops = Hops(axis_name, chosen.parts, x, gathered[0] if gathered else None, semaphores)
    if isinstance(chosen, stream_walk.Walk):
        work: Any = stream.Stream(chosen, hops, ws, ys, transposed, keep_gathered, scratch)
    else:
        work = resident.Resident(chosen, hops, ws, ys, transposed, keep_gathered, scratch)
    work.begin()
    hops.enter(tag, collective_id)
    work.run()
