"""all_gather(x) @ w as one Pallas TPU kernel: every block is multiplied while the next ones travel.

```
x  [B, m, k]     this device's rows           (R devices on axis_name, B batches)
w  [k, n]        this device's columns; several share one all-gather of x
y  [B, R*m, n]   all rows, this device's columns
```

Every block goes once around the ring, forwarded from where it arrived, with two directions half of
it each way. `engine.gather` has the gather. There are two orders of work. In `stream` tiles of x
come from HBM. In `resident` the gathered x stays in vector memory, where it has room, and the
products follow a static `schedule`. With an epilogue the order is always `stream`, and so it is for
8-bit values, whose sums are multiplied with the scales of rows and columns.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flaxasync.kernels.all_gather_matmul import resident, stream
from flaxasync.kernels.all_gather_matmul.stream import CALLER
from flaxasync.kernels.all_gather_matmul.work import GatherWork
from flaxasync.kernels.engine.call import call
from flaxasync.kernels.engine.gather import BlockLayout, Gather, GatherSemaphores
from flaxasync.kernels.engine.matmul import Epilogue, laid_out_scales
from flaxasync.kernels.engine.operands import LANES, DType, Ref, Tiles, output, sublanes
from flaxasync.kernels.engine.ring import Ring


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    transposed: bool = False,
    keep_gathered: bool = False,
    epilogue: Epilogue | None = None,
    operands: Sequence[jax.Array] = (),
    measured: slice | None = None,
    scales: tuple[jax.Array, Sequence[jax.Array]] | None = None,
    result: DType | None = None,
    tiles: Tiles | None = None,
    directions: int = 2,
    collective_id: int | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Returns the ys, or an epilogue's results, and the gathered x or None. With two directions, a
    block has halves.

    Args beside those of the head of `flaxasync.kernels`: transposed: multiply by w.T; then each w
      is [n, k]. keep_gathered: whether the gathered x, [B, R*m, k], is a result, too. epilogue:
      what is made of the products of all w, which then have one shape, before they leave vector
      memory. operands: the operands of the epilogue, each [B, R*m, n], of the dtype of the results.
      measured: the results of the epilogue whose largest magnitudes in each row, of all of them
      together, are another
        result after them, [B, R*m] in float32.
      scales: those of all rows, [B, R*m], and of the columns of each w, [n], in float32, if x and
        ws are 8-bit values.
      result: the dtype of the results; that of x by default.
    """
    size = lax.axis_size(axis_name)
    batch, m, k = x.shape
    count = len(ws)
    itemsize = x.dtype.itemsize
    widths = [w.shape[0 if transposed else 1] for w in ws]
    ring = Ring(axis_name, size, directions)
    layout = BlockLayout.of(batch, m, sublanes(x.dtype), directions)
    result = result or x.dtype
    scaled = scales is not None
    dtypes = x.dtype, ws[0].dtype, result
    work = GatherWork(
        layout,
        size,
        k,
        widths,
        transposed,
        *dtypes,
        scaled,
        tiles,
        epilogue,
        len(operands),
        measured,
    )
    plan = (None if epilogue or scaled else resident.plan(work)) or stream.plan(work)
    streams = isinstance(plan, stream.StreamSchedule)
    y_widths = widths[:1] * epilogue.results if epilogue else widths
    kinds = [((batch, size, m, n), result) for n in y_widths]
    if isinstance(plan, stream.StreamSchedule) and measured is not None:
        kinds.append(((batch, size, m, plan.tiles.columns.count * LANES), jnp.dtype(jnp.float32)))
    kinds += [((batch, size, m, k), x.dtype)] * (streams or keep_gathered)
    laid_out = (
        [] if scales is None else laid_out_scales(scales[0].reshape(batch, size, m), scales[1])
    )
    inputs = count + len(operands) + len(laid_out)

    def body(x_ref: Ref, *refs: Ref) -> None:
        w_refs = refs[:count]
        further = refs[count:inputs]
        refs = refs[inputs:]
        operand_refs = further[: len(operands)]
        scale_refs = further[len(operands) :]
        y_refs = refs[: len(y_widths)]
        *others, scratch, semaphores = refs[len(y_widths) :]
        maxima, gathered = (None, others) if measured is None else (others[0], others[1:])
        in_hbm = gathered[0] if gathered else None
        in_vmem = None if streams else scratch.x
        gather = Gather(ring, plan.work.layout, x_ref, in_hbm, semaphores, in_vmem)
        parts = gather, w_refs, y_refs, keep_gathered, scratch
        device: stream.Stream | resident.Resident
        if isinstance(plan, stream.StreamSchedule):
            device = stream.Stream(plan, *parts, operand_refs, scale_refs, maxima)
        else:
            device = resident.Resident(plan, *parts)
        device.begin()
        ring.enter(f"{CALLER} {transposed} {keep_gathered} {count} {streams}", collective_id)
        device.run()

    outputs = call(
        body,
        [x, *ws, *(operand.reshape(batch, size, m, -1) for operand in operands), *laid_out],
        name=CALLER,
        results=[output(shape, x, *ws, *operands, dtype=dtype) for shape, dtype in kinds],
        scratch=[plan.scratch(), GatherSemaphores.allocate(plan.work.layout, size)],
        collective_id=collective_id,
        vmem_bytes=plan.vmem_bytes,
        flops=2 * size * batch * m * k * sum(widths),
        hbm_bytes=itemsize * (plan.elements_read + size * batch * m * keep_gathered * k)
        + jnp.dtype(result).itemsize * size * batch * m * sum(y_widths),
        sent=(size - 1) * x.size * itemsize,
    )
    ys = tuple(y.reshape(batch, size * m, -1) for y in outputs[: len(y_widths)])
    if measured is not None:
        ys += (jnp.max(outputs[len(y_widths)], axis=-1).reshape(batch, size * m),)
    return ys, outputs[-1].reshape(batch, size * m, k) if keep_gathered else None
