"""all_gather(x) @ w as one Pallas TPU kernel: every block is multiplied while the next ones travel.

```
x  [B, m, k]     this device's rows           (R devices on axis_name, B batches)
w  [k, n]        this device's columns; several share one all-gather of x
y  [B, R*m, n]   all rows, this device's columns
```

Every block goes once around the ring, forwarded from where it arrived, with two directions half of
it each way. `engine.gather` has the gather. There are two orders of work. In `stream` tiles of x
come from HBM. In `resident` the gathered x stays in vector memory, where it has room, and the
products follow the static schedule of `resident_schedule`. With an epilogue the order is always
`stream`, and so it is for 8-bit values, whose sums are multiplied with the scales of rows and
columns.

Where several cores of a device run the kernel (`engine.cores`), each has equally many rows of every
block, and a gather of its own.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flaxasync.kernels.all_gather_matmul import resident, stream
from flaxasync.kernels.all_gather_matmul.stream import CALLER
from flaxasync.kernels.all_gather_matmul.work import GatherOperands, GatherResults, GatherWork
from flaxasync.kernels.engine.cores import CoreRows, call_on_cores
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
    cores: int | None = None,
    collective_id: int | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Returns the ys, or an epilogue's results, and the gathered x or None. With two directions, a
    block has halves.

    Args beside those of the head of `flaxasync.kernels`:
      transposed: multiply by w.T; then each w is [n, k].
      keep_gathered: whether the gathered x, [B, R*m, k], is a result, too.
      epilogue: what is made of the products of all w, which then have one shape, before they leave
        vector memory.
      operands: the operands of the epilogue, each [B, R*m, n], of the dtype of the results.
      measured: the results of the epilogue whose largest magnitudes in each row, of all of them
        together, are another result after them, [B, R*m] in float32.
      scales: those of all rows, [B, R*m], and of the columns of each w, [n], in float32, if x and
        ws are 8-bit values.
      result: the dtype of the results; that of x by default.
    """
    size = lax.axis_size(axis_name)
    batch, m, k = x.shape
    itemsize = x.dtype.itemsize
    widths = [w.shape[0 if transposed else 1] for w in ws]
    unit = sublanes(x.dtype)
    share = CoreRows.of(CALLER, batch, m, unit, directions, cores)
    ring = Ring(axis_name, size, directions, share.cores)
    result = jnp.dtype(result or x.dtype)
    work = GatherWork(
        layout=BlockLayout.of(share.batches, share.rows, unit, directions),
        size=size,
        k=k,
        widths=widths,
        transposed=transposed,
        dtype=x.dtype,
        w_dtype=ws[0].dtype,
        result=result,
        scaled=scales is not None,
        tiles=tiles,
        epilogue=epilogue,
        operands=len(operands),
        measured=measured,
        cores=share.cores,
    )
    plan = _plan(work)
    layout = plan.work.layout  # the plan may have divided half-blocks into chunks
    streams = isinstance(plan, stream.StreamSchedule)

    def body(
        given: GatherOperands, made: GatherResults, scratch: Ref, semaphores: GatherSemaphores
    ) -> None:
        given = given.on_core(share)
        made = made.on_core(share)
        device: stream.Stream | resident.Resident
        if isinstance(plan, stream.StreamSchedule):
            gather = Gather(ring, layout, given.x, made.gathered, semaphores)
            device = stream.Stream(plan, gather, given, made, keep_gathered, scratch)
        else:
            gather = Gather(ring, layout, given.x, made.gathered, semaphores, scratch.x)
            device = resident.Resident(plan, gather, given, made, keep_gathered, scratch)
        device.begin()
        ring.enter(f"{CALLER} {transposed} {keep_gathered} {len(ws)} {streams}", collective_id)
        device.run()

    def of_rows(columns: int, dtype: DType) -> jax.ShapeDtypeStruct:
        return output((batch, size, m, columns), x, *ws, *operands, dtype=dtype)

    y_widths = widths
    if epilogue is not None:
        y_widths = widths[:1] * epilogue.results  # all w have one width, and so have the results
    results = GatherResults([of_rows(n, result) for n in y_widths], None, None)
    if isinstance(plan, stream.StreamSchedule) and measured is not None:
        lanes = plan.tiles.columns.count * LANES
        results = results._replace(maxima=of_rows(lanes, jnp.float32))
    if streams or keep_gathered:
        results = results._replace(gathered=of_rows(k, x.dtype))
    laid_out = []
    if scales is not None:
        of_x, of_ws = scales
        laid_out = laid_out_scales(of_x.reshape(batch, size, m), of_ws)
    of_epilogue = [operand.reshape(batch, size, m, -1) for operand in operands]
    rows = size * batch * m
    moved = share.cores.count * plan.elements_read
    if keep_gathered:
        moved += rows * k  # written
    scratch: Ref = [plan.scratch(), GatherSemaphores.allocate(layout, size)]
    all_operands = GatherOperands(x, ws, of_epilogue, laid_out)
    made = call_on_cores(
        body,
        all_operands,
        results,
        scratch,
        cores=share.cores,
        collective_id=collective_id,
        vmem_bytes=plan.vmem_bytes,
        flops=2 * rows * k * sum(widths),
        moved=itemsize * moved + result.itemsize * rows * sum(y_widths),
        sent=(size - 1) * x.size * itemsize,
        name=CALLER,
    )
    ys = tuple(y.reshape(batch, size * m, -1) for y in made.ys)
    if made.maxima is not None:
        ys += (jnp.max(made.maxima, axis=-1).reshape(batch, size * m),)
    gathered = None
    if keep_gathered:
        gathered = made.gathered.reshape(batch, size * m, k)
    return ys, gathered


def _plan(work: GatherWork) -> stream.StreamSchedule | resident.ResidentPlan:
    """Returns how the kernel does its work: `resident` where it can, else `stream`."""
    plan = None
    if work.epilogue is None and not work.scaled:
        plan = resident.plan(work)
    return plan or stream.plan(work)
