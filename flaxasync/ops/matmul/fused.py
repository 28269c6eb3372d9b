"""The rules of the collective matmuls as single Pallas TPU kernels, forward and backward: backend="fused".

They assume valid input, cast to vary over the same axes; shapes are those of `collective_rules`.

                        forward                  dx                                dw
all_gather_matmul       all_gather_matmul        matmul_reduce_scatter(dy, w.T)    gather_outer(x, dy)
matmul_reduce_scatter   matmul_reduce_scatter    all_gather_matmul(dy, w.T)        x.T @ gathered dy, which dx leaves
matmul_all_reduce       matmul_reduce_scatter,   dy @ w.T                          x.T @ dy
                        then a gather

Saved for the backward pass are x and w as they were given. The kernels take [batches, rows, features] in whole hardware
tiles: leading dimensions are merged, and what is not whole is padded with zeros, which costs a copy.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxasync import mesh
from flaxasync.kernels.all_gather_matmul import all_gather_matmul as gather_kernel
from flaxasync.kernels.gather_outer import gather_outer
from flaxasync.kernels.matmul_reduce_scatter import matmul_reduce_scatter as reduce_kernel
from flaxasync.kernels.tiles import DTYPES, LANES, sublanes
from flaxasync.ops.matmul.ring import dot, outer

INSTEAD = "use backend='xla'"


@dataclasses.dataclass(frozen=True)
class FusedOp:
    """The static half of a call."""

    axis_name: str
    directions: int


def fused_op(
    caller: str,
    axis_name: str,
    size: int,
    *,
    directions: int | None,
    unroll: int,
    precision: Any,
    reduce_dtype: Any,
    dtype: Any,
) -> FusedOp:
    """The static half of a call of `size` devices; what is None is chosen.

    Raises:
      NotImplementedError: the kernels cannot serve the call.
    """
    caller = f"{caller} with backend='fused'"
    mesh.check_tpu(caller, "backend='xla', which runs on every device")
    if size == 1:
        raise NotImplementedError(
            f"{caller} exchanges blocks between devices: got an axis {axis_name!r} of size 1; use backend='none'"
        )
    if jnp.dtype(dtype).name not in DTYPES:
        raise NotImplementedError(
            f"{caller} has kernels for {' and '.join(DTYPES)}: got {jnp.dtype(dtype).name}; cast the operands, or "
            f"{INSTEAD}"
        )
    if precision not in (None, lax.Precision.DEFAULT, "default"):
        raise NotImplementedError(
            f"{caller} multiplies with the matrix unit's default precision: got precision={precision}; leave it out, "
            f"or {INSTEAD}"
        )
    if reduce_dtype is not None and jnp.dtype(reduce_dtype) != jnp.dtype(dtype):
        raise NotImplementedError(
            f"{caller} sends partial sums in the operands' dtype, {jnp.dtype(dtype).name}: got reduce_dtype="
            f"{jnp.dtype(reduce_dtype).name}; leave it out, or {INSTEAD}"
        )
    if unroll != 2:
        raise NotImplementedError(
            f"{caller} is a kernel with loops of its own, which unroll does not reach: got unroll={unroll}; leave it "
            f"out, or {INSTEAD}"
        )
    return FusedOp(axis_name, directions or (2 if size > 2 else 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_gather_matmul(op: FusedOp, x: Array, ws: tuple[Array, ...]) -> tuple[Array, ...]:
    with jax.named_scope("all_gather_matmul"):
        return _gather(op, x, ws)[0]


def _all_gather_matmul_fwd(op: FusedOp, x: Array, ws: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple]:
    return all_gather_matmul(op, x, ws), (x, ws)


def _all_gather_matmul_bwd(op: FusedOp, saved: tuple, dys: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    x, ws = saved
    with jax.named_scope("all_gather_matmul_dx"):
        dx = _reduce(op, dys, ws, transposed=True)
    with jax.named_scope("all_gather_matmul_dw"):
        return dx, _outer(op, x, dys)


all_gather_matmul.defvjp(_all_gather_matmul_fwd, _all_gather_matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_reduce_scatter(op: FusedOp, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> Array:
    with jax.named_scope("matmul_reduce_scatter"):
        return _reduce(op, xs, ws)


def _matmul_reduce_scatter_fwd(op: FusedOp, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> tuple[Array, tuple]:
    return matmul_reduce_scatter(op, xs, ws), (xs, ws)


def _matmul_reduce_scatter_bwd(op: FusedOp, saved: tuple, dy: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    xs, ws = saved
    with jax.named_scope("matmul_reduce_scatter_dx"):
        dxs, gathered = _gather(op, dy, ws, transposed=True, keep_gathered=True)
    with jax.named_scope("matmul_reduce_scatter_dw"):
        # Flat: of products over batches and rows XLA lays x and all that is computed beside it out anew, with copies.
        return dxs, tuple(outer(_flat(x), _flat(gathered)).astype(w.dtype) for x, w in zip(xs, ws, strict=True))


matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_fwd, _matmul_reduce_scatter_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_all_reduce(op: FusedOp, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> Array:
    with jax.named_scope("matmul_all_reduce"):
        size, rows = lax.axis_size(op.axis_name), xs[0].shape[-2]
        share = -(-rows // size)
        y_shard = _reduce(op, tuple(_pad(x, {-2: share * size}) for x in xs), ws)
        y = lax.all_gather(y_shard, op.axis_name, axis=y_shard.ndim - 2, tiled=True, to="invarying")
        return lax.slice_in_dim(y, 0, rows, axis=-2)


def _matmul_all_reduce_fwd(op: FusedOp, xs: tuple[Array, ...], ws: tuple[Array, ...]) -> tuple[Array, tuple]:
    return matmul_all_reduce(op, xs, ws), (xs, ws)


def _matmul_all_reduce_bwd(op: FusedOp, saved: tuple, dy: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    xs, ws = saved
    if op.axis_name not in jax.typeof(xs[0]).mat.varying:
        dy = lax.psum(dy, op.axis_name)  # check_vma=False: see collective_rules
    dxs = tuple(dot(dy, w, transposed=True).astype(x.dtype) for x, w in zip(xs, ws, strict=True))
    return dxs, tuple(outer(x, dy).astype(w.dtype) for x, w in zip(xs, ws, strict=True))


matmul_all_reduce.defvjp(_matmul_all_reduce_fwd, _matmul_all_reduce_bwd)


def _gather(
    op: FusedOp, x: Array, ws: tuple[Array, ...], *, transposed: bool = False, keep_gathered: bool = False
) -> tuple[tuple[Array, ...], Any]:
    """all_gather(x) @ w, or @ w.T, for each w; and the gathered x, or None."""
    size, (*batch, m, k) = lax.axis_size(op.axis_name), x.shape
    unit = sublanes(x.dtype)
    block = _pad(x.reshape(-1, m, k), {1: unit, 2: LANES})
    halves = block.shape[0] % 2 == 0 or block.shape[1] % (2 * unit) == 0
    ys, gathered = gather_kernel(
        block,
        tuple(_pad(w, {0: LANES, 1: LANES}) for w in ws),
        op.axis_name,
        transposed=transposed,
        keep_gathered=keep_gathered,
        directions=op.directions if halves else 1,
    )
    widths = [w.shape[0 if transposed else 1] for w in ws]
    ys = tuple(_unpad(y, size, m, n).reshape(*batch, size * m, n) for y, n in zip(ys, widths, strict=True))
    return ys, None if gathered is None else _unpad(gathered, size, m, k).reshape(*batch, size * m, k)


def _reduce(op: FusedOp, xs: tuple[Array, ...], ws: tuple[Array, ...], *, transposed: bool = False) -> Array:
    """reduce_scatter(sum of x @ w), or of x @ w.T."""
    size, (*batch, rows, _) = lax.axis_size(op.axis_name), xs[0].shape
    m, n = rows // size, ws[0].shape[0 if transposed else 1]
    y = reduce_kernel(
        tuple(_pad_blocks(x, size, sublanes(x.dtype)) for x in xs),
        tuple(_pad(w, {0: LANES, 1: LANES}) for w in ws),
        op.axis_name,
        transposed=transposed,
        directions=op.directions,
    )
    return _unpad(y, 1, m, n).reshape(*batch, m, n)


def _outer(op: FusedOp, x: Array, dys: tuple[Array, ...]) -> tuple[Array, ...]:
    """all_gather(x).T @ dy for each dy, over all rows of all batches."""
    size, (*_, m, k) = lax.axis_size(op.axis_name), x.shape
    x = x.reshape(-1, m, k)
    unit = sublanes(x.dtype)
    if -(-m // unit) * unit * x.shape[0] % LANES:
        unit = math.lcm(unit, LANES // math.gcd(LANES, x.shape[0]))
    dws = gather_outer(
        _pad(x, {1: unit, 2: LANES}),
        tuple(_pad_blocks(dy, size, unit) for dy in dys),
        op.axis_name,
        directions=op.directions,
    )
    return tuple(dw[:k, : dy.shape[-1]] for dw, dy in zip(dws, dys, strict=True))


def _flat(x: Array) -> Array:
    """All rows of all batches, [rows, features]."""
    return x.reshape(-1, x.shape[-1])


def _pad(x: Array, units: dict[int, int]) -> Array:
    """Zeros behind each of some dimensions, up to a multiple of a unit."""
    more = [0] * x.ndim
    for axis, unit in units.items():
        more[axis] = -x.shape[axis] % unit
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, count, 0) for count in more]) if any(more) else x


def _pad_blocks(x: Array, size: int, unit: int) -> Array:
    """[..., size * m, k] as [batches, size * m', k'], each device's rows padded to a multiple of a unit."""
    *_, rows, k = x.shape
    blocks = _pad(x.reshape(-1, size, rows // size, k), {2: unit, 3: LANES})
    return blocks.reshape(blocks.shape[0], -1, blocks.shape[3])


def _unpad(y: Array, size: int, m: int, n: int) -> Array:
    """The [batches, size * m, n] that were asked for."""
    if y.shape[1:] == (size * m, n):
        return y
    blocks = y.reshape(y.shape[0], size, -1, y.shape[2])[:, :, :m, :n]
    return blocks.reshape(y.shape[0], size * m, n)
