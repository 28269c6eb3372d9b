"""The weight gradients of `grouped_matmul` as one Pallas TPU kernel.

```
x     [M, K]       rows sorted by expert, in tiles of t rows as `grouped_matmul` takes them
dy_i  [M, N]       several share one reading of x
dw_i  [E, K, N]    float32, the sum of x[tile].T @ dy_i[tile] over the tiles of each expert; it can be added to others

grid   blocks of K   ->   blocks of N   ->   tiles
x            x                                 x       a block comes for each step
dy                             x               x
dw           x                 x                       stays in vector memory for all tiles of an expert
```
"""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.call import available, chip_in_use, vmem_limit
from flaxasync.kernels.engine.matmul import dot
from flaxasync.kernels.engine.operands import LANES, Ref, Scalar, Tiles, aligned, largest_divisor, output
from flaxasync.kernels.grouped_matmul import STEP_SECONDS, check_grouped, divisors

SUB_BLOCK = 512  # the sides of what is multiplied at once


def grouped_weight_gradient(
    x: Array,
    dys: Sequence[Array],
    experts: Array,
    tiles: Array,
    expert_count: int,
    *,
    tile_rows: int,
    initial: Sequence[Array] = (),
) -> tuple[Array, ...]:
    """Returns the gradients of weights [E, K, N] for each dy; see the head of this file.

    Args:
      x, dys: The operands; all dy have the same shape. Rows of padding must be zero in x or in dy.
      experts, tiles: The expert of each tile and the number of live tiles. Every expert has a live tile, or else its
        gradients are not written.
      expert_count: The number of experts, E.
      tile_rows: The rows of a tile, a multiple of 128.
      initial: What to add to, one float32 array [E, K, N] for each dy; the results take its memory. None by default.

    Raises:
      NotImplementedError: The kernel cannot serve such operands.
    """
    (m, k), n = x.shape, dys[0].shape[1]
    check_grouped("grouped_weight_gradient", x.dtype, tile_rows, k, n)
    blocks, vmem_bytes = _choose(x, dys, expert_count, tile_rows, len(initial))
    dw = pl.BlockSpec((None, blocks.k, blocks.n), lambda i, j, tile, experts: (experts[tile], i, j))
    like = output((expert_count, k, n), x, *dys, *initial).update(dtype=jnp.float32)

    def body(experts: Ref, x_tile: Ref, *refs: Ref) -> None:
        dy_tiles, old, new = refs[: len(dys)], refs[len(dys) : -len(dys)], refs[-len(dys) :]
        tile = pl.program_id(2)
        first = (tile == 0) | (experts[jnp.maximum(tile - 1, 0)] != experts[tile])
        pl.when(first)(lambda: _add(x_tile, dy_tiles, new, old or None))
        pl.when(jnp.logical_not(first))(lambda: _add(x_tile, dy_tiles, new, new))

    return tuple(
        pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(k // blocks.k, n // blocks.n, tiles),
                in_specs=[
                    pl.BlockSpec((tile_rows, blocks.k), lambda i, j, tile, experts: (tile, i)),
                    *[pl.BlockSpec((tile_rows, blocks.n), lambda i, j, tile, experts: (tile, j))] * len(dys),
                    *[dw] * len(initial),
                ],
                out_specs=[dw] * len(dys),
            ),
            out_shape=[like] * len(dys),
            input_output_aliases={2 + len(dys) + i: i for i in range(len(initial))},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit(vmem_bytes)
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * m * k * n * len(dys),
                transcendentals=0,
                bytes_accessed=x.dtype.itemsize * m * (k * n // blocks.n + len(dys) * n * k // blocks.k)
                + 4 * expert_count * k * n * (len(dys) + len(initial)),
            ),
            name="grouped_weight_gradient",
        )(experts, x, *dys, *initial)
    )


def _add(x_tile: Ref, dy_tiles: Sequence[Ref], sums: Sequence[Ref], terms: Sequence[Ref] | None) -> None:
    """Stores x.T @ dy plus a term, if there is one, as each sum [k, n] in vector memory."""
    (_, k), n = x_tile.shape, dy_tiles[0].shape[1]
    height, width = (largest_divisor(side, SUB_BLOCK, LANES) for side in (k, n))

    @pl.loop(0, k // height)
    def on_rows(i: Scalar) -> None:
        rows = aligned(i * height, height, LANES)
        x_transposed = x_tile[:, rows].T  # once for all columns

        @pl.loop(0, n // width)
        def on_columns(j: Scalar) -> None:
            here = rows, aligned(j * width, width, LANES)
            for number, dy in enumerate(dy_tiles):
                value = dot(x_transposed, dy[:, here[1]])
                sums[number][here] = value if terms is None else terms[number][here] + value


def _choose(x: Array, dys: Sequence[Array], experts: int, rows: int, initial: int) -> tuple[Tiles, int]:
    """Returns the blocks that are the fastest of those that fit into vector memory, and what they take of it."""
    (m, k), n, itemsize, chip = x.shape, dys[0].shape[1], x.dtype.itemsize, chip_in_use()
    bandwidth = chip.hbm_bandwidth * chip.hbm_efficiency

    def vmem_bytes(tiles: Tiles) -> int:
        streamed = itemsize * rows * (tiles.k + len(dys) * tiles.n)
        return 2 * streamed + 4 * tiles.k * tiles.n * (2 * len(dys) + 2 * initial) + 4 * SUB_BLOCK**2

    def seconds(tiles: Tiles) -> float:
        streamed = itemsize * m * (k * (n // tiles.n) + len(dys) * n * (k // tiles.k))
        stored = 4 * experts * k * n * (len(dys) + initial)
        last = 4 * len(dys) * tiles.k * tiles.n  # nothing is multiplied meanwhile
        steps = (k // tiles.k) * (n // tiles.n) * (m // rows)
        moving = max((streamed + stored) / bandwidth, 2 * m * k * n * len(dys) / chip.flops)
        return moving + last / bandwidth + steps * STEP_SECONDS

    choices = [Tiles(rows, *sides) for sides in itertools.product(divisors(k), divisors(n))]
    best = min((tiles for tiles in choices if vmem_bytes(tiles) <= available()), key=seconds)
    return best, vmem_bytes(best)
