"""all_gather(x) @ w as one Pallas TPU kernel: every block is multiplied while the next ones travel.

```
x  [B, m, k]     this device's rows           (R devices on axis_name, B batches)
w  [k, n]        this device's columns; several share one all-gather of x
y  [B, R*m, n]   all rows, this device's columns
```

Every block goes once around the ring, forwarded from where it arrived, with two directions half of it each way.
`engine.gather` has the gather. Where vector memory has room for the gathered x, `resident` has the order of work, and
else `stream`.
"""

from collections.abc import Sequence

import jax

from flaxasync.kernels.all_gather_matmul import resident, stream
from flaxasync.kernels.all_gather_matmul.stream import CALLER
from flaxasync.kernels.engine.call import call
from flaxasync.kernels.engine.gather import BlockLayout, Gather, GatherSemaphores
from flaxasync.kernels.engine.operands import LANES, Tiles, check_operands, output, sublanes
from flaxasync.kernels.engine.refs import Ref
from flaxasync.kernels.engine.ring import Ring, check_ring


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
    """Returns the ys, and the gathered x or None; see the head of this file. For use inside `jax.shard_map`.

    Args:
      x: [B, m, k], float32 or bfloat16, in whole hardware tiles.
      ws: one or more [k, n], of x's dtype; or [n, k] if `transposed`.
      axis_name: the mesh axis, of two devices or more.
      transposed: multiply by w.T.
      keep_gathered: whether the gathered x, [B, R*m, k], is a result, too.
      tiles: the largest tiles of a product.
      directions: 1, or 2 to send half of each block each way.
      collective_id: the id of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: shapes do not fit each other or hardware tiles, or cannot be halved; tiles exceed vector memory; the
        axis has one device.
      NotImplementedError: another dtype.
    """
    size, ws = check_ring(CALLER, axis_name, directions), tuple(ws)
    _check(x, ws, transposed)
    (batch, m, k), count, itemsize = x.shape, len(ws), x.dtype.itemsize
    widths = [w.shape[0 if transposed else 1] for w in ws]
    ring, layout = Ring(axis_name, size, directions), BlockLayout.of(CALLER, batch, m, sublanes(x.dtype), directions)
    work = layout, size, k, widths, transposed, tiles, x.dtype
    plan = resident.plan(*work) or stream.plan(*work)
    streams = isinstance(plan, stream.Schedule)
    shapes = [(batch, size, m, n) for n in widths] + [(batch, size, m, k)] * (streams or keep_gathered)

    def body(x_ref: Ref, *refs: Ref) -> None:
        w_refs, y_refs, (*gathered, scratch, semaphores) = refs[:count], refs[count : 2 * count], refs[2 * count :]
        in_hbm, in_vmem = gathered[0] if gathered else None, None if streams else scratch.x
        gather = Gather(ring, plan.layout, x_ref, in_hbm, semaphores, in_vmem)
        parts = gather, w_refs, y_refs, keep_gathered, scratch
        device: stream.Stream | resident.Resident
        device = stream.Stream(plan, *parts) if isinstance(plan, stream.Schedule) else resident.Resident(plan, *parts)
        device.begin()
        ring.enter(f"{CALLER} {transposed} {keep_gathered} {count} {streams}", collective_id)
        device.run()

    outputs = call(
        body,
        [x, *ws],
        name=CALLER,
        results=[output(shape, x, *ws) for shape in shapes],
        scratch=[plan.scratch(x.dtype), GatherSemaphores.allocate(plan.layout, size)],
        collective_id=collective_id,
        vmem_bytes=plan.vmem_bytes,
        flops=2 * size * batch * m * k * sum(widths),
        hbm_bytes=itemsize * (plan.elements_read + size * batch * m * (sum(widths) + keep_gathered * k)),
        sent=(size - 1) * x.size * itemsize,
    )
    ys = tuple(y.reshape(batch, size * m, -1) for y in outputs[:count])
    return ys, outputs[-1].reshape(batch, size * m, k) if keep_gathered else None


def _check(x: jax.Array, ws: Sequence[jax.Array], transposed: bool) -> None:
    form = "[n, k]" if transposed else "[k, n]"
    if x.ndim != 3 or not ws or any(w.ndim != 2 for w in ws):
        raise ValueError(
            f"{CALLER} needs x [B, m, k] and one or more w {form}: got {list(x.shape)} and "
            f"{[list(w.shape) for w in ws]}"
        )
    check_operands(CALLER, {"x": [x], "w": ws})
    for w in ws:
        n, k = w.shape if transposed else w.shape[::-1]
        if k != x.shape[2]:
            raise ValueError(f"{CALLER} contracts x [B, m, k] with w {form}: got {jax.typeof(x)} and {jax.typeof(w)}")
        if n % LANES:
            raise ValueError(f"{CALLER} needs n of w to be a multiple of {LANES}: got n={n}; pad w")
