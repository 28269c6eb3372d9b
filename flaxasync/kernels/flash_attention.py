"""Attention between a block of queries and a block of keys as two Pallas TPU kernels: no scores
leave vector memory.

The forward kernel visits all tiles of keys and values for every tile of queries. The backward
kernel does the same and computes dq, dk and dv from one product of scores, with five matmuls for
each pair of tiles. The sums of dk and dv of up to `KV_ROWS` rows stay in vector memory throughout a
call; a longer block takes several calls.

Both kernels add to their arguments in place and touch only the rows of their product, so the carry
of a ring is written once for each product. Attention over whole sequences needs no carry: there the
kernels write results in the dtype of q. Tiles of keys that no row attends to are skipped, and tiles
to which all rows attend need no mask. In a causal product with square tiles the others lie on the
diagonal: there each sub-block of keys is multiplied only with the rows of queries from its own
first row on.

The forward kernel adds nothing up over heads or tiles of queries, so the cores of a device share
out whatever it visits. The backward kernel adds dk and dv up over the heads of a group: its cores
share out sequences or groups. Over whole sequences, if both are odd, they share out the heads of
each group, and their sums are added after the kernel.

The kernels have no soft cap and no dropout, and head sizes are multiples of 64 up to 256.

Source: Dao, "FlashAttention-2" (2023).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.attention_block import (
    LOG2_E,
    LOWEST,
    BlockOperands,
    Carry,
    Gradients,
    Product,
    Scores,
    Segments,
)
from flaxasync.kernels.engine.operands import LANES, DType, Ref, Scalar, largest_divisor, output
from flaxasync.kernels.engine.vector_memory import chip_in_use
from flaxasync.kernels.flash_attention_grid import Grid, is_triangle
from flaxasync.kernels.flash_attention_mask import (
    Part,
    allowed_part,
    as_column,
    as_row,
    queries_of,
    where_reached,
    widened,
)

# rows of whole sequences whose dk and dv stay in VMEM: 8 MiB of float32, and 8 MiB of results
WHOLE_ROWS = 8192
# rows whose dk and dv stay in VMEM: 4 MiB of float32 at head size 128, and 16 MiB with the copies
KV_ROWS = 4096
# elements of dk that a part of a group may have: dk and dv have two buffers of float32 each
PART_ELEMENTS = 2**20
VMEM_LIMIT = 64 * 2**20  # bytes; these kernels use less than half of them

_NT = (((1,), (1,)), ((), ()))  # x @ y.T
_TN = (((0,), (0,)), ((), ()))  # x.T @ y
_NN = (((1,), (0,)), ((), ()))

type Operands = list[tuple[Array, pl.BlockSpec]]


class _Form(NamedTuple):
    """What distinguishes the two kernels."""

    body: Callable[..., None]
    matmuls: int  # for each pair of tiles
    # whether heads and tiles of queries may be visited in any order
    heads: Literal["parallel", "arbitrary"]
    name: str


@dataclasses.dataclass(frozen=True)
class Flash:
    """The two kernels as a `BlockKernel`. Its sizes are the largest to use.

    The softmax of one sub-block runs beside the matmul of the next.
    """

    q_tile: int = 1024  # rows in a tile of q
    kv_tile: int = 2048  # rows in a tile of kv
    sub_block: int = 256  # rows of kv that are multiplied at once
    # rows in the square tiles of a triangle: forward, backward
    triangle_tiles: tuple[int, int] = (2048, 2048)

    def forward(self, operands: BlockOperands, product: Product, carry: Carry) -> Carry:
        scores, q, kv, segments = operands
        grid = self._grid(scores, q.shape, product, self.triangle_tiles[0])
        arrays = [(q, grid.queries()), (kv, grid.keys(0)), (kv, grid.keys(1))]
        updated = [(carry[0], grid.queries()), (carry[1], grid.statistics())]
        sums = [(grid.q_tile, LANES)] * 2
        return _call(
            FORWARD, scores, grid, arrays, segments, product, [product], sums, updated=updated
        )

    def attend_whole(
        self,
        scores: Scores,
        q: Array,
        k: Array,
        v: Array,
        segments: Segments,
        product: Product,
        head_size: int,
    ) -> tuple[Array, Array]:
        """Returns the output [b, s, n * g * d] of the only product, and log2 of the sum of 2**score
        [b, n, g, 1, s].

        q is [b, s, n * g * d], and k and v are [b, s, n * d], as projections return them.
        """
        grid = self._grid(scores, _heads(q, k, head_size), product, self.triangle_tiles[0])
        operands = [(q, grid.joined()), (k, grid.joined_keys()), (v, grid.joined_keys())]
        log_sum = output((*grid.shape[:3], 1, q.shape[1]), q, dtype=jnp.float32)
        results = [(output(q.shape, q), grid.joined()), (log_sum, grid.statistics(1))]
        sums = [(grid.q_tile, width) for width in (LANES, LANES, head_size)]
        return _call(
            FORWARD, scores, grid, operands, segments, product, [product], sums, results=results
        )

    def backward(
        self,
        operands: BlockOperands,
        do: Array,
        rows: Array,
        product: Product,
        gradients: Gradients,
    ) -> Gradients:
        scores, q, kv, segments = operands
        k_rows = largest_divisor(product.k_rows, KV_ROWS, LANES)
        count = product.k_rows // k_rows

        def part(index: Scalar) -> Product:
            return dataclasses.replace(
                product,
                k_block=product.k_block * count + index,
                k_rows=k_rows,
                k_start=product.k_start + index * k_rows,
            )

        def one_call(index: Scalar, gradients: Gradients) -> Gradients:
            every = [part(call) for call in range(count)]
            one = part(index)
            grid = self._grid(scores, q.shape, one, self.triangle_tiles[1])
            arrays = [(q, grid.queries()), (kv, grid.keys(0)), (kv, grid.keys(1))]
            arrays += [(do, grid.queries()), (rows, grid.statistics())]
            updated = [(gradients[0], grid.queries()), (gradients[1], grid.key_gradients())]
            return _call(BACKWARD, scores, grid, arrays, segments, one, every, (), updated=updated)

        if count == 1:
            return one_call(0, gradients)
        return lax.fori_loop(0, count, one_call, gradients)

    def differentiate_whole(
        self,
        scores: Scores,
        q: Array,
        k: Array,
        v: Array,
        segments: Segments,
        do: Array,
        out: Array,
        log_sum_exp: Array,
        product: Product,
        head_size: int,
    ) -> tuple[Array, Array, Array]:
        """Returns dq, dk and dv, as q, k and v, from what `attend_whole` returned and do [b, s, n *
        g * d].
        """
        heads = _heads(q, k, head_size)
        parts = _parts_of_groups(heads)
        grid = self._grid(scores, heads, product, self.triangle_tiles[1]).in_parts(parts)
        log_sum_exp = log_sum_exp.reshape(*grid.shape[:3], 1, -1)
        operands = [(q, grid.joined()), (k, grid.joined_keys()), (v, grid.joined_keys())]
        operands += [(do, grid.joined()), (out, grid.joined()), (log_sum_exp, grid.statistics(1))]
        sums = (grid.q_tile, head_size), (2, grid.k_rows, head_size), (2, grid.q_tile)
        if parts == 1:
            of_keys = [output(x.shape, x) for x in (k, v)]
        else:
            of_keys = [output((parts, *x.shape), x, dtype=jnp.float32) for x in (k, v)]
        results = [(output(q.shape, q), grid.joined())]
        results += [(of_key, grid.joined_key_gradients()) for of_key in of_keys]
        dq, dk, dv = _call(
            BACKWARD, scores, grid, operands, segments, product, [product], sums, results=results
        )
        if parts == 1:
            return dq, dk, dv
        return dq, _sum_of_parts(dk, k.dtype), _sum_of_parts(dv, v.dtype)

    def _grid(self, scores: Scores, heads: tuple[int, ...], product: Product, square: int) -> Grid:
        if product.masked and is_triangle(scores.mask):
            return Grid.of(heads, product, square, square, self.sub_block)
        return Grid.of(heads, product, self.q_tile, self.kv_tile, self.sub_block)


def unsupported(dtype: jnp.dtype, head_size: int, q_rows: int, k_rows: int) -> str | None:
    """Returns what the kernels accept, for an error message, if they do not accept such blocks;
    None if they do.
    """
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"float32 and bfloat16: got {dtype}"
    if head_size not in (64, 128, 192, 256):
        return f"head sizes 64, 128, 192 and 256: got {head_size}"
    for rows in (q_rows, k_rows):
        if rows % LANES:
            return f"chunks of a multiple of {LANES} rows: got {rows}"
    return None


def _call(
    form: _Form,
    scores: Scores,
    grid: Grid,
    operands: Operands,
    segments: Segments,
    product: Product,
    products: Sequence[Product],
    sums: Sequence[tuple[int, ...]],
    *,
    updated: Sequence[tuple[Array, pl.BlockSpec]] = (),
    results: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]] = (),
) -> Any:
    """Calls a kernel for one of `products`, which updates arrays in place, or returns results.

    `sums` are the shapes of what it adds up in vector memory. The ids of segments come last among
    the operands.
    """
    cost = grid.cost(
        scores.mask, products, matmuls=form.matmuls, itemsize=operands[0][0].dtype.itemsize
    )
    if segments is not None:
        of_queries, of_keys = (ids[:, None] for ids in segments)
        operands = [*operands, (of_queries, grid.ids_of_queries()), (of_keys, grid.ids_of_keys())]
    arrays, specs = zip(*operands, *updated, strict=True)
    shapes, result_specs = zip(
        *results, *((output(x.shape, x), spec) for x, spec in updated), strict=True
    )
    first = 1 + len(operands)  # operand 0 has the scalars
    return pl.pallas_call(
        functools.partial(form.body, scores, grid, product, bool(results)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.shape,
            in_specs=list(specs),
            out_specs=list(result_specs),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        out_shape=shapes,
        input_output_aliases={first + i: i for i in range(len(updated))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", form.heads, form.heads, "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=cost,
        name=form.name,
    )(grid.scalars(product), *arrays)


def _heads(q: Array, k: Array, head_size: int) -> tuple[int, ...]:
    """Returns (b, n, g, s, d) of q [b, s, n * g * d] and k [b, s, n * d]."""
    batch, rows, features = q.shape
    return batch, k.shape[-1] // head_size, features // k.shape[-1], rows, head_size


def _parts_of_groups(heads: tuple[int, ...]) -> int:
    """Returns in how many parts the heads of each group are visited for (b, n, g, s, d): as many as
    cores, if these cannot share out the sequences or the groups evenly, and vector memory has room.
    """
    batch, groups, of_group, rows, head_size = heads
    cores = chip_in_use().cores
    if batch % cores == 0 or groups % cores == 0 or of_group % cores:
        return 1
    if rows * head_size > PART_ELEMENTS:
        return 1
    return cores


def _sum_of_parts(sums: Array, dtype: DType) -> Array:
    """Returns the gradient of keys or of values [b, t, n * d] from those of each part."""
    return jnp.sum(sums, axis=0).astype(dtype)


def _forward_body(
    scores: Scores,
    grid: Grid,
    product: Product,
    is_whole: bool,
    at: Ref,
    *refs: Ref,
) -> None:
    """Body of the forward kernel: one tile of queries with one tile of keys and values.

    All refs are in VMEM: q and acc [q_tile, d], k and v [k_tile, d], segment ids [1, tile], stats
    [2, q_tile]. Between the first and the last tile of keys the maximum is kept in every lane of
    [q_tile, LANES]; the sum of the weights is kept as one partial sum in each lane.
    """
    if is_whole:
        # the operands, the results, and scratch memory
        q_ref, k_ref, v_ref, *ids, out, log_sum, highest_ref, weights_ref, acc = refs
    else:
        # the operands, those that are updated, these as results, and scratch memory
        q_ref, k_ref, v_ref, *ids, acc_in, stats_in, acc, stats, highest_ref, weights_ref = refs
    j = pl.program_id(4)

    @pl.when(j == 0)
    def begin() -> None:
        if is_whole:
            acc[...] = jnp.zeros_like(acc)
            weights_ref[...] = jnp.zeros_like(weights_ref)
            highest_ref[...] = jnp.full_like(highest_ref, LOWEST)
        else:
            acc[...] = acc_in[...]
            highest_ref[...] = as_column(stats_in[0:1])
            # every lane gets an equal share of the sum
            weights_ref[...] = as_column(stats_in[1:2]) / LANES

    def add(part: Part) -> None:
        for rows in grid.sub_blocks():
            queries = queries_of(grid, part, rows)
            with jax.named_scope("scores"):
                s = _dot(q_ref[queries], k_ref[rows], _NT, scores) * (scores.scale * LOG2_E)
                allowed = allowed_part(scores, grid, part, ids, at, rows, by_rows=False)
                if allowed is not None:
                    s = jnp.where(allowed, s, LOWEST)
            with jax.named_scope("softmax"):
                before = highest_ref[queries]
                highest = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
                p = jnp.exp2(s - widened(highest, rows.size))
                if allowed is not None and (ids or part is Part.SOME):
                    # where a whole row is masked, LOWEST is the maximum, and p would be 1
                    p = jnp.where(allowed, p, 0.0)
                shrink = jnp.exp2(before - highest)
                new = sum(p[:, lane : lane + LANES] for lane in range(0, rows.size, LANES))
                weights_ref[queries] = shrink * weights_ref[queries] + new
                highest_ref[queries] = highest
            with jax.named_scope("values"):
                v = v_ref[rows]
                sums = widened(shrink, grid.head_size) * acc[queries]
                acc[queries] = sums + _dot(p.astype(v.dtype), v, _NN, scores)

    where_reached(scores, grid, product, at, add)

    @pl.when(j == grid.k_tiles - 1)
    def end() -> None:
        if is_whole:
            weights = jnp.broadcast_to(
                jnp.sum(weights_ref[...], axis=1, keepdims=True), weights_ref.shape
            )
            out[...] = (acc[...] / widened(weights, grid.head_size)).astype(out.dtype)
            log_sum[...] = as_row(highest_ref[...] + jnp.log2(weights))
        else:
            stats[0:1] = as_row(highest_ref[...])
            lanes = jnp.swapaxes(weights_ref[...], 0, 1)
            stats[1:2] = jnp.sum(lanes, axis=0, keepdims=True)


def _backward_body(
    scores: Scores,
    grid: Grid,
    product: Product,
    is_whole: bool,
    at: Ref,
    *refs: Ref,
) -> None:
    """Body of the backward kernel: one tile of queries with one tile of keys and values.

    Beside the refs of the forward body: do and dq [q_tile, d], rows [2, q_tile] and dkv [2, k_rows,
    d], all in VMEM. Scores have the layout [k_tile, q_tile], because three of the four products
    that use them take them as they are.
    """
    if is_whole:
        (
            q_ref,
            k_ref,
            v_ref,
            do_ref,
            out_ref,
            log_sum,
            *ids,
            dq_out,
            dk_out,
            dv_out,
            dq,
            dkv,
            rows_ref,
        ) = refs
    else:
        q_ref, k_ref, v_ref, do_ref, rows_ref, *ids, dq_in, dkv_in, dq, dkv = refs
    g, i, j = (pl.program_id(axis) for axis in (2, 3, 4))

    @pl.when(j == 0)
    def begin_rows() -> None:
        if not is_whole:
            dq[...] = dq_in[...]
        else:
            dq[...] = jnp.zeros_like(dq)
            overlap = out_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
            rows_ref[0:1] = log_sum[...]
            rows_ref[1:2] = jnp.sum(jnp.swapaxes(overlap, 0, 1), axis=0, keepdims=True)

    @pl.when((g == 0) & (i == 0) & (j == 0))
    def begin_keys() -> None:
        if is_whole:
            dkv[...] = jnp.zeros_like(dkv)
        else:
            dkv[...] = dkv_in[...]

    def add(part: Part) -> None:
        first = pl.multiple_of(j * grid.k_tile, grid.k_tile)
        for rows in grid.sub_blocks():
            queries = queries_of(grid, part, rows)
            q = q_ref[queries]
            do = do_ref[queries]
            k = k_ref[rows]
            v = v_ref[rows]
            here = pl.ds(first + rows.start, rows.size)
            with jax.named_scope("scores"):
                s = _dot(k, q, _NT, scores) * (scores.scale * LOG2_E)
                p = jnp.exp2(s - rows_ref[0:1, queries])
                allowed = allowed_part(scores, grid, part, ids, at, rows, by_rows=True)
                if allowed is not None:
                    p = jnp.where(allowed, p, 0.0)
            with jax.named_scope("dv"):
                dkv[1, here] += _dot(p.astype(do.dtype), do, _NN, scores)
            with jax.named_scope("ds"):
                ds = (p * (_dot(v, do, _NT, scores) - rows_ref[1:2, queries])).astype(q.dtype)
            with jax.named_scope("dk"):
                dkv[0, here] += _dot(ds, q, _NN, scores)
            with jax.named_scope("dq"):
                dq[queries] += _dot(ds, k, _TN, scores)

    where_reached(scores, grid, product, at, add)
    if not is_whole:
        return

    @pl.when(j == grid.k_tiles - 1)
    def end_rows() -> None:
        dq_out[...] = (dq[...] * scores.scale).astype(dq_out.dtype)

    @pl.when((g == grid.heads - 1) & (i == grid.q_tiles - 1) & (j == grid.k_tiles - 1))
    def end_keys() -> None:
        dk_out[...] = (dkv[0] * scores.scale).astype(dk_out.dtype)
        dv_out[...] = dkv[1].astype(dv_out.dtype)


def _dot(x: Array, y: Array, contracting: lax.DotDimensionNumbers, scores: Scores) -> Array:
    return lax.dot_general(
        x, y, contracting, precision=scores.precision, preferred_element_type=jnp.float32
    )


FORWARD = _Form(_forward_body, 2, "parallel", "flash_attention")
BACKWARD = _Form(_backward_body, 5, "arbitrary", "flash_attention_backward")
