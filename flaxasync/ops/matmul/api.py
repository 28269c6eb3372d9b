"""The public collective matmuls: their checks, and what executes them.

They are for use inside `jax.shard_map`, on local shards; `flaxasync.nn` has the modules. `vjp` has
the algebra.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flaxasync import mesh
from flaxasync.kernels.engine.operands import DTYPES
from flaxasync.kernels.weight_gradient_schedule import LARGEST_RING
from flaxasync.mesh import mapped_axis_size, vary_alike
from flaxasync.ops.choose import (
    Directions,
    Execution,
    cannot_serve,
    check_mapped,
    decide,
    is_default,
)
from flaxasync.ops.matmul import vjp
from flaxasync.ops.matmul.fused import FusedExecutor
from flaxasync.ops.matmul.products import Arrays, Operands
from flaxasync.ops.matmul.ring import RingExecutor
from flaxasync.ops.matmul.switch import LARGEST, SwitchExecutor, WholeExecutor
from flaxasync.ops.matmul.vjp import Executor
from flaxasync.ops.plan import check_gathered_bytes
from flaxasync.ops.quantization import Quantization, check_chip, quantization_of
from flaxasync.ops.roofline import Shape

type OneOrMore = Float[Array, "..."] | tuple[Float[Array, "..."], ...]
type Quantizing = Quantization | str | None


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller may ask for; see `flaxasync.all_gather_matmul`."""

    backend: str | None
    directions: Directions = None
    unroll: int = 2
    precision: lax.PrecisionLike = None
    reduce_dtype: DTypeLike | None = None
    gathered_bytes: int = 0
    quantization: Quantizing = None


def all_gather_matmul(
    x: Float[Array, "*batch m k"],
    w: OneOrMore,
    axis_name: str,
    *,
    backend: str | None = None,
    directions: Directions = None,
    unroll: int = 2,
    precision: lax.PrecisionLike = None,
    reduce_dtype: DTypeLike | None = None,
    gathered_bytes: int = 0,
    quantization: Quantizing = None,
) -> OneOrMore:
    """Multiplies the rows of all devices by this device's columns, each block as it arrives.

    ```
    x  [..., m, k]      this device's rows             (R devices on axis_name)
    w  [k, n]           this device's columns
    y  [..., R*m, n]    all rows, this device's columns

    forward  y  = all_gather(x) @ w
    dx          = reduce_scatter(dy @ w.T)             the dual ring
    dw          = all_gather(x).T @ dy                 x travels again, unless `gathered_bytes` lets it be kept
    ```

    Args:
      w: This device's columns; or a tuple of such arrays, which share one trip of x: gate and up,
        for example.
      axis_name: The mesh axis along which x is sharded by rows and w by columns.
      backend: What executes the op: "none" (gather, then multiply), "xla" (a ring of
        `lax.ppermute`), "pallas" or "stateful" (the same ring on Pallas DMAs, as values or on Refs;
        TPU), or "fused" (one Pallas kernel forward and one for each transfer backward; TPU, float32
        and bfloat16). None stands for the trusted backend that `flaxasync.plan` predicts to be
        fastest on the TPUs of the mesh, and for "xla" on other devices.
      directions: 1, or 2 to send one half-block in each direction around the ring. By default 2 on
        rings of three or more TPUs.
      unroll: Ring steps in one loop body. "fused" has no such loop, and only takes 2.
      precision: The precision of the matmuls, as in `lax.dot_general`; they accumulate in float32.
        "fused" only takes the default.
      reduce_dtype: The dtype of partial sums while they travel, which in this op are those of dx.
        By default it is the dtype of x, the only one that "fused" takes.
      gathered_bytes: The most bytes that all_gather(x), which takes R times those of x, may take
        until the backward pass. If they suffice, the op keeps all_gather(x) where `flaxasync.plan`
        predicts a gain, and always on devices that `plan` does not know. With 0, the default, the
        op keeps x, which travels again for dw; docs/plan.md tells when XLA keeps more, and what
        happens under `jax.checkpoint`.
      quantization: "int8", "fp8" or a `flaxasync.Quantization`: x travels, is multiplied and is
        kept in 8 bits, with a scale for each row, and w has one for each column. None, the default,
        for the dtype of the operands. Partial sums always travel in `reduce_dtype`.

    Returns:
      y, in the dtype of x; a tuple if w is one.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; shapes or dtypes do not match; the backend is
        unknown; `gathered_bytes` is no integer of 0 or more.
      NotImplementedError: The backend cannot serve this call, or the chip has no rate for the type
        of `quantization`.
    """
    op = "all_gather_matmul"
    ws = _as_tuple(w)
    options = Options(
        backend, directions, unroll, precision, reduce_dtype, gathered_bytes, quantization
    )
    size = check_operands(op, (x,), ws, axis_name)
    for position, w_shard in enumerate(ws):
        _check_contraction(op, x, w_shard, position)
    check_gathered_bytes(op, gathered_bytes)
    executor, keep = choose_executor(
        op, [x.shape, *(w.shape for w in ws)], x.dtype, axis_name, size, options
    )
    x, ws = vary_alike((x, ws), axis_name)
    ys = vjp.gather_and_multiply(executor, keep, x, ws)
    if isinstance(w, tuple | list):
        return ys
    return ys[0]


def matmul_reduce_scatter(
    x: OneOrMore,
    w: OneOrMore,
    axis_name: str,
    *,
    backend: str | None = None,
    directions: Directions = None,
    unroll: int = 2,
    precision: lax.PrecisionLike = None,
    reduce_dtype: DTypeLike | None = None,
    quantization: Quantizing = None,
) -> Float[Array, "*batch m n"]:
    """Multiplies this device's columns, and sums each block of rows over all devices on its way to
    its owner.

    ```
    x  [..., R*m, k]    all rows, this device's columns        (R devices on axis_name)
    w  [k, n]           this device's rows
    y  [..., m, n]      this device's rows of the sum

    forward  y  = reduce_scatter(x @ w)
    dx          = all_gather(dy) @ w.T                 the dual ring
    dw          = x.T @ all_gather(dy)                 of the dy that the ring of dx brought
    ```

    Args:
      x: This device's columns; or a tuple of such arrays, whose products with the arrays of w are
        summed.
      w: This device's rows; a tuple if x is one.
      axis_name: The mesh axis along which k is split and y will be sharded by rows.
      backend: What executes the op, as in `all_gather_matmul`; "none" multiplies, then
        reduce-scatters.
      directions, unroll, precision, quantization: As in `all_gather_matmul`; rows and columns are
        those of this device.
      reduce_dtype: The dtype of the partial sums while they travel; by default that of x.

    Returns:
      y, in the dtype of x.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; shapes or dtypes do not match; R does not divide
        the rows of x; the backend is unknown.
      NotImplementedError: The backend cannot serve this call.
    """
    options = Options(
        backend, directions, unroll, precision, reduce_dtype, quantization=quantization
    )
    executor, xs, ws = _check_sum("matmul_reduce_scatter", x, w, axis_name, options)
    return vjp.multiply_and_scatter(executor, xs, ws)


def matmul_all_reduce(
    x: OneOrMore,
    w: OneOrMore,
    axis_name: str,
    *,
    backend: str | None = None,
    directions: Directions = None,
    unroll: int = 2,
    precision: lax.PrecisionLike = None,
    reduce_dtype: DTypeLike | None = None,
    quantization: Quantizing = None,
) -> Float[Array, "*batch m n"]:
    """Multiplies this device's columns and gives every device the sum over all of them.

    ```
    x  [..., m, k]      all rows, this device's columns        (R devices on axis_name)
    w  [k, n]           this device's rows
    y  [..., m, n]      the sum, the same on every device

    forward  y  = all_reduce(x @ w)
    dx          = dy @ w.T                             no communication
    dw          = x.T @ dy                             no communication
    ```

    A ring reduce-scatters the sum while it multiplies, and gathers it afterwards, when no product
    is left to hide the gather. Where the next operation can take its rows sharded,
    `matmul_reduce_scatter` does the better half of this.

    Args:
      x: This device's columns; or a tuple of such arrays, whose products with the arrays of w are
        summed.
      w: This device's rows; a tuple if x is one.
      axis_name: The mesh axis along which k is split.
      backend: What executes the op, as in `all_gather_matmul`; "none" multiplies, then all-reduces.
        The others reduce-scatter, and then gather with one collective operation.
      directions, unroll: As in `all_gather_matmul`; "none" has no ring and ignores them.
      precision, reduce_dtype, quantization: As in `matmul_reduce_scatter`.

    Returns:
      y, in the dtype of x. Its type says that it does not vary over `axis_name`.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; shapes or dtypes do not match; the backend is
        unknown.
      NotImplementedError: The backend cannot serve this call.
    """
    options = Options(
        backend, directions, unroll, precision, reduce_dtype, quantization=quantization
    )
    executor, xs, ws = _check_sum("matmul_all_reduce", x, w, axis_name, options)
    return vjp.multiply_and_reduce(executor, xs, ws)


def choose_executor(
    op: str, shapes: Sequence[Shape], dtype: jnp.dtype, axis_name: str, size: int, options: Options
) -> tuple[Executor, bool]:
    """Returns what executes a call on `size` devices, and whether it keeps what it gathers for the
    gradient.

    `shapes` are what `flaxasync.plan` takes.
    """
    quantization = quantization_of(op, options.quantization)
    check_chip(op, quantization, mesh.chip())

    def check(backend: str) -> None:
        if backend == "fused":
            _check_kernels(op, axis_name, size, shapes, dtype, options)

    execution = decide(
        op,
        options.backend,
        ring=size,
        shapes=shapes,
        directions=options.directions,
        unroll=options.unroll,
        check=check,
        itemsize=dtype.itemsize,
        gathered_bytes=options.gathered_bytes,
        quantization=quantization,
    )
    if execution.backend == "fused":
        return FusedExecutor(
            axis_name, execution.directions, quantization=quantization
        ), execution.keep
    if mesh.platform() == "gpu" and quantization is None:
        on_gpus = _executor_on_gpus(execution, size)
        if on_gpus is not None:
            return on_gpus(axis_name, options.precision, options.reduce_dtype), execution.keep
    return RingExecutor(
        execution.ring(axis_name), options.precision, options.reduce_dtype, quantization
    ), execution.keep


def _executor_on_gpus(
    execution: Execution, size: int
) -> type[SwitchExecutor] | type[WholeExecutor] | None:
    """Returns what executes a call on GPUs; None for what their rings are no better at than any."""
    if execution.backend == "none":
        return WholeExecutor
    if execution.backend == "xla" and execution.directions == 1 and 1 < size <= LARGEST:
        return SwitchExecutor
    return None


def _check_kernels(
    op: str,
    axis_name: str,
    size: int,
    shapes: Sequence[Shape],
    dtype: jnp.dtype,
    options: Options,
) -> None:
    """Raises NotImplementedError if the kernels cannot serve a call of `op` on a ring of `size`
    TPUs.
    """
    name = jnp.dtype(dtype).name
    reduce_name = jnp.dtype(options.reduce_dtype or dtype).name
    limit = None
    instead = "leave it out, or use backend='xla'"
    if size == 1:
        limit = f"exchanges blocks between devices: got an axis {axis_name!r} of size 1"
        instead = "use backend='none'"
    elif size > LARGEST_RING:
        limit = (
            f"has semaphores for rings of up to {LARGEST_RING} devices: got an axis {axis_name!r} "
            f"of size {size}"
        )
        instead = "use backend='xla'"
    elif any(0 in shape for shape in shapes):
        limit = (
            f"multiplies operands that are not empty: got x {list(shapes[0])} and w "
            f"{list(shapes[1])}"
        )
        instead = "use backend='none'"
    elif name not in DTYPES:
        limit = f"has kernels for {' and '.join(DTYPES)}: got {name}"
        instead = "cast the operands, or use backend='xla'"
    elif not is_default(options.precision):
        limit = (
            "multiplies with the matrix unit's default precision: got "
            f"precision={options.precision}"
        )
    elif reduce_name != name:
        limit = f"sends partial sums in the operands' dtype, {name}: got reduce_dtype={reduce_name}"
    elif options.unroll != 2:
        limit = (
            "is a kernel with loops of its own, which unroll does not reach: got "
            f"unroll={options.unroll}"
        )
    if limit is not None:
        raise cannot_serve(op, "fused", limit, instead)


def check_operands(op: str, xs: Arrays, ws: Operands, axis_name: str) -> int:
    """Checks what all ops check alike, and returns the number of devices on the axis."""
    size = mapped_axis_size(op, axis_name)
    if not ws or not xs:
        raise ValueError(f"{op} needs at least one x and one w: got {len(xs)} and {len(ws)}")
    for x in xs:
        if x.ndim < 2:
            raise ValueError(
                f"{op} needs x of two dimensions or more, [..., rows, features]: got "
                f"{list(x.shape)}"
            )
    for w in ws:
        if w.ndim != 2:
            raise ValueError(f"{op} needs w of two dimensions, [k, n]: got {list(w.shape)}")
    dtypes = {operand.dtype for operand in (*xs, *ws)}
    if len(dtypes) > 1 or not jnp.issubdtype(xs[0].dtype, jnp.floating):
        raise ValueError(
            f"{op} needs all operands of one floating dtype: got "
            f"{', '.join(sorted(map(str, dtypes)))}; cast them before the call (the modules of "
            "flaxasync.nn do)"
        )
    for array in jax.tree.leaves((xs, ws)):
        check_mapped(op, array)
    return size


def _as_tuple(value: OneOrMore) -> Arrays:
    if isinstance(value, tuple | list):
        return tuple(value)
    return (value,)


def _check_sum(
    op: str, x: OneOrMore, w: OneOrMore, axis_name: str, options: Options
) -> tuple[Executor, Arrays, Arrays]:
    """Checks the operands of an op that sums products over pairs of x and w, which is one longer
    product.

    Returns what executes it, all x and all w.
    """
    xs = _as_tuple(x)
    ws = _as_tuple(w)
    size = check_operands(op, xs, ws, axis_name)
    if len(xs) != len(ws):
        raise ValueError(f"{op} sums x @ w over pairs: got {len(xs)} x and {len(ws)} w")
    for i, (x_shard, w_shard) in enumerate(zip(xs, ws, strict=True)):
        _check_contraction(op, x_shard, w_shard, i)
        if x_shard.shape[:-1] != xs[0].shape[:-1] or w_shard.shape[1] != ws[0].shape[1]:
            raise ValueError(
                f"{op} sums x @ w over pairs of one shape: got {list(xs[0].shape)} @ "
                f"{list(ws[0].shape)} and {list(x_shard.shape)} @ {list(w_shard.shape)}"
            )
    *batch, rows, _ = xs[0].shape
    if op == "matmul_reduce_scatter" and rows % size:
        raise ValueError(
            f"{op} gives each of the {size} devices on {axis_name!r} an equal share of x's rows: "
            f"got {rows} rows, needed a multiple of {size}; pad x, or use matmul_all_reduce"
        )
    k = sum(w_shard.shape[0] for w_shard in ws)
    shapes = [(*batch, rows, k), (k, ws[0].shape[1])]
    executor, _ = choose_executor(op, shapes, xs[0].dtype, axis_name, size, options)
    return executor, *vary_alike((xs, ws), axis_name)


def _check_contraction(op: str, x: Array, w: Array, position: int) -> None:
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op} contracts x's last dimension with w's first: got x {list(x.shape)} and w "
            f"{list(w.shape)}" + (f" (w number {position})" if position else "")
        )
