"""all_gather(x) @ w as one Pallas TPU kernel: every block is multiplied while the next ones travel.

```
x  [B, m, k]     this device's rows           (R devices on axis_name, B batches)
w  [k, n]        this device's columns; several share one all-gather of x
y  [B, R*m, n]   all rows, this device's columns
```

Every block goes once around the ring, forwarded from where it arrived, with two directions half of it each way.
`engine.gather` has the gather. Where vector memory has room for the gathered x, `resident` has the order of work, and
else `stream`. With an epilogue it is always `stream`.
"""

import functools
from collections.abc import Sequence

import jax

from flaxasync.kernels.all_gather_matmul import resident, stream
from flaxasync.kernels.all_gather_matmul.stream import CALLER
from flaxasync.kernels.engine.call import call
from flaxasync.kernels.engine.epilogue import Epilogue
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
    epilogue: Epilogue | None = None,
    operands: Sequence[jax.Array] = (),
    tiles: Tiles | None = None,
    directions: int = 2,
    collective_id: int | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Returns the ys, or an epilogue's results, and the gathered x or None; for use inside `jax.shard_map`.

    Args:
      x: [B, m, k], float32 or bfloat16, in whole hardware tiles.
      ws: one or more [k, n], of x's dtype; or [n, k] if `transposed`.
      axis_name: the mesh axis, of two devices or more.
      transposed: multiply by w.T.
      keep_gathered: whether the gathered x, [B, R*m, k], is a result, too.
      epilogue: what is made of the products of all w, which then have one shape, before they leave vector memory.
      operands: the operands of the epilogue, each [B, R*m, n], of x's dtype.
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
    widths, ring = [w.shape[0 if transposed else 1] for w in ws], Ring(axis_name, size, directions)
    if epilogue or operands:
        _check_epilogue(x, widths, size, operands)
    work = _layout(x, directions), size, k, widths, transposed, tiles, x.dtype
    streamed = functools.partial(stream.plan, *work, epilogue, len(operands))
    plan = streamed() if epilogue else resident.plan(*work) or streamed()
    streams = isinstance(plan, stream.Schedule)
    y_widths = widths[:1] * epilogue.results if epilogue else widths
    shapes = [(batch, size, m, n) for n in y_widths] + [(batch, size, m, k)] * (streams or keep_gathered)
    inputs = count + len(operands)

    def body(x_ref: Ref, *refs: Ref) -> None:
        w_refs, operand_refs, refs = refs[:count], refs[count:inputs], refs[inputs:]
        y_refs, (*gathered, scratch, semaphores) = refs[: len(y_widths)], refs[len(y_widths) :]
        in_hbm, in_vmem = gathered[0] if gathered else None, None if streams else scratch.x
        gather = Gather(ring, plan.layout, x_ref, in_hbm, semaphores, in_vmem)
        parts = gather, w_refs, y_refs, keep_gathered, scratch
        device: stream.Stream | resident.Resident
        if isinstance(plan, stream.Schedule):
            device = stream.Stream(plan, *parts, epilogue, operand_refs)
        else:
            device = resident.Resident(plan, *parts)
        device.begin()
        ring.enter(f"{CALLER} {transposed} {keep_gathered} {count} {streams}", collective_id)
        device.run()

    outputs = call(
        body,
        [x, *ws, *(operand.reshape(batch, size, m, -1) for operand in operands)],
        name=CALLER,
        results=[output(shape, x, *ws, *operands) for shape in shapes],
        scratch=[plan.scratch(x.dtype), GatherSemaphores.allocate(plan.layout, size)],
        collective_id=collective_id,
        vmem_bytes=plan.vmem_bytes,
        flops=2 * size * batch * m * k * sum(widths),
        hbm_bytes=itemsize * (plan.elements_read + size * batch * m * (sum(y_widths) + keep_gathered * k)),
        sent=(size - 1) * x.size * itemsize,
    )
    ys = tuple(y.reshape(batch, size * m, -1) for y in outputs[: len(y_widths)])
    return ys, outputs[-1].reshape(batch, size * m, k) if keep_gathered else None


def stays_resident(x: jax.ShapeDtypeStruct, widths: list[int], size: int, transposed: bool, directions: int) -> bool:
    """Says whether the gathered x would stay in vector memory without an epilogue: then the kernel is faster so."""
    return resident.plan(_layout(x, directions), size, x.shape[2], widths, transposed, None, x.dtype) is not None


def _layout(x: jax.Array | jax.ShapeDtypeStruct, directions: int) -> BlockLayout:
    return BlockLayout.of(CALLER, x.shape[0], x.shape[1], sublanes(x.dtype), directions)


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


def _check_epilogue(x: jax.Array, widths: Sequence[int], size: int, operands: Sequence[jax.Array]) -> None:
    """Raises ValueError unless the operands of an epilogue and all products have one shape and dtype."""
    if len(set(widths)) > 1:
        raise ValueError(f"{CALLER} with an epilogue needs all w of one width n: got {sorted(widths)}")
    needed = x.shape[0], size * x.shape[1], widths[0]
    for operand in operands:
        if operand.shape != needed or operand.dtype != x.dtype:
            raise ValueError(
                f"{CALLER} needs operands of its epilogue [B, R*m, n], of x's dtype: got {jax.typeof(operand)}, needed "
                f"{x.dtype.name}{list(needed)}"
            )
