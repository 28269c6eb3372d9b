"""x [m, k] @ w [k, n] as a Pallas TPU kernel: tiles stream from HBM, float32 sums stay in vector memory.

Two forms of one step: `gemm` is a kernel with a grid; `stream` runs inside another kernel, on refs in HBM, while that
kernel's transfers travel. Sides need not divide by the tiles: what hangs over the edge of k is masked, what hangs over
m and n is never stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.tiles import Tiles, check_operand, largest_side, sublanes, vmem_limit

TILES = Tiles(512, 1024, 1024)
ROWS = 512  # of one product in the code of a step: tiles of more rows loop over it, which makes programs smaller


def gemm(x: jax.Array, w: jax.Array, *, tiles: Tiles = TILES) -> jax.Array:
    """Multiplies in one kernel; the sum is float32, the result of x's dtype.

    Args:
      x: [m, k], float32 or bfloat16, in whole hardware tiles.
      w: [k, n], likewise.
      tiles: of one step.

    Raises:
      ValueError: shapes do not fit each other or hardware tiles; tiles that exceed vector memory.
      NotImplementedError: another dtype.
    """
    check_operand("gemm", "x", x.shape, x.dtype)
    check_operand("gemm", "w", w.shape, w.dtype)
    if x.shape[1] != w.shape[0] or x.dtype != w.dtype:
        raise ValueError(f"gemm needs x [m, k] and w [k, n] of one dtype: got {jax.typeof(x)} and {jax.typeof(w)}")
    (m, k), n = x.shape, w.shape[1]
    tiles = tiles.within(m, k, n)
    need = tiles.check("gemm", x.dtype)
    x_spec, w_spec, o_spec = specs(tiles)

    def body(x_tile: Any, w_tile: Any, o_tile: Any, total: Any) -> None:
        step(x_tile, w_tile, o_tile, total, depth=k)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype, manual_axis_type=jax.typeof(x).mat),
        grid=grid(tiles, m, k, n),
        in_specs=[x_spec, w_spec],
        out_specs=o_spec,
        scratch_shapes=[pltpu.VMEM((tiles.m, tiles.n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit(need)
        ),
        cost_estimate=cost(tiles, m, k, n, x.dtype.itemsize),
        name="gemm",
    )(x, w)


def stream(x_ref: Any, w_ref: Any, o_ref: Any, total: Any, *, tiles: Tiles) -> None:
    """Inside a kernel: o = x @ w, streaming tiles from and to HBM.

    Args:
      x_ref: [m, k] in HBM.
      w_ref: [k, n] in HBM.
      o_ref: [m, n] in HBM.
      total: [tiles.m, tiles.n] or larger in VMEM, float32.
      tiles: of one step, no larger than the operands.
    """
    (m, k), n = x_ref.shape, w_ref.shape[1]
    x_spec, w_spec, o_spec = specs(tiles)

    def body(x_tile: Any, w_tile: Any, o_tile: Any) -> None:
        step(x_tile, w_tile, o_tile, total, depth=k)

    with jax.named_scope("multiply"):
        pltpu.emit_pipeline(body, grid=grid(tiles, m, k, n), in_specs=[x_spec, w_spec], out_specs=[o_spec])(
            x_ref, w_ref, o_ref
        )


def step(x_tile: Any, w_tile: Any, o_tile: Any, total: Any, *, depth: int) -> None:
    """One tile of x by one of w; the first of a sum stores it (no pass to clear it), the last rounds it."""
    t, last = pl.program_id(2), pl.num_programs(2) - 1
    (m, k), n = x_tile.shape, w_tile.shape[1]
    side = largest_side(m, ROWS, sublanes(x_tile.dtype))
    left = jnp.where(t == last, depth % k, k)

    @pl.loop(0, m // side)
    def _(i: Any) -> None:
        part = pl.ds(pl.multiple_of(i * side, side), side), slice(0, n)

        def product() -> jax.Array:  # read within each branch: values that cross one would be copied first
            x, w = x_tile[part[0], :], w_tile[...]
            if depth % k:  # beyond k is whatever memory held, NaN perhaps: both sides have to go
                x = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < left, x, jnp.zeros_like(x))
                w = jnp.where(lax.broadcasted_iota(jnp.int32, w.shape, 0) < left, w, jnp.zeros_like(w))
            return jnp.dot(x, w, preferred_element_type=jnp.float32)

        @pl.when(t == 0)
        def _() -> None:
            total[part] = product()

        @pl.when(t > 0)
        def _() -> None:
            total[part] += product()

        @pl.when(t == last)
        def _() -> None:
            o_tile[part] = total[part].astype(o_tile.dtype)


def specs(tiles: Tiles) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """The blocks of x, w and the result, for a grid of (rows, columns, steps over k)."""
    return (
        pl.BlockSpec((tiles.m, tiles.k), lambda i, j, t: (i, t)),
        pl.BlockSpec((tiles.k, tiles.n), lambda i, j, t: (t, j)),
        pl.BlockSpec((tiles.m, tiles.n), lambda i, j, t: (i, j)),
    )


def grid(tiles: Tiles, m: int, k: int, n: int) -> tuple[int, int, int]:
    return pl.cdiv(m, tiles.m), pl.cdiv(n, tiles.n), pl.cdiv(k, tiles.k)


def cost(tiles: Tiles, m: int, k: int, n: int, itemsize: int, *, sent: int = 0, moved: int = 0) -> pl.CostEstimate:
    """Flops; bytes from and to HBM, x once for every column of tiles and w once for every row; bytes to others.

    Args:
      tiles: of the matmul.
      m, k, n: its sides.
      itemsize: bytes of an element.
      sent: bytes that leave for other devices.
      moved: bytes read or written in HBM beside the matmul's.
    """
    rows, columns, _ = grid(tiles, m, k, n)
    streamed = (m * k * columns + k * n * rows + m * n) * itemsize
    return pl.CostEstimate(
        flops=2 * m * k * n,
        transcendentals=0,
        bytes_accessed=streamed + moved,
        remote_bytes_transferred=sent,
    )
