"""Overlapped collective matmuls: the public ops, their checks and the choice of backend.

For use inside `jax.shard_map`, on local shards; `flaxasync.nn` has the modules. The rules, forward and backward, are in
`collective_rules`, those of backend "fused" in `fused_rules`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flaxasync import mesh, transport
from flaxasync.mesh import cast_to_varying, mapped_axis_size
from flaxasync.ops.matmul import fused as fused_rules
from flaxasync.ops.matmul import ring as collective_rules
from flaxasync.ops.plan import plan
from flaxasync.ring import Ring

BACKENDS = ("xla", "pallas", "stateful", "fused", "none")

type Precision = jax.lax.PrecisionLike
type OneOrMore = Float[Array, "..."] | tuple[Float[Array, "..."], ...]


def all_gather_matmul(
    x: Float[Array, "*batch m k"],
    w: OneOrMore,
    axis_name: str,
    *,
    backend: str | None = None,
    directions: Literal[1, 2] | None = None,
    unroll: int = 2,
    precision: Precision = None,
    reduce_dtype: jnp.dtype | None = None,
) -> OneOrMore:
    """Multiplies the rows of all devices by this device's columns, each block as it arrives.

    ```
    x  [..., m, k]      this device's rows             (R devices on axis_name)
    w  [k, n]           this device's columns
    y  [..., R*m, n]    all rows, this device's columns

    forward  y  = all_gather(x) @ w
    dx          = reduce_scatter(dy @ w.T)             the dual ring
    dw          = all_gather(x).T @ dy                 x travels again; nothing gathered is saved
    ```

    Args:
      x: this device's rows.
      w: this device's columns; or a tuple of such arrays, which share one trip of x: gate and up, say.
      axis_name: the mesh axis along which x is sharded by rows and w by columns.
      backend: "xla" (a ring of `lax.ppermute`), "pallas" or "stateful" (the same ring on Pallas DMAs, with futures or
        with Refs; TPU), "fused" (one Pallas kernel forward, and one for each transfer backward; TPU, float32 and
        bfloat16), "none" (gather, then multiply), or None: what `flaxasync.plan` predicts to be fastest on the chips of
        the mesh, and "xla" on other devices.
      directions: 1, or 2 to send half of each block each way; by default 2 on rings of three or more TPUs.
      unroll: ring steps in one loop body; "fused" has no such loop and takes no other than 2.
      precision: of the matmuls, as in `lax.dot_general`. They accumulate in float32. "fused" has the default alone.
      reduce_dtype: of the partial sums of dx while they travel; by default x's dtype, the only one of "fused".

    Returns:
      y, of x's dtype; a tuple where w is one.

    Raises:
      ValueError: no `shard_map` maps `axis_name`; shapes or dtypes do not match; an unknown backend.
      NotImplementedError: the backend cannot run this.
    """
    ws, one = _as_tuple(w)
    rules, op, axes = _prepare(
        "all_gather_matmul", axis_name, backend, directions, unroll, precision, reduce_dtype, (x,), ws
    )
    for i, w_shard in enumerate(ws):
        _check_contraction("all_gather_matmul", x, w_shard, i)
    ys = rules.all_gather_matmul(op, cast_to_varying(x, axes), tuple(cast_to_varying(w_shard, axes) for w_shard in ws))
    return ys[0] if one else ys


def matmul_reduce_scatter(
    x: OneOrMore,
    w: OneOrMore,
    axis_name: str,
    *,
    backend: str | None = None,
    directions: Literal[1, 2] | None = None,
    unroll: int = 2,
    precision: Precision = None,
    reduce_dtype: jnp.dtype | None = None,
) -> Float[Array, "*batch m n"]:
    """Multiplies this device's columns, and sums each block of rows over all devices on its way to its owner.

    ```
    x  [..., R*m, k]    all rows, this device's columns        (R devices on axis_name)
    w  [k, n]           this device's rows
    y  [..., m, n]      this device's rows of the sum

    forward  y  = reduce_scatter(x @ w)
    dx          = all_gather(dy) @ w.T                 the dual ring
    dw          = x.T @ all_gather(dy)                 on the same trip of dy
    ```

    Args:
      x: this device's columns; or a tuple of such arrays, whose products with the arrays of w are summed.
      w: this device's rows; a tuple where x is one.
      axis_name: the mesh axis along which k is split and y is to be sharded by rows.
      backend: "xla" (a ring of `lax.ppermute`), "pallas" or "stateful" (the same ring on Pallas DMAs, with futures or
        with Refs; TPU), "fused" (one Pallas kernel forward, and one for each transfer backward; TPU, float32 and
        bfloat16), "none" (multiply, then reduce-scatter), or None: what `flaxasync.plan` predicts to be fastest on the
        chips of the mesh, and "xla" on other devices.
      directions: 1, or 2 to send half of each block each way; by default 2 on rings of three or more TPUs.
      unroll: ring steps in one loop body; "fused" has no such loop and takes no other than 2.
      precision: of the matmuls, as in `lax.dot_general`. They accumulate in float32. "fused" has the default alone.
      reduce_dtype: of the partial sums while they travel; by default x's dtype, the only one of "fused".

    Returns:
      y, of x's dtype.

    Raises:
      ValueError: no `shard_map` maps `axis_name`; shapes or dtypes do not match; x's rows do not divide by R; an
        unknown backend.
      NotImplementedError: the backend cannot run this.
    """
    xs, _ = _as_tuple(x)
    ws, _ = _as_tuple(w)
    rules, op, axes = _prepare(
        "matmul_reduce_scatter", axis_name, backend, directions, unroll, precision, reduce_dtype, xs, ws
    )
    _check_pairs("matmul_reduce_scatter", xs, ws)
    size, rows = lax.axis_size(axis_name), xs[0].shape[-2]
    if rows % size:
        raise ValueError(
            f"matmul_reduce_scatter gives each of the {size} devices on {axis_name!r} an equal share of x's rows: "
            f"got {rows} rows, needed a multiple of {size}; pad x, or use matmul_all_reduce"
        )
    return rules.matmul_reduce_scatter(
        op, tuple(cast_to_varying(v, axes) for v in xs), tuple(cast_to_varying(v, axes) for v in ws)
    )


def matmul_all_reduce(
    x: OneOrMore,
    w: OneOrMore,
    axis_name: str,
    *,
    backend: str | None = None,
    directions: Literal[1, 2] | None = None,
    unroll: int = 2,
    precision: Precision = None,
    reduce_dtype: jnp.dtype | None = None,
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

    With a ring the sum is reduce-scattered under the matmul and then gathered; nothing is left to hide the gather
    behind. Where the next operation can take its rows sharded, `matmul_reduce_scatter` is the better half of this.

    Args:
      x: this device's columns; or a tuple of such arrays, whose products with the arrays of w are summed.
      w: this device's rows; a tuple where x is one.
      axis_name: the mesh axis along which k is split.
      backend: "xla" (a ring of `lax.ppermute`, then a gather), "pallas" or "stateful" (the same on Pallas DMAs, with
        futures or with Refs; TPU), "fused" (one Pallas kernel, then a gather; TPU, float32 and bfloat16), "none"
        (multiply, then all-reduce), or None: what `flaxasync.plan` predicts to be fastest on the chips of the mesh, and
        "xla" on other devices.
      directions: 1, or 2 to send half of each block each way; by default 2 on rings of three or more TPUs.
      unroll: ring steps in one loop body; "fused" has no such loop and takes no other than 2.
      precision: of the matmuls, as in `lax.dot_general`. They accumulate in float32. "fused" has the default alone.
      reduce_dtype: of the partial sums while they travel; by default x's dtype, the only one of "fused".

    Returns:
      y, of x's dtype. Its type says that it does not vary over `axis_name`.

    Raises:
      ValueError: no `shard_map` maps `axis_name`; shapes or dtypes do not match; an unknown backend.
      NotImplementedError: the backend cannot run this.
    """
    xs, _ = _as_tuple(x)
    ws, _ = _as_tuple(w)
    rules, op, axes = _prepare(
        "matmul_all_reduce", axis_name, backend, directions, unroll, precision, reduce_dtype, xs, ws
    )
    _check_pairs("matmul_all_reduce", xs, ws)
    return rules.matmul_all_reduce(
        op, tuple(cast_to_varying(v, axes) for v in xs), tuple(cast_to_varying(v, axes) for v in ws)
    )


def _as_tuple(value: OneOrMore) -> tuple[tuple[Array, ...], bool]:
    return (tuple(value), False) if isinstance(value, (tuple, list)) else ((value,), True)


def _prepare(
    caller: str,
    axis_name: str,
    backend: str | None,
    directions: Literal[1, 2] | None,
    unroll: int,
    precision: Any,
    reduce_dtype: Any,
    xs: tuple[Array, ...],
    ws: tuple[Array, ...],
) -> tuple[Any, Any, frozenset[str]]:
    """Checks what all ops share.

    Returns:
      The rules' module, the static half of the call for it, and the axes that all operands must vary over.
    """
    size = mapped_axis_size(caller, axis_name)
    if not ws or not xs:
        raise ValueError(f"{caller} needs at least one x and one w: got {len(xs)} and {len(ws)}")
    for x in xs:
        if x.ndim < 2:
            raise ValueError(f"{caller} needs x of two dimensions or more, [..., rows, features]: got {list(x.shape)}")
    for w in ws:
        if w.ndim != 2:
            raise ValueError(f"{caller} needs w of two dimensions, [k, n]: got {list(w.shape)}")
    dtypes = {operand.dtype for operand in (*xs, *ws)}
    if len(dtypes) > 1 or not jnp.issubdtype(dtypes.copy().pop(), jnp.floating):
        raise ValueError(
            f"{caller} needs all operands of one floating dtype: got {', '.join(sorted(map(str, dtypes)))}; "
            "cast them before the call (the modules of flaxasync.nn do)"
        )
    for operand in (*xs, *ws):
        if any(entry is not None for entry in jax.typeof(operand).sharding.spec):
            raise ValueError(
                f"{caller} needs every axis that shards its operands to be mapped by shard_map: got an operand that is "
                f"still sharded {jax.typeof(operand).sharding.spec}; leave axis_names out of jax.shard_map, or add them"
            )
    if directions not in (None, 1, 2):
        raise ValueError(f"{caller} needs directions to be 1, 2 or None: got {directions!r}")
    if unroll < 1:
        raise ValueError(f"{caller} needs unroll to be 1 or more: got {unroll}")
    axes = frozenset({axis_name}).union(*(jax.typeof(operand).mat.varying for operand in (*xs, *ws)))
    options = {"directions": directions, "unroll": unroll, "precision": precision, "reduce_dtype": reduce_dtype}
    fused = functools.partial(fused_rules.fused_op, caller, axis_name, size, dtype=xs[0].dtype, **options)
    backend = backend or _planned(caller, size, xs, ws, fused)
    if backend == "fused":
        return fused_rules, fused(), axes
    ring = choose_ring(caller, axis_name, size, backend, directions=directions, unroll=unroll)
    return collective_rules, collective_rules.Op(ring, precision, reduce_dtype), axes


def _planned(
    caller: str, size: int, xs: tuple[Array, ...], ws: tuple[Array, ...], fused: Callable[[], fused_rules.FusedOp]
) -> str:
    """What `plan` chooses for the chip of the ambient mesh; "xla" where that is none of its chips."""
    chip = mesh.chip()
    if chip is None:
        return "xla"
    try:
        kernels = bool(fused())
    except NotImplementedError:
        kernels = False
    if caller == "all_gather_matmul":
        shapes = [xs[0].shape, *(w.shape for w in ws)]
    else:  # pairs are one product of a longer contraction
        k = sum(w.shape[0] for w in ws)
        shapes = [(*xs[0].shape[:-1], k), (k, ws[0].shape[1])]
    return plan(caller, *shapes, chip=chip, ring=size, itemsize=xs[0].dtype.itemsize, kernels=kernels).backend


def choose_ring(
    caller: str,
    axis_name: str,
    size: int,
    backend: str | None,
    *,
    directions: Literal[1, 2] | None = None,
    unroll: int = 2,
) -> Ring:
    """The ring of `size` devices for a backend's name; what is None is chosen. Errors begin with `caller`."""
    if directions is None:
        directions = 2 if size > 2 and mesh.platform() == "tpu" else 1
    return Ring(axis_name, _choose_transport(caller, backend), directions, unroll)


def _choose_transport(caller: str, backend: str | None) -> Any:
    """The transport of a backend's name; None for "none"."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"{caller} got backend={backend!r}: it must be one of {', '.join(BACKENDS)}, or None to choose"
        )
    if backend == "none":
        return None
    if backend == "fused":
        raise NotImplementedError(f"{caller} has no 'fused' kernel; use backend='xla', which runs on every device")
    return transport.get(backend or "xla", caller)


def _check_contraction(caller: str, x: Array, w: Array, position: int) -> None:
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{caller} contracts x's last dimension with w's first: got x {list(x.shape)} and w {list(w.shape)}"
            + (f" (w number {position})" if position else "")
        )


def _check_pairs(caller: str, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> None:
    if len(xs) != len(ws):
        raise ValueError(f"{caller} sums x @ w over pairs: got {len(xs)} x and {len(ws)} w")
    for i, (x, w) in enumerate(zip(xs, ws, strict=True)):
        _check_contraction(caller, x, w, i)
        if x.shape[:-1] != xs[0].shape[:-1] or w.shape[1] != ws[0].shape[1]:
            raise ValueError(
                f"{caller} sums x @ w over pairs of one shape: got {list(xs[0].shape)} @ {list(ws[0].shape)} "
                f"and {list(x.shape)} @ {list(w.shape)}"
            )
