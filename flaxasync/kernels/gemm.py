"""x [m, k] @ w [k, n] as a Pallas TPU kernel: tiles stream from HBM, float32 sums stay in vector
memory.

Tiles need not divide the operands: the last tile of k is multiplied with its own size, and Pallas
neither reads nor writes beyond m and n.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.matmul import accumulate, dot
from flaxasync.kernels.engine.operands import Ref, Tiles, output
from flaxasync.kernels.engine.tiling import SUB_BLOCK, Tiling
from flaxasync.kernels.engine.vector_memory import check_vmem, matmul_bytes, vmem_limit

TILES = Tiles(512, 1024, 1024)


def gemm(x: jax.Array, w: jax.Array, *, tiles: Tiles = TILES) -> jax.Array:
    """Multiplies in one kernel. Sums are float32, the result has x's dtype."""
    m, k = x.shape
    n = w.shape[1]
    tiles = tiles.within(m, k, n)

    def need(t: Tiles) -> int:
        return matmul_bytes(t, x.dtype, results=2, sums=1)

    vmem_bytes = check_vmem("gemm", tiles, need)
    x_spec, w_spec, o_spec = specs(tiles)
    return pl.pallas_call(
        lambda *refs: step(*refs, depth=k),
        out_shape=output((m, n), x),
        grid=grid(tiles, m, k, n),
        in_specs=[x_spec, w_spec],
        out_specs=o_spec,
        scratch_shapes=[pltpu.VMEM((tiles.m, tiles.n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(vmem_bytes),
        ),
        cost_estimate=cost(tiles, m, k, n, x.dtype.itemsize),
        name="gemm",
    )(x, w)


def step(
    x_tile: Ref,  # [m, k] VMEM
    w_tile: Ref,  # [k, n] VMEM
    o_tile: Ref,  # [m, n] VMEM, written in the last step of its sum
    accumulator: Ref,  # [m, n] VMEM, float32
    *,
    depth: int,  # k of the whole operands
) -> None:
    """Does one step of the grid, a tile of x times a tile of w."""
    t = pl.program_id(2)
    last = pl.num_programs(2) - 1
    m, k = x_tile.shape
    n = w_tile.shape[1]
    rows = Tiling.in_sub_blocks(m, m, SUB_BLOCK, 8 * 4 // x_tile.dtype.itemsize)

    def product(depth: int, index: tuple[pl.Slice, slice]) -> jax.Array:
        return dot(x_tile[index[0], :depth], w_tile[:depth, :])

    def finish(value: jax.Array, index: tuple[pl.Slice, slice]) -> None:
        o_tile[index] = value.astype(o_tile.dtype)

    def for_each_sub_block(use: Callable[..., None]) -> None:
        def on_rows(index: pl.Slice) -> None:
            use((index, slice(0, n)))

        rows.for_each_sub_block(0, on_rows)

    accumulate(
        Tiling((depth,), k),
        t,
        first=t == 0,
        last=t == last,
        accumulator=accumulator,
        for_each_sub_block=for_each_sub_block,
        product=product,
        finish=finish,
    )


def specs(tiles: Tiles) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Returns the blocks of x, w and the result, for a grid of (rows, columns, steps over k)."""
    return (
        pl.BlockSpec((tiles.m, tiles.k), lambda i, j, t: (i, t)),
        pl.BlockSpec((tiles.k, tiles.n), lambda i, j, t: (t, j)),
        pl.BlockSpec((tiles.m, tiles.n), lambda i, j, t: (i, j)),
    )


def grid(tiles: Tiles, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Returns the grid of (rows, columns, steps over k)."""
    return pl.cdiv(m, tiles.m), pl.cdiv(n, tiles.n), pl.cdiv(k, tiles.k)


def cost(tiles: Tiles, m: int, k: int, n: int, itemsize: int) -> pl.CostEstimate:
    """Returns the cost of a matmul. It reads x once for every column of tiles, and w once for every
    row of tiles.
    """
    rows, columns, _ = grid(tiles, m, k, n)
    streamed = (m * k * columns + k * n * rows + m * n) * itemsize
    return pl.CostEstimate(flops=2 * m * k * n, transcendentals=0, bytes_accessed=streamed)
