"""`mesh_matmul`: a matmul whose two operands split the contraction over different axes of a mesh.

docs/kernels has the schedules of the kernels, and predicted times.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from flaxasync.kernels.collectives import all_gather, all_reduce
from flaxasync.kernels.engine.operands import Tiles, check_operand, sublanes
from flaxasync.kernels.gemm import TILES, gemm
from flaxasync.kernels.mesh_matmul.overlapped import overlapped
from flaxasync.kernels.mesh_matmul.schedule import plan
from flaxasync.mesh import (
    UnsupportedError,
    cast_to_varying,
    declare_invarying,
    mapped_axis_size,
    vary_like,
)
from flaxasync.ops.choose import Directions, cannot_serve, decide, is_default
from flaxasync.ops.matmul.products import dot, weight_gradient
from flaxasync.ops.matmul.ring import RingExecutor, uninitialised
from flaxasync.ops.saved import PRODUCT
from flaxasync.ring import Index, ring_gather, ring_reduce
from flaxasync.transport.schedule import tie


def mesh_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k_other n"],
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    backend: str | None = None,
    tiles: Tiles | None = None,
    directions: Directions = None,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "m n"]:
    """Multiplies LHS[M_X, K_Y] by RHS[K_X, N], which gives O[M_X, N], on a mesh of X x Y devices,
    in `jax.shard_map`.

    ```
    lhs  [M/X, K/Y]    rows by mesh row, contraction by mesh column
    rhs  [K/X, N]      contraction by mesh row, the same in all mesh columns
    o    [M/X, N]      rows by mesh row, the same in all mesh columns

    forward  o   = sum over y of lhs @ (the K/Y rows of RHS that mesh column y contracts with)
    dlhs         = do @ (the same rows).T              ring gather of w around the mesh column
    drhs         = sum over x of lhs.T @ do            ring reduce-scatter of dw around the mesh column
    ```

    Saved are lhs and rhs. The gradients are the same for all backends. Of the K/Y rows of its mesh
    column, each device fetches a block w of K/(X*Y) from the device that holds them, and sums a
    block dw of the same rows. These permutes and the two rings are those of XLA. w arrives beside
    the product of drhs. dw travels back beside the product of dlhs, and then a ring gathers drhs
    around the mesh row. Where Y does not divide K/X, the gradients have XLA's collectives, which
    nothing hides.

    Args:
      axis_names: (x, y), the mesh axes of rows and of columns.
      backend: What executes the op: "none" (collectives and a matmul of XLA; any device),
        "xla_gemm" (collectives of XLA around a Pallas matmul), "serial" (a Pallas all-gather,
        matmul and all-reduce, one after the other), "fused" (the gather and the matmul in one
        kernel, then an all-reduce) or "overlapped" (everything in one kernel, every transfer behind
        a product). The last four are TPU kernels for float32 and bfloat16, in whole hardware tiles.
        None stands for what `flaxasync.plan` predicts to be fastest on the chips of the mesh, and
        for "none" on other devices.
      tiles: The tiles of the kernels' matmul, at most.
      directions: The directions of the transfers of "serial", "fused" and "overlapped": 1, or 2 to
        send half of the rows in each direction around an axis of more than two devices. None stands
        for 2 where the shapes can be halved, but for 1 on X x 2 meshes of several mesh rows, where
        two directions delay each other.
      precision: The precision of the products, as in `lax.dot_general`. The kernels only take the
        default.

    Returns:
      o, in the dtype of lhs. Its type says that it does not vary over y.

    Raises:
      ValueError: `shard_map` does not map the axes; shapes or dtypes do not fit each other, the
        mesh or hardware tiles; the tiles exceed vector memory; the backend is unknown.
      NotImplementedError: The backend cannot run on these devices, this mesh, this dtype or this
        precision.
    """
    op = "mesh_matmul"
    if len(set(axis_names)) != 2:
        raise ValueError(
            f"{op} needs the names of two mesh axes, of rows and of columns: got {axis_names!r}"
        )
    x, y = (mapped_axis_size(op, name) for name in axis_names)
    if lhs.ndim != 2 or rhs.ndim != 2:
        raise ValueError(
            f"{op} needs lhs [m, k] and rhs [k', n]: got {list(lhs.shape)} and {list(rhs.shape)}"
        )
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(
            f"{op} needs operands of one floating dtype: got {lhs.dtype} and {rhs.dtype}; cast them"
        )
    if lhs.shape[1] * y != rhs.shape[0] * x:
        raise ValueError(
            f"{op} contracts lhs [m, K/{y}] with rhs [K/{x}, n] on a mesh of {x} x {y}: got "
            f"{list(lhs.shape)} and {list(rhs.shape)}, so K={lhs.shape[1] * y} on the left and "
            f"K={rhs.shape[0] * x} on the right"
        )

    if directions is None and x > 1 and y == 2:
        directions = 1

    def check(name: str) -> None:
        reduce = name == "overlapped"
        try:
            if name != "none":
                if not is_default(precision):
                    limit = (
                        "multiplies with the matrix unit's default precision: got "
                        f"precision={precision}"
                    )
                    raise cannot_serve(op, name, limit, "leave it out, or use backend='none'")
                _check_kernels(f"{op} with backend={name!r}", name, lhs, rhs, y)
            if tiles is None and name in ("fused", "overlapped") and (x > 1 or (reduce and y > 1)):
                plan(lhs, rhs, axis_names, reduce, tiles, directions)  # raises if there is none
        except ValueError as error:  # the operands are wrong for a backend that was named, and another one can serve
            if backend is None:
                raise UnsupportedError(str(error)) from error
            raise

    chosen = decide(
        op,
        backend,
        shapes=(lhs.shape, rhs.shape),
        ring=(x, y),
        directions=directions,
        check=check,
        itemsize=lhs.dtype.itemsize,
    ).backend
    axes = jax.typeof(lhs).mat.varying | set(axis_names)
    lhs = cast_to_varying(lhs, axes)
    rhs = cast_to_varying(rhs, axes - {axis_names[1]})
    return _mesh_matmul(
        _Call(chosen, (axis_names[0], axis_names[1]), (x, y), tiles, directions, precision),
        lhs,
        rhs,
    )


def _check_kernels(caller: str, backend: str, lhs: Array, rhs: Array, y: int) -> None:
    """Raises if the kernels of a backend cannot take these operands."""
    check_operand(caller, "lhs", lhs.shape, lhs.dtype)
    check_operand(caller, "rhs", rhs.shape, rhs.dtype)
    unit = y * sublanes(lhs.dtype)
    if backend != "xla_gemm" and lhs.shape[0] % unit:
        raise ValueError(
            f"{caller} cuts the rows of lhs into whole hardware tiles for {y} mesh columns: got "
            f"{lhs.shape[0]} rows of {lhs.dtype}, needed a multiple of {unit}; pad them, or use "
            "backend='xla_gemm' or 'none'"
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in a call of `mesh_matmul`."""

    backend: str
    axis_names: tuple[str, str]  # (x, y), of rows and of columns
    sizes: tuple[int, int]  # the devices on them
    tiles: Tiles | None
    directions: int | None  # None lets each kernel choose
    precision: lax.PrecisionLike


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mesh_matmul(call: _Call, lhs: Array, rhs: Array) -> Array:
    """Runs the backend of the call."""
    x, y = call.sizes
    rows, columns = call.axis_names
    whole = call.backend == "overlapped"
    if call.backend == "none":
        return _none(call, lhs, rhs)
    if call.backend == "xla_gemm":
        return lax.psum(_gemm(call, lhs, lax.all_gather(rhs, rows, axis=0, tiled=True)), columns)
    if call.backend != "serial" and (x > 1 or (whole and y > 1)):
        product = overlapped(
            lhs, rhs, call.axis_names, reduce=whole, tiles=call.tiles, directions=call.directions
        )
        if whole:
            return product
    else:
        if x == 1:
            gathered = rhs
        else:
            gathered = all_gather(rhs, rows, directions=call.directions)
        product = _gemm(call, lhs, gathered)
    if y == 1:
        return lax.psum(product, columns)
    return all_reduce(product, columns, directions=call.directions)


def _mesh_matmul_fwd(call: _Call, lhs: Array, rhs: Array) -> tuple[Array, tuple[Array, Array]]:
    return checkpoint_name(_mesh_matmul(call, lhs, rhs), PRODUCT), (lhs, rhs)


def _mesh_matmul_bwd(call: _Call, saved: tuple[Array, Array], do: Array) -> tuple[Array, Array]:
    lhs, rhs = saved
    _, y = call.sizes
    _, columns = call.axis_names
    if rhs.shape[0] % y:
        return jax.vjp(functools.partial(_none, call), lhs, rhs)[1](do)
    typed = columns in jax.typeof(lhs).mat.varying
    # under check_vma=False shard_map hands each device a share of do, and sums drhs over the mesh
    # row
    if not typed:
        do = lax.psum(do, columns)
    do = vary_like(do, lhs)
    block_rows = rhs.shape[0] // y
    # of the rows of rhs that this device sends, and whose sum it gets
    first = lax.axis_index(columns) * block_rows
    # The devices of a mesh column lie along the axis of rows, those of a mesh row along that of
    # columns.
    column_ring, row_ring = (
        decide("all_gather_matmul", "xla", ring=size).ring(name)
        for name, size in zip(call.axis_names, call.sizes, strict=True)
    )

    def multiply(row: Index, count: int) -> Array:
        block = lax.dynamic_slice_in_dim(lhs, row, count, axis=1)
        product = weight_gradient(block, do, call.precision).astype(rhs.dtype)
        # XLA would add what arrives within the product, which would then wait for it
        return tie(product)

    def write(w: Array, row: Index, dlhs: Array) -> Array:
        product = dot(do, w, call.precision, transposed=True).astype(dlhs.dtype)
        return lax.dynamic_update_slice_in_dim(dlhs, product, row, axis=1)

    with jax.named_scope("mesh_matmul_drhs"):
        w = _permute(call, lax.dynamic_slice_in_dim(rhs, first, block_rows), to_columns=True)
        dw = ring_reduce(column_ring, block_rows, multiply, rhs.dtype)
    with jax.named_scope("mesh_matmul_dlhs"):
        dw = _permute(call, dw, to_columns=False)
        dlhs = ring_gather(column_ring, w, uninitialised(lhs.shape, lhs), write)
        # the caller sums drhs over the mesh row
        if not typed or columns in jax.typeof(rhs).mat.varying:
            return dlhs, lax.dynamic_update_slice_in_dim(jnp.zeros_like(rhs), dw, first, axis=0)
        _, drhs = RingExecutor(row_ring).gather(dw, (), keep=True)
        assert isinstance(drhs, Array)
        return dlhs, declare_invarying(drhs, {columns})


_mesh_matmul.defvjp(_mesh_matmul_fwd, _mesh_matmul_bwd)


def _none(call: _Call, lhs: Array, rhs: Array) -> Array:
    """On a square mesh the block that column y contracts with lies in row y, so one permute
    transposes the mesh.
    """
    x, y = call.sizes
    if x == y:
        pairs = [(row * x + column, column * x + row) for row in range(x) for column in range(x)]
        contracted = lax.ppermute(rhs, call.axis_names, pairs)
    else:
        contracted = _contracted_rows(
            call, lax.all_gather(rhs, call.axis_names[0], axis=0, tiled=True), lhs
        )
    product = dot(lhs, contracted, call.precision).astype(lhs.dtype)
    return lax.psum(product, call.axis_names[1])


def _permute(call: _Call, block: Array, *, to_columns: bool) -> Array:
    """Moves a block of K/(X*Y) rows to the mesh column that contracts with it, or back to the mesh
    row that stores it.

    Device (x, y) stores block x * Y + y of all rows of RHS, in its part of them, and contracts with
    block y * X + x.
    """
    x, y = call.sizes
    if min(x, y) == 1:
        return block
    pairs = [(stored, stored % x * y + stored // x) for stored in range(x * y)]
    return lax.ppermute(
        block, call.axis_names, pairs if to_columns else [(there, here) for here, there in pairs]
    )


def _gemm(call: _Call, lhs: Array, gathered: Array) -> Array:
    return gemm(lhs, _contracted_rows(call, gathered, lhs), tiles=call.tiles or TILES)


def _contracted_rows(call: _Call, gathered: Array, lhs: Array) -> Array:
    """Returns the rows of the whole RHS that this mesh column contracts with."""
    rows = lhs.shape[1]
    return lax.dynamic_slice_in_dim(
        gathered, lax.axis_index(call.axis_names[1]) * rows, rows, axis=0
    )
