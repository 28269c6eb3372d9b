"""`mesh_matmul`: a matmul whose two operands split the contraction over different axes of a mesh.

For use inside `jax.shard_map`, on local shards. The kernels are in `flaxasync.kernels`; docs/kernels.md has their
schedules and predicted times.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flaxasync import mesh
from flaxasync.kernels.all_gather import all_gather
from flaxasync.kernels.gemm import TILES, gemm
from flaxasync.kernels.mesh.fused import gather_gemm
from flaxasync.kernels.mesh.overlapped import check_overlapped, overlapped
from flaxasync.kernels.reduce import all_reduce
from flaxasync.kernels.tiles import Tiles, check_operand, sublanes
from flaxasync.mesh import cast_to_varying, mapped_axis_size
from flaxasync.ops.plan import plan

BACKENDS = ("none", "xla_gemm", "serial", "fused", "overlapped")


def mesh_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k_other n"],
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    backend: str | None = None,
    tiles: Tiles | None = None,
    directions: int | None = None,
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
        "serial" (Pallas all-gather, matmul, all-reduce), "fused" (gather and matmul in one kernel, then an all-reduce)
        or "overlapped" (all in one kernel, every transfer behind a product). The last four are TPU kernels for float32
        and bfloat16, in whole hardware tiles. None is what `flaxasync.plan` predicts to be fastest on the chips of the
        mesh, and "none" on other devices.
      tiles: of the kernels' matmul, at most.
      directions: of the last three's transfers: 1, or 2 to send half each way around an axis of more than two devices.
        None is 2 where one axis has all devices, whose order can be a closed ring of chips, and the shapes can be
        halved. It is 1 where both axes have more than one: chips in a line are no ring, and two directions get into
        each other's way (docs/kernels.md).

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
    x, y = (mapped_axis_size(caller, name) for name in axis_names)
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"{caller} got backend={backend!r}: it must be one of {', '.join(BACKENDS)}, or None to choose"
        )
    if directions not in (1, 2, None):
        raise ValueError(f"{caller} needs directions to be 1, 2 or None: got {directions!r}")
    if lhs.ndim != 2 or rhs.ndim != 2:
        raise ValueError(f"{caller} needs lhs [m, k] and rhs [k', n]: got {list(lhs.shape)} and {list(rhs.shape)}")
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"{caller} needs operands of one floating dtype: got {lhs.dtype} and {rhs.dtype}; cast them")
    if lhs.shape[1] * y != rhs.shape[0] * x:
        raise ValueError(
            f"{caller} contracts lhs [m, K/{y}] with rhs [K/{x}, n] on a mesh of {x} x {y}: got {list(lhs.shape)} and "
            f"{list(rhs.shape)}, so K={lhs.shape[1] * y} on the left and K={rhs.shape[0] * x} on the right"
        )
    backend = backend or _planned(lhs, rhs, axis_names, directions)
    if backend != "none":
        _check_kernels(f"{caller} with backend={backend!r}", backend, lhs, rhs, y)
    axes = jax.typeof(lhs).mat.varying | set(axis_names)
    lhs = cast_to_varying(lhs, axes)
    rhs = cast_to_varying(rhs, axes - {axis_names[1]})
    if directions is None and min(x, y) > 1:
        directions = 1
    return _op(backend, _Options((axis_names[0], axis_names[1]), tiles, directions), lhs, rhs)


def _planned(lhs: Array, rhs: Array, axis_names: tuple[str, str], directions: int | None) -> str:
    """What `plan` chooses for the chip of the ambient mesh; "none" where that is none of its chips."""
    chip = mesh.chip()
    if chip is None:
        return "none"
    x, y = (lax.axis_size(name) for name in axis_names)
    try:
        _check_kernels("mesh_matmul", "overlapped", lhs, rhs, y)
        kernels = (x, y) == (1, 1) or check_overlapped(lhs, rhs, axis_names, directions=directions)
    except (NotImplementedError, ValueError):
        kernels = False
    options = {"itemsize": lhs.dtype.itemsize, "kernels": kernels}
    return plan("mesh_matmul", lhs.shape, rhs.shape, chip=chip, ring=(x, y), **options).backend


def _check_kernels(caller: str, backend: str, lhs: Array, rhs: Array, y: int) -> None:
    """Raises where the kernels of a backend cannot serve."""
    mesh.check_tpu(caller, "backend='none', which runs on every device")
    check_operand(caller, "lhs", lhs.shape, lhs.dtype)
    check_operand(caller, "rhs", rhs.shape, rhs.dtype)
    unit = y * sublanes(lhs.dtype)
    if backend != "xla_gemm" and lhs.shape[0] % unit:
        raise ValueError(
            f"{caller} cuts the rows of lhs into whole hardware tiles for {y} mesh columns: got {lhs.shape[0]} rows of "
            f"{lhs.dtype}, needed a multiple of {unit}; pad them, or use backend='xla_gemm' or 'none'"
        )


@dataclasses.dataclass(frozen=True)
class _Options:
    axis_names: tuple[str, str]
    tiles: Tiles | None = None
    directions: int | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(lax.axis_size(name) for name in self.axis_names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _op(backend: str, options: _Options, lhs: Array, rhs: Array) -> Array:
    return _FORMS[backend](options, lhs, rhs)


def _op_fwd(backend: str, options: _Options, lhs: Array, rhs: Array) -> tuple[Array, tuple[Array, Array]]:
    return _op(backend, options, lhs, rhs), (lhs, rhs)


def _op_bwd(backend: str, options: _Options, saved: tuple[Array, Array], do: Array) -> tuple[Array, Array]:
    _, pull = jax.vjp(functools.partial(_none, options), *saved)
    return pull(do)


_op.defvjp(_op_fwd, _op_bwd)


def _none(options: _Options, lhs: Array, rhs: Array) -> Array:
    """On a square mesh the block that column y needs lies in row y: one permute, the mesh transposed."""
    x, y = options.sizes
    if x == y:
        pairs = [(row * x + column, column * x + row) for row in range(x) for column in range(x)]
        needed = lax.ppermute(rhs, options.axis_names, pairs)
    else:
        needed = _needed(options, lax.all_gather(rhs, options.axis_names[0], axis=0, tiled=True), lhs)
    product = jnp.dot(lhs, needed, preferred_element_type=jnp.float32).astype(lhs.dtype)
    return lax.psum(product, options.axis_names[1])


def _xla_gemm(options: _Options, lhs: Array, rhs: Array) -> Array:
    gathered = lax.all_gather(rhs, options.axis_names[0], axis=0, tiled=True)
    return lax.psum(_gemm(options, lhs, gathered), options.axis_names[1])


def _serial(options: _Options, lhs: Array, rhs: Array) -> Array:
    x, _ = options.sizes
    gathered = rhs if x == 1 else all_gather(rhs, options.axis_names[0], directions=options.directions)
    return _reduced(options, _gemm(options, lhs, gathered))


def _fused(options: _Options, lhs: Array, rhs: Array) -> Array:
    if options.sizes[0] == 1:
        return _reduced(options, _gemm(options, lhs, rhs))
    tiles, directions = options.tiles or TILES, options.directions
    return _reduced(options, gather_gemm(lhs, rhs, options.axis_names, tiles=tiles, directions=directions))


def _overlapped(options: _Options, lhs: Array, rhs: Array) -> Array:
    if options.sizes == (1, 1):
        return _reduced(options, _gemm(options, lhs, rhs))
    return overlapped(lhs, rhs, options.axis_names, tiles=options.tiles, directions=options.directions)


_FORMS: dict[str, Any] = {
    "none": _none,
    "xla_gemm": _xla_gemm,
    "serial": _serial,
    "fused": _fused,
    "overlapped": _overlapped,
}


def _gemm(options: _Options, lhs: Array, gathered: Array) -> Array:
    return gemm(lhs, _needed(options, gathered, lhs), tiles=options.tiles or TILES)


def _needed(options: _Options, gathered: Array, lhs: Array) -> Array:
    """The rows of the whole RHS that this mesh column contracts with."""
    rows = lhs.shape[1]
    return lax.dynamic_slice_in_dim(gathered, lax.axis_index(options.axis_names[1]) * rows, rows, axis=0)


def _reduced(options: _Options, product: Array) -> Array:
    """The sum over mesh columns."""
    name = options.axis_names[1]
    return (
        lax.psum(product, name) if options.sizes[1] == 1 else all_reduce(product, name, directions=options.directions)
    )
