"""The public collective matmuls: their checks, and the choice of what executes them.

They are for use inside `jax.shard_map`, on local shards; `flaxasync.nn` has the modules. `vjp` has the algebra.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flaxasync import mesh
from flaxasync.mesh import cast_to_varying, mapped_axis_size
from flaxasync.ops import backends
from flaxasync.ops.costs.collective_matmul import check_gathered_bytes
from flaxasync.ops.costs.cost import Shape
from flaxasync.ops.matmul import vjp
from flaxasync.ops.matmul.exchange import ExchangeExecutor, check_exchange
from flaxasync.ops.matmul.fused import FusedExecutor, check_kernels
from flaxasync.ops.matmul.products import Arrays
from flaxasync.ops.matmul.ring import RingExecutor
from flaxasync.ops.matmul.vjp import Executor
from flaxasync.ops.plan import plan
from flaxasync.ring import Ring

type OneOrMore = Float[Array, "..."] | tuple[Float[Array, "..."], ...]
type Directions = Literal[1, 2] | None


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller may ask for; see `all_gather_matmul`."""

    backend: str | None
    directions: Directions = None
    unroll: int = 2
    precision: lax.PrecisionLike = None
    reduce_dtype: DTypeLike | None = None


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
      x: This device's rows.
      w: This device's columns; or a tuple of such arrays, which share one trip of x: gate and up, for example.
      axis_name: The mesh axis along which x is sharded by rows and w by columns.
      backend: What executes the op: "none" (gather, then multiply), "xla" (a ring of `lax.ppermute`), "pallas" or
        "stateful" (the same ring on Pallas DMAs, as values or on Refs; TPU), or "fused" (one Pallas kernel forward and
        one for each transfer backward; TPU, float32 and bfloat16). None stands for what `flaxasync.plan` predicts to be
        fastest on the chips of the mesh, and for "xla" on other devices.
      directions: 1, or 2 to send one half-block in each direction around the ring. By default 2 on rings of three or
        more TPUs.
      unroll: Ring steps in one loop body. "fused" has no such loop, and only takes 2.
      precision: The precision of the matmuls, as in `lax.dot_general`; they accumulate in float32. "fused" only takes
        the default.
      reduce_dtype: The dtype of partial sums while they travel, which in this op are those of dx. By default it is the
        dtype of x, the only one that "fused" takes.
      gathered_bytes: The most bytes of memory for all_gather(x), R times those of x, from the forward pass to the
        backward pass. Where they suffice, it is kept if `flaxasync.plan` predicts that this is faster, and on devices
        that `plan` does not know it is kept in any case. 0, the default, keeps x alone, which travels again for dw.
        With "none", and with "xla" on rings of two to four, XLA merges trips of the same x where no scan over layers
        separates them, so that all_gather(x) is kept in any case. To a policy of `jax.checkpoint` the op is one
        operation, and no matmul. Where it is computed again, x travels again for y, and only what that trip gathers is
        kept, from there to dw. `flaxasync.save_matmuls` is a policy that keeps y and the gathered rows.

    Returns:
      y, in the dtype of x; a tuple if w is one.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; shapes or dtypes do not match; the backend is unknown;
        `gathered_bytes` is no integer of 0 or more.
      NotImplementedError: The backend cannot serve this call.
    """
    op, ws, options = "all_gather_matmul", _as_tuple(w), Options(backend, directions, unroll, precision, reduce_dtype)
    size = _check_call(op, (x,), ws, axis_name, options)
    for position, w_shard in enumerate(ws):
        _check_contraction(op, x, w_shard, position)
    check_gathered_bytes(op, gathered_bytes)
    shapes = [x.shape, *(w.shape for w in ws)]
    backend = choose_backend(op, shapes, x.dtype, axis_name, size, options, gathered_bytes=gathered_bytes)
    executor = make_executor(backend, axis_name, size, options)
    keep = keeps_gathered(backend, shapes, size, x.dtype.itemsize, gathered_bytes)
    (x,), ws = cast_to_vary_alike((x,), ws, axis_name)
    ys = vjp.all_gather_matmul(executor, keep, x, ws)
    return ys if isinstance(w, tuple | list) else ys[0]


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
) -> Float[Array, "*batch m n"]:
    """Multiplies this device's columns, and sums each block of rows over all devices on its way to its owner.

    ```
    x  [..., R*m, k]    all rows, this device's columns        (R devices on axis_name)
    w  [k, n]           this device's rows
    y  [..., m, n]      this device's rows of the sum

    forward  y  = reduce_scatter(x @ w)
    dx          = all_gather(dy) @ w.T                 the dual ring
    dw          = x.T @ all_gather(dy)                 of the dy that the ring of dx brought
    ```

    Args:
      x: This device's columns; or a tuple of such arrays, whose products with the arrays of w are summed.
      w: This device's rows; a tuple if x is one.
      axis_name: The mesh axis along which k is split and y will be sharded by rows.
      backend: What executes the op, as in `all_gather_matmul`; "none" multiplies, then reduce-scatters.
      directions: As in `all_gather_matmul`.
      unroll: As in `all_gather_matmul`.
      precision: As in `all_gather_matmul`.
      reduce_dtype: The dtype of the partial sums while they travel; by default that of x.

    Returns:
      y, in the dtype of x.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; shapes or dtypes do not match; R does not divide the rows of x; the
        backend is unknown.
      NotImplementedError: The backend cannot serve this call.
    """
    op, options = "matmul_reduce_scatter", Options(backend, directions, unroll, precision, reduce_dtype)
    xs, ws = _as_tuple(x), _as_tuple(w)
    size = _check_call(op, xs, ws, axis_name, options)
    _check_pairs(op, xs, ws)
    rows = xs[0].shape[-2]
    if rows % size:
        raise ValueError(
            f"{op} gives each of the {size} devices on {axis_name!r} an equal share of x's rows: "
            f"got {rows} rows, needed a multiple of {size}; pad x, or use matmul_all_reduce"
        )
    executor = _choose_executor(op, _shapes_of_one_product(xs, ws), xs[0].dtype, axis_name, size, options)
    return vjp.matmul_reduce_scatter(executor, *cast_to_vary_alike(xs, ws, axis_name))


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

    A ring reduce-scatters the sum while it multiplies, and gathers it afterwards, when no product is left to hide the
    gather. Where the next operation can take its rows sharded, `matmul_reduce_scatter` does the better half of this.

    Args:
      x: This device's columns; or a tuple of such arrays, whose products with the arrays of w are summed.
      w: This device's rows; a tuple if x is one.
      axis_name: The mesh axis along which k is split.
      backend: What executes the op, as in `all_gather_matmul`; "none" multiplies, then all-reduces. "exchange" does the
        same with a Pallas kernel in which all devices send to all others, for few rows (TPU, float32 and bfloat16). The
        others reduce-scatter, and then gather with one collective operation.
      directions: As in `all_gather_matmul`; "none" and "exchange" have no ring and ignore it.
      unroll: As in `all_gather_matmul`; "none" and "exchange" have no ring and ignore it.
      precision: As in `all_gather_matmul`.
      reduce_dtype: The dtype of the partial sums while they travel; by default that of x.

    Returns:
      y, in the dtype of x. Its type says that it does not vary over `axis_name`.

    Raises:
      ValueError: No `shard_map` maps `axis_name`; shapes or dtypes do not match; the backend is unknown.
      NotImplementedError: The backend cannot serve this call.
    """
    op, options = "matmul_all_reduce", Options(backend, directions, unroll, precision, reduce_dtype)
    xs, ws = _as_tuple(x), _as_tuple(w)
    size = _check_call(op, xs, ws, axis_name, options)
    _check_pairs(op, xs, ws)
    executor = _choose_executor(op, _shapes_of_one_product(xs, ws), xs[0].dtype, axis_name, size, options)
    return vjp.matmul_all_reduce(executor, *cast_to_vary_alike(xs, ws, axis_name))


def _as_tuple(value: OneOrMore) -> Arrays:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _choose_executor(
    op: str, shapes: Sequence[Shape], dtype: jnp.dtype, axis_name: str, size: int, options: Options
) -> Executor:
    """Returns what executes a call on a ring of `size` devices. `shapes` are those that `flaxasync.plan` takes."""
    return make_executor(choose_backend(op, shapes, dtype, axis_name, size, options), axis_name, size, options)


def choose_backend(
    op: str, shapes: Sequence[Shape], dtype: jnp.dtype, axis_name: str, size: int, options: Options, **more: Any
) -> str:
    """Returns the name of the backend of a call; `shapes` and `more` are what `flaxasync.plan` takes."""

    def check(backend: str) -> None:
        if backend == "fused":
            check_kernels(op, axis_name, size, dtype, options.unroll, options.precision, options.reduce_dtype)
        if backend == "exchange":
            check_exchange(op, axis_name, size, shapes, dtype, options.reduce_dtype)

    return backends.choose(op, options.backend, shapes=shapes, ring=size, check=check, itemsize=dtype.itemsize, **more)


def keeps_gathered(backend: str, shapes: Sequence[Shape], size: int, itemsize: int, gathered_bytes: int) -> bool:
    """Says whether all_gather_matmul keeps what it gathers for the weight gradient."""
    kept, chip = size * math.prod(shapes[0]) * itemsize, mesh.chip()
    if size == 1 or not 0 < kept <= gathered_bytes:
        return False
    if chip is None or 0 in [length for shape in shapes for length in shape]:
        return True
    options: dict[str, Any] = {"itemsize": itemsize, "gathered_bytes": gathered_bytes}
    costs = plan("all_gather_matmul", *shapes, chip=chip, ring=size, **options).costs
    cost = costs.get("pallas" if backend == "stateful" else backend)
    return cost is not None and cost.kept > 0  # None: the kernels cannot serve the gradient, which may not be wanted


def make_executor(backend: str, axis_name: str, size: int, options: Options) -> Executor:
    """Returns what executes a call with a backend on a ring of `size` devices."""
    if backend == "fused":
        return FusedExecutor(axis_name, options.directions or (2 if size > 2 else 1))
    if backend == "exchange":
        return ExchangeExecutor(Ring(axis_name, None), options.precision, options.reduce_dtype)
    ring = backends.make_ring(backend, axis_name, size, directions=options.directions, unroll=options.unroll)
    return RingExecutor(ring, options.precision, options.reduce_dtype)


def _shapes_of_one_product(xs: Arrays, ws: Arrays) -> list[Shape]:
    """Returns the shapes of x and w of the one longer product to which a sum of products amounts."""
    k = sum(w.shape[0] for w in ws)
    return [(*xs[0].shape[:-1], k), (k, ws[0].shape[1])]


def cast_to_vary_alike(xs: Arrays, ws: Arrays, axis_name: str) -> tuple[Arrays, Arrays]:
    """Casts all operands to vary over the mesh axes over which any of them varies, and over `axis_name`."""
    axes = frozenset({axis_name}).union(*(jax.typeof(operand).mat.varying for operand in (*xs, *ws)))
    return tuple(cast_to_varying(x, axes) for x in xs), tuple(cast_to_varying(w, axes) for w in ws)


def _check_call(op: str, xs: Arrays, ws: Arrays, axis_name: str, options: Options) -> int:
    """Checks what all ops check alike, and returns the number of devices on the axis."""
    size = mapped_axis_size(op, axis_name)
    if not ws or not xs:
        raise ValueError(f"{op} needs at least one x and one w: got {len(xs)} and {len(ws)}")
    for x in xs:
        if x.ndim < 2:
            raise ValueError(f"{op} needs x of two dimensions or more, [..., rows, features]: got {list(x.shape)}")
    for w in ws:
        if w.ndim != 2:
            raise ValueError(f"{op} needs w of two dimensions, [k, n]: got {list(w.shape)}")
    dtypes = {operand.dtype for operand in (*xs, *ws)}
    if len(dtypes) > 1 or not jnp.issubdtype(xs[0].dtype, jnp.floating):
        raise ValueError(
            f"{op} needs all operands of one floating dtype: got {', '.join(sorted(map(str, dtypes)))}; "
            "cast them before the call (the modules of flaxasync.nn do)"
        )
    for operand in (*xs, *ws):
        if any(entry is not None for entry in jax.typeof(operand).sharding.spec):
            raise ValueError(
                f"{op} needs every axis that shards its operands to be mapped by shard_map: got an operand that is "
                f"still sharded {jax.typeof(operand).sharding.spec}; leave axis_names out of jax.shard_map, or add them"
            )
    if options.directions not in (None, 1, 2):
        raise ValueError(f"{op} needs directions to be 1, 2 or None: got {options.directions!r}")
    if options.unroll < 1:
        raise ValueError(f"{op} needs unroll to be 1 or more: got {options.unroll}")
    return size


def _check_contraction(op: str, x: Array, w: Array, position: int) -> None:
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op} contracts x's last dimension with w's first: got x {list(x.shape)} and w {list(w.shape)}"
            + (f" (w number {position})" if position else "")
        )


def _check_pairs(op: str, xs: Arrays, ws: Arrays) -> None:
    if len(xs) != len(ws):
        raise ValueError(f"{op} sums x @ w over pairs: got {len(xs)} x and {len(ws)} w")
    for i, (x, w) in enumerate(zip(xs, ws, strict=True)):
        _check_contraction(op, x, w, i)
        if x.shape[:-1] != xs[0].shape[:-1] or w.shape[1] != ws[0].shape[1]:
            raise ValueError(
                f"{op} sums x @ w over pairs of one shape: got {list(xs[0].shape)} @ {list(ws[0].shape)} "
                f"and {list(x.shape)} @ {list(w.shape)}"
            )
