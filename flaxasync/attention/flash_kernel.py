"""The block product of `ops.attention.blocks` and its gradient as two Pallas TPU kernels: no scores leave VMEM.

The forward kernel visits, for every tile of q, all tiles of kv. The backward kernel does the same and makes dq, dk and
dv from one product of scores: five matmuls a tile. The sums of dk and dv of `KV_ROWS` rows stay in VMEM meanwhile;
longer blocks take several calls.

Both add to what they are given, in place, and touch only the rows of their product: the carry of a ring is written
once a product. Tiles that no row attends to are skipped.

Not done: no soft cap, no dropout, head sizes other than multiples of 64 up to 256.

Source: Dao, "FlashAttention-2" (2023).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.attention.flash_grid import LANES, Grid, largest_tile
from flaxasync.ops.attention.blocks import LOG2_E, LOWEST, Carry, Gradients, Scores, Segments
from flaxasync.ops.attention.layouts import Product

KV_ROWS = 4096  # rows whose dk and dv stay in VMEM: 4 MiB of float32 at head size 128, four times that with its copies
VMEM_LIMIT = 64 * 2**20  # bytes; what these kernels use is less than half of it

_NT = (((1,), (1,)), ((), ()))  # x @ y.T
_TN = (((0,), (0,)), ((), ()))  # x.T @ y
_NN = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Flash:
    """The kernels, with their tiles.

    Attributes:
      q_tile: rows of q in a tile, at most.
      kv_tile: rows of kv in a tile, at most.
      part: rows of kv that are multiplied at once, at most: the softmax of one part runs beside the matmul of the next.
    """

    q_tile: int = 1024
    kv_tile: int = 2048
    part: int = 512
    name: str = "flash"

    def forward(self, scores: Scores, q: Array, kv: Array, segments: Segments, product: Product, carry: Carry) -> Carry:
        grid = Grid.of(q, kv, product, self.q_tile, self.kv_tile, self.part)
        acc, stats = carry
        operands: list[Array] = [q, kv, kv]
        specs = [grid.queries(), grid.keys(0), grid.keys(1)]
        if segments is not None:
            operands += [segments[0][:, None], segments[1][:, None]]
            specs += [grid.ids_of_queries(), grid.ids_of_keys()]
        first = 1 + len(operands)
        body = functools.partial(_forward_body, scores, grid, product.masked, segments is not None)
        return tuple(
            pl.pallas_call(
                body,
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=grid.shape,
                    in_specs=[*specs, grid.sums(), grid.statistics()],
                    out_specs=[grid.sums(), grid.statistics()],
                    scratch_shapes=[pltpu.VMEM((grid.q_tile, LANES), jnp.float32)] * 2,
                ),
                out_shape=[jax.ShapeDtypeStruct.like(acc), jax.ShapeDtypeStruct.like(stats)],
                input_output_aliases={first: 0, first + 1: 1},
                compiler_params=_compiler_params("parallel"),
                cost_estimate=grid.cost(scores.mask, product, matmuls=2, q=q, bytes_per_row=8),
                name="flash_attention",
            )(grid.scalars(product), *operands, acc, stats)
        )

    def backward(
        self,
        scores: Scores,
        q: Array,
        kv: Array,
        segments: Segments,
        do: Array,
        rows: Array,
        product: Product,
        gradients: Gradients,
    ) -> Gradients:
        part = largest_tile(product.k_rows, KV_ROWS)

        def of_part(index: Any, gradients: Gradients) -> Gradients:
            some = dataclasses.replace(
                product,
                k_block=product.k_block * (product.k_rows // part) + index,
                k_rows=part,
                k_start=product.k_start + index * part,
            )
            return self._backward_of_part(scores, q, kv, segments, do, rows, some, gradients)

        count = product.k_rows // part
        return of_part(0, gradients) if count == 1 else lax.fori_loop(0, count, of_part, gradients)

    def _backward_of_part(
        self,
        scores: Scores,
        q: Array,
        kv: Array,
        segments: Segments,
        do: Array,
        rows: Array,
        product: Product,
        gradients: Gradients,
    ) -> Gradients:
        grid = Grid.of(q, kv, product, self.q_tile, self.kv_tile, self.part)
        dq, dkv = gradients
        operands: list[Array] = [q, kv, kv, do, rows]
        specs = [grid.queries(), grid.keys(0), grid.keys(1), grid.queries(), grid.statistics()]
        if segments is not None:
            operands += [segments[0][:, None], segments[1][:, None]]
            specs += [grid.ids_of_queries(), grid.ids_of_keys()]
        first = 1 + len(operands)
        body = functools.partial(_backward_body, scores, grid, product.masked, segments is not None)
        return tuple(
            pl.pallas_call(
                body,
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=grid.shape,
                    in_specs=[*specs, grid.sums(), grid.key_gradients()],
                    out_specs=[grid.sums(), grid.key_gradients()],
                ),
                out_shape=[jax.ShapeDtypeStruct.like(dq), jax.ShapeDtypeStruct.like(dkv)],
                input_output_aliases={first: 0, first + 1: 1},
                compiler_params=_compiler_params("arbitrary"),
                cost_estimate=grid.cost(scores.mask, product, matmuls=5, q=q, bytes_per_row=8),
                name="flash_attention_backward",
            )(grid.scalars(product), *operands, dq, dkv)
        )


def unsupported(dtype: jnp.dtype, head_size: int, q_rows: int, k_rows: int) -> str | None:
    """What the kernels take, and not such blocks; None where they take these."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"float32 and bfloat16: got {dtype}"
    if head_size not in (64, 128, 192, 256):
        return f"head sizes 64, 128, 192 and 256: got {head_size}"
    for rows in (q_rows, k_rows):
        if rows % LANES:
            return f"chunks of a multiple of {LANES} rows: got {rows}"
    return None


def _forward_body(scores: Scores, grid: Grid, masked: bool, by_segment: bool, at: Any, *refs: Any) -> None:
    """q and sums [q_tile, d], k and v [k_tile, d], ids [1, tile], statistics [2, q_tile], all in VMEM.

    Meanwhile the maximum stands in every lane of [q_tile, LANES], and the sum as one over the lanes.
    """
    q_ref, k_ref, v_ref, *ids, acc_in, stats_in, acc, stats, highest_ref, total_ref = refs
    j = pl.program_id(4)

    @pl.when(j == 0)
    def begin() -> None:
        acc[...] = acc_in[...]
        highest_ref[...], total_ref[...] = _column(stats_in[0:1]), _column(stats_in[1:2]) / LANES

    def add() -> None:
        q, highest, total, sums = q_ref[...], highest_ref[...], total_ref[...], acc[...]
        for rows in grid.parts():
            with jax.named_scope("scores"):
                s = _dot(q, k_ref[rows], _NT, scores) * (scores.scale * LOG2_E)
                allowed = _allowed(scores, grid, masked, ids if by_segment else None, at, rows, by_rows=False)
                if allowed is not None:
                    s = jnp.where(allowed, s, LOWEST)
            with jax.named_scope("softmax"):
                before, highest = highest, jnp.maximum(highest, jnp.max(s, axis=1, keepdims=True))
                p = jnp.exp2(s - _widened(highest, rows.size))
                if allowed is not None:  # where a whole row is masked, LOWEST is the maximum
                    p = jnp.where(allowed, p, 0.0)
                shrink = jnp.exp2(before - highest)
                total = shrink * total + sum(p[:, lane : lane + LANES] for lane in range(0, rows.size, LANES))
            with jax.named_scope("values"):
                v = v_ref[rows]
                sums = _widened(shrink, grid.head_size) * sums + _dot(p.astype(v.dtype), v, _NN, scores)
        highest_ref[...], total_ref[...], acc[...] = highest, total, sums

    _where_reached(scores, grid, masked, at, add)

    @pl.when(j == grid.k_tiles - 1)
    def end() -> None:
        stats[0:1] = _row(highest_ref[...])
        stats[1:2] = jnp.sum(jnp.swapaxes(total_ref[...], 0, 1), axis=0, keepdims=True)


def _backward_body(scores: Scores, grid: Grid, masked: bool, by_segment: bool, at: Any, *refs: Any) -> None:
    """As the forward body; do and dq [q_tile, d], rows [2, q_tile], dkv [2, k_rows, d], all in VMEM.

    Scores stand as [k_tile, q_tile]: three of the four products with them then take them as they are.
    """
    q_ref, k_ref, v_ref, do_ref, rows_ref, *ids, dq_in, dkv_in, dq, dkv = refs
    g, i, j = (pl.program_id(axis) for axis in (2, 3, 4))

    @pl.when(j == 0)
    def begin_rows() -> None:
        dq[...] = dq_in[...]

    @pl.when((g == 0) & (i == 0) & (j == 0))
    def begin_keys() -> None:
        dkv[...] = dkv_in[...]

    def add() -> None:
        q, do, sums = q_ref[...], do_ref[...], dq[...]
        first = pl.multiple_of(j * grid.k_tile, grid.k_tile)
        for rows in grid.parts():
            k, v, here = k_ref[rows], v_ref[rows], pl.ds(first + rows.start, rows.size)
            with jax.named_scope("scores"):
                s = _dot(k, q, _NT, scores) * (scores.scale * LOG2_E)
                p = jnp.exp2(s - rows_ref[0:1])
                allowed = _allowed(scores, grid, masked, ids if by_segment else None, at, rows, by_rows=True)
                if allowed is not None:
                    p = jnp.where(allowed, p, 0.0)
            with jax.named_scope("dv"):
                dkv[1, here] += _dot(p.astype(do.dtype), do, _NN, scores)
            with jax.named_scope("ds"):
                ds = (p * (_dot(v, do, _NT, scores) - rows_ref[1:2])).astype(q.dtype)
            with jax.named_scope("dk"):
                dkv[0, here] += _dot(ds, q, _NN, scores)
            with jax.named_scope("dq"):
                sums += _dot(ds, k, _TN, scores)
        dq[...] = sums

    _where_reached(scores, grid, masked, at, add)


def _where_reached(scores: Scores, grid: Grid, masked: bool, at: Any, add: Any) -> None:
    if not masked:
        add()
        return
    q, k = _starts(grid, at)
    pl.when(scores.mask.reaches(q, grid.q_tile, k, grid.k_tile))(add)


def _starts(grid: Grid, at: Any) -> tuple[Any, Any]:
    """Positions of the first rows of the tiles of this step."""
    return at[2] + pl.program_id(3) * grid.q_tile, at[3] + pl.program_id(4) * grid.k_tile


def _allowed(
    scores: Scores, grid: Grid, masked: bool, ids: list[Any] | None, at: Any, rows: Any, *, by_rows: bool
) -> Any:
    """Which rows attend to which of a part of the tile of kv: [rows, q_tile] or [q_tile, rows]; None where all do."""
    allowed, (q_axis, k_axis) = None, (1, 0) if by_rows else (0, 1)
    shape = (rows.size, grid.q_tile) if by_rows else (grid.q_tile, rows.size)
    if masked:
        q, k = _starts(grid, at)
        q_rows = q + lax.broadcasted_iota(jnp.int32, shape, q_axis)
        k_rows = k + rows.start + lax.broadcasted_iota(jnp.int32, shape, k_axis)
        allowed = scores.mask.allows(q_rows, k_rows)
    if ids is not None:
        q_ids, k_ids = ids[0][...], ids[1][:, rows]
        column, row = (k_ids, q_ids) if by_rows else (q_ids, k_ids)
        same = _widened(_column(column), shape[1]) == jnp.broadcast_to(row, shape)
        allowed = same if allowed is None else allowed & same
    return allowed


def _column(row: Any) -> Any:
    """A vector along the lanes [1, n] as one along the sublanes, a copy in every lane: [n, LANES]."""
    return jnp.swapaxes(jnp.broadcast_to(row, (LANES, row.shape[1])), 0, 1)


def _row(column: Any) -> Any:
    """The reverse of `_column`."""
    return jnp.swapaxes(column, 0, 1)[0:1]


def _widened(column: Any, width: int) -> Any:
    """[n, LANES] with the same value in every lane, as [n, width]."""
    return jnp.tile(column, (1, width // LANES)) if width % LANES == 0 else column[:, :width]


def _dot(x: Any, y: Any, contracting: Any, scores: Scores) -> Any:
    return lax.dot_general(x, y, contracting, precision=scores.precision, preferred_element_type=jnp.float32)


def _compiler_params(of_heads: Any) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", of_heads, of_heads, "arbitrary"),
        vmem_limit_bytes=VMEM_LIMIT,
    )
