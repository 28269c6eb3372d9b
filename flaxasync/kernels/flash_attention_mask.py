"""What the mask leaves of a tile of scores in the flash attention kernels, and vectors along
sublanes or lanes.
"""

import enum
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from flaxasync.kernels.attention_block import Product, Scores
from flaxasync.kernels.engine.operands import LANES, Ref, Scalar, when
from flaxasync.kernels.flash_attention_grid import Grid


class Part(enum.Enum):
    """What the mask leaves of a tile of scores."""

    WHOLE = "all rows attend to all"
    LOWER = "the lower triangle: a row attends to those up to itself"
    SOME = "what the positions say"


def where_reached(
    scores: Scores, grid: Grid, product: Product, at: Ref, add: Callable[[Part], None]
) -> None:
    """Adds the part of this step's tile that the mask leaves, if it leaves any."""
    if not product.masked:
        add(Part.WHOLE)
        return
    q, k = _starts(grid, at)
    tile = (q, grid.q_tile, k, grid.k_tile)
    mask = scores.mask
    if grid.has_triangles(mask, product):
        when(k < q, add, Part.WHOLE)
        when(k == q, add, Part.LOWER)
        return
    covers = mask.covers(*tile)
    when(covers, add, Part.WHOLE)
    when(mask.reaches(*tile) & jnp.logical_not(covers), add, Part.SOME)


def queries_of(grid: Grid, part: Part, rows: pl.Slice) -> slice:
    """Returns the rows of a tile of queries of which some attend to a sub-block of keys."""
    if part is Part.LOWER:
        return slice(rows.start, grid.q_tile)
    return slice(0, grid.q_tile)


def _starts(grid: Grid, at: Ref) -> tuple[Scalar, Scalar]:
    """Returns the positions in the sequence of the first rows of this step's tiles of queries and
    of keys.
    """
    return at[2] + pl.program_id(3) * grid.q_tile, at[3] + pl.program_id(4) * grid.k_tile


def allowed_part(
    scores: Scores,
    grid: Grid,
    part: Part,
    ids: Sequence[Ref],
    at: Ref,
    rows: pl.Slice,
    *,
    by_rows: bool,
) -> Array | None:
    """Returns which queries attend to which keys of a sub-block; None if all attend to all. `ids`
    are those of segments of queries and of keys, or nothing.

    The result is [rows, queries] if `by_rows`, else [queries, rows], for those queries that
    `queries_of` returns.
    """
    allowed = None
    queries = queries_of(grid, part, rows)
    count = queries.stop - queries.start
    k_count = int(rows.size)
    if by_rows:
        q_axis = 1
    else:
        q_axis = 0
    k_axis = 1 - q_axis
    if by_rows:
        shape = (k_count, count)
    else:
        shape = (count, k_count)
    if part is not Part.WHOLE:
        # on the diagonal both tiles have the same first row
        q: Scalar = 0
        k: Scalar = 0
        if part is Part.SOME:
            q, k = _starts(grid, at)
        q_rows = q + queries.start + lax.broadcasted_iota(jnp.int32, shape, q_axis)
        k_rows = k + rows.start + lax.broadcasted_iota(jnp.int32, shape, k_axis)
        allowed = scores.mask.allows(q_rows, k_rows)
    if ids:
        column = ids[0][:, queries]
        row = ids[1][:, rows]
        if by_rows:
            column, row = row, column
        same = widened(as_column(column), shape[1]) == jnp.broadcast_to(row, shape)
        if allowed is None:
            allowed = same
        else:
            allowed = allowed & same
    return allowed


def as_column(row: Array) -> Array:
    """Turns a vector along the lanes [1, n] into one along the sublanes with a copy in every lane,
    [n, LANES].
    """
    return jnp.swapaxes(jnp.broadcast_to(row, (LANES, row.shape[1])), 0, 1)


def as_row(column: Array) -> Array:
    """Turns a vector along the sublanes [n, LANES] into one along the lanes, [1, n]."""
    return jnp.swapaxes(column, 0, 1)[0:1]


def widened(column: Array, width: int) -> Array:
    """Widens [n, LANES], which has the same value in every lane, to [n, width]."""
    return jnp.tile(column, (1, pl.cdiv(width, LANES)))[:, :width]
