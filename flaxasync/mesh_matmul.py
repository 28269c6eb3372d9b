"""`mesh_matmul`: a matmul whose two operands split the contraction over different axes of a mesh.

For use inside `jax.shard_map`, on local shards. The kernels are in `flaxasync.kernels`; docs/kernels.md has their
schedules and predicted times.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flaxasync import transport
from flaxasync.kernels.all_gather import all_gather
from flaxasync.kernels.fused import gather_gemm
from flaxasync.kernels.gemm import TILES, gemm
from flaxasync.kernels.overlapped import TILES as OVERLAPPED_TILES
from flaxasync.kernels.overlapped import overlapped
from flaxasync.kernels.reduce import all_reduce
from flaxasync.kernels.tiles import Tiles, check_operand, sublanes

BACKENDS = ("none", "xla_gemm", "serial", "fused", "overlapped")
TWO_BY_TWO = ("fused", "overlapped")  # backends whose kernels know that mesh alone


def mesh_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k_other n"],
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    backend: str | None = None,
    tiles: Tiles | None = None,
) -> Float[Array, "m n"]:
    """LHS[M_X, K_Y] . RHS[K_X, N] -> O[M_X, N] on a mesh of X x Y devices.

    ```
    lhs  [M/X, K/Y]    rows by mesh row, contraction by mesh column
    rhs  [K/X, N]      contraction by mesh row, the same in all mesh columns
    o    [M/X, N]      rows by mesh row, the same in all mesh columns

    forward  o   = sum over y of lhs @ (the K/Y rows of RHS that mesh column y needs)
    dlhs         = do @ (the same rows).T
    drhs         = the K/X rows that mesh row x holds of sum over x of lhs.T @ do
    ```

    Saved are lhs and rhs. The gradients are those of backend "none", whatever the forward pass used: XLA schedules
    them, and no kernel of ours hides their transfers.

    Args:
      lhs: this device's block of the left-hand side.
      rhs: this device's block of the right-hand side.
      axis_names: (x, y), the mesh axes of rows and of columns.
      backend: "none" (what XLA makes of it; any device), "xla_gemm" (XLA's collectives around a Pallas matmul),
        "serial" (Pallas all-gather, matmul, all-reduce), "fused" (gather and matmul in one kernel, then an all-reduce;
        2 x 2) or "overlapped" (all in one kernel, every transfer behind a product; 2 x 2). The last four are TPU
        kernels for float32 and bfloat16, in whole hardware tiles. None is "none".
      tiles: of the kernels' matmul, at most.

    Returns:
      o, of lhs's dtype. Its type says that it does not vary over y.

    Raises:
      ValueError: `shard_map` does not map the axes; shapes or dtypes that do not fit each other, the mesh or hardware
        tiles; tiles that exceed vector memory; an unknown backend.
      NotImplementedError: the backend cannot run on these devices, this mesh or this dtype.
    """
    caller = "mesh_matmul"
    if len(set(axis_names)) != 2:
        raise ValueError(f"{caller} needs the names of two mesh axes, of rows and of columns: got {axis_names!r}")
    x, y = (transport.axis_size(caller, name) for name in axis_names)
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"{caller} got backend={backend!r}: it must be one of {', '.join(BACKENDS)}, or None to choose"
        )
    if lhs.ndim != 2 or rhs.ndim != 2:
        raise ValueError(f"{caller} needs lhs [m, k] and rhs [k', n]: got {list(lhs.shape)} and {list(rhs.shape)}")
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"{caller} needs operands of one floating dtype: got {lhs.dtype} and {rhs.dtype}; cast them")
    if lhs.shape[1] * y != rhs.shape[0] * x:
        raise ValueError(
            f"{caller} contracts lhs [m, K/{y}] with rhs [K/{x}, n] on a mesh of {x} x {y}: got {list(lhs.shape)} and "
            f"{list(rhs.shape)}, so K={lhs.shape[1] * y} on the left and K={rhs.shape[0] * x} on the right"
        )
    backend = backend or "none"
    if backend != "none":
        _check_kernels(f"{caller} with backend={backend!r}", backend, lhs, rhs, x, y)
    axes = jax.typeof(lhs).mat.varying | set(axis_names)
    lhs = transport.vary(lhs, axes)
    return _op(backend, tuple(axis_names), tiles, lhs, transport.vary(rhs, axes - {axis_names[1]}))


def _check_kernels(caller: str, backend: str, lhs: Array, rhs: Array, x: int, y: int) -> None:
    """Raises where the kernels of a backend cannot serve."""
    transport.devices.check_tpu(caller, "backend='none', which runs on every device")
    if backend in TWO_BY_TWO and (x, y) != (2, 2):
        raise NotImplementedError(
            f"{caller} has kernels for a mesh of 2 x 2 devices: got {x} x {y}; use backend='serial' or 'none'"
        )
    check_operand(caller, "lhs", lhs.shape, lhs.dtype)
    check_operand(caller, "rhs", rhs.shape, rhs.dtype)
    unit = y * sublanes(lhs.dtype)
    if backend != "xla_gemm" and lhs.shape[0] % unit:
        raise ValueError(
            f"{caller} cuts the rows of lhs into whole hardware tiles for {y} mesh columns: got {lhs.shape[0]} rows of "
            f"{lhs.dtype}, needed a multiple of {unit}; pad them, or use backend='xla_gemm' or 'none'"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _op(backend: str, axis_names: tuple[str, str], tiles: Tiles | None, lhs: Array, rhs: Array) -> Array:
    return _FORMS[backend](axis_names, tiles, lhs, rhs)


def _op_fwd(
    backend: str, axis_names: tuple[str, str], tiles: Tiles | None, lhs: Array, rhs: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _op(backend, axis_names, tiles, lhs, rhs), (lhs, rhs)


def _op_bwd(
    backend: str, axis_names: tuple[str, str], tiles: Tiles | None, saved: tuple[Array, Array], do: Array
) -> tuple[Array, Array]:
    _, pull = jax.vjp(functools.partial(_none, axis_names, None), *saved)
    return pull(do)


_op.defvjp(_op_fwd, _op_bwd)


def _none(axis_names: tuple[str, str], tiles: Tiles | None, lhs: Array, rhs: Array) -> Array:
    """On a square mesh the block that column y needs lies in row y: one permute, the mesh transposed."""
    x, y = (lax.axis_size(name) for name in axis_names)
    if x == y:
        needed = lax.ppermute(
            rhs, axis_names, [(row * x + column, column * x + row) for row in range(x) for column in range(x)]
        )
    else:
        needed = _rows_of_column(axis_names, lax.all_gather(rhs, axis_names[0], axis=0, tiled=True), lhs.shape[1])
    product = jnp.dot(lhs, needed, preferred_element_type=jnp.float32).astype(lhs.dtype)
    return lax.psum(product, axis_names[1])


def _xla_gemm(axis_names: tuple[str, str], tiles: Tiles | None, lhs: Array, rhs: Array) -> Array:
    gathered = lax.all_gather(rhs, axis_names[0], axis=0, tiled=True)
    product = gemm(lhs, _rows_of_column(axis_names, gathered, lhs.shape[1]), tiles=tiles or TILES)
    return lax.psum(product, axis_names[1])


def _serial(axis_names: tuple[str, str], tiles: Tiles | None, lhs: Array, rhs: Array) -> Array:
    x, y = (lax.axis_size(name) for name in axis_names)
    gathered = rhs if x == 1 else all_gather(rhs, axis_names[0])
    product = gemm(lhs, _rows_of_column(axis_names, gathered, lhs.shape[1]), tiles=tiles or TILES)
    return lax.psum(product, axis_names[1]) if y == 1 else all_reduce(product, axis_names[1])


def _fused(axis_names: tuple[str, str], tiles: Tiles | None, lhs: Array, rhs: Array) -> Array:
    return all_reduce(gather_gemm(lhs, rhs, axis_names, tiles=tiles or TILES), axis_names[1])


def _overlapped(axis_names: tuple[str, str], tiles: Tiles | None, lhs: Array, rhs: Array) -> Array:
    return overlapped(lhs, rhs, axis_names, tiles=tiles or OVERLAPPED_TILES)


_FORMS: dict[str, Any] = {
    "none": _none,
    "xla_gemm": _xla_gemm,
    "serial": _serial,
    "fused": _fused,
    "overlapped": _overlapped,
}


def _rows_of_column(axis_names: tuple[str, str], gathered: Array, rows: int) -> Array:
    """The rows of the whole RHS that this mesh column contracts with."""
    return lax.dynamic_slice_in_dim(gathered, lax.axis_index(axis_names[1]) * rows, rows, axis=0)
