"""The gather and the matmul of LHS[M_X, K_Y] . RHS[K_X, N] as one kernel: the study's fused variant, on any mesh.

```
x  [m, k]   this mesh row's rows, this mesh column's part of the contraction
w  [k', n]  the part of the contraction that this mesh *row* holds
o  [m, n]   sums over this mesh column's part: to be added over the column axis
```

The rows of RHS that a mesh column needs go around it in pieces (`pieces` has from whom, and in which order). A device
multiplies its own pieces while they travel, then each other one when it is there, and adds it to o. On 2 x 2 devices
that is one piece: those on the diagonal own it and multiply at once, the others begin when it is there. `overlapped`
has no such wait; this one is kept for comparison. Between pieces the sums lie in o, rounded to x's dtype.

Beyond one hop a piece is cut, so that its next hop begins before all of it has come. Every piece has a place of its own
at every device, and every cut a semaphore: nothing is acknowledged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.gemm import TILES, cost, grid, specs, step, stream, vmem_bytes
from flaxasync.kernels.mesh.pieces import Pieces, check_unit, enter_column
from flaxasync.kernels.neighbours import HBM
from flaxasync.kernels.tiles import LANES, Tiles, check_vmem, largest_side, sublanes, vmem_limit

CUTS = 8  # of a piece that goes on, about


def gather_gemm(
    x: jax.Array,
    w: jax.Array,
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    tiles: Tiles = TILES,
    directions: int | None = None,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns o; see the file. The mesh has two rows or more; shapes are whole hardware tiles.

    Args:
      x: [m, k].
      w: [k', n].
      axis_names: of rows and of columns of the mesh.
      tiles: of a step.
      directions: 1, or 2 to send every other piece the other way around a column of more than two devices; None is 2
        where pieces can be halved.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: tiles that exceed vector memory; a contraction that cannot be cut.
    """
    (m, k), (held, n) = x.shape, w.shape
    size = lax.axis_size(axis_names[0])
    unit = check_unit("gather_gemm", axis_names, k, held)
    ways = 2 if size > 2 and directions != 1 and unit % (2 * LANES) == 0 else 1
    rows = unit // ways
    pieces = Pieces(axis_names, size, rows, k // rows, held // rows, ways)
    tiles = tiles.within(m, rows, n)
    extra = 0 if pieces.depth == 1 else 2  # tiles of o that are read
    need = check_vmem("gather_gemm", tiles, lambda t: vmem_bytes(t, x.dtype) + extra * t.m * t.n * x.dtype.itemsize)
    cut = rows if size == 2 else largest_side(rows, max(rows // CUTS, sublanes(x.dtype)), sublanes(x.dtype))
    moved = k * n * x.dtype.itemsize
    kind = jax.typeof(x).mat
    return pl.pallas_call(
        functools.partial(_kernel, pieces, tiles, cut, collective_id),
        out_shape=[jax.ShapeDtypeStruct(s, x.dtype, manual_axis_type=kind) for s in ((m, n), (k, n))],
        in_specs=[HBM, HBM],
        out_specs=[HBM, HBM],
        scratch_shapes=[
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((pieces.depth, rows // cut)),
            pltpu.SMEM(pieces.table, jnp.int32),
            pltpu.VMEM((tiles.m, tiles.n), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=vmem_limit(need)),
        cost_estimate=cost(tiles, m, k, n, x.dtype.itemsize, sent=moved, moved=2 * moved),
        name="fused",
    )(x, w)[0]


def _kernel(
    pieces: Pieces,
    tiles: Tiles,
    cut: int,
    collective_id: int | None,
    x_ref: Any,  # [m, k] HBM
    w_ref: Any,  # [k', n] HBM
    o_ref: Any,  # [m, n] HBM
    w_in: Any,  # [k, n] HBM: the pieces that come from others
    send_sem: Any,
    recv_sem: Any,  # [depth, cuts]
    order: Any,  # SMEM: pieces in the order of their use
    total: Any,  # [tiles.m, tiles.n] VMEM, float32
) -> None:
    cuts = range(pieces.rows // cut)
    everywhere = slice(None)

    def hop(t: Any, i: int, source: Any = None) -> Any:
        part = pl.ds(i * cut, cut), everywhere
        there = w_in.at[pieces.needed_rows(t), :].at[part]
        source = there if source is None else source.at[part]
        return pltpu.make_async_remote_copy(source, there, send_sem, recv_sem.at[t, i], device_id=pieces.to(t))

    def held(t: Any) -> Any:
        return w_ref.at[pieces.held_rows(t), :]

    def multiply(q: Any, t: Any, source: Any) -> None:
        if pieces.depth == 1:
            stream(x_ref, source, o_ref, total, tiles=tiles)
        else:
            _add(q > 0, x_ref.at[:, pieces.needed_rows(t)], source, o_ref, total, tiles)

    enter_column("gather_gemm", pieces, collective_id)
    pieces.sort(order)

    @pl.loop(0, pieces.depth)
    def _(t: Any) -> None:
        @pl.when(pieces.own(t))
        def _() -> None:
            for i in cuts:
                hop(t, i, held(t)).start()

    @pl.loop(0, pieces.depth)
    def _(q: Any) -> None:
        t = order[q]
        pl.when(pieces.own(t))(lambda: multiply(q, t, held(t)))

        @pl.when(jnp.logical_not(pieces.own(t)))
        def _() -> None:
            with jax.named_scope("wait"):
                for i in cuts:
                    hop(t, i).wait_recv()
                    pl.when(pieces.goes_on(t))(hop(t, i).start)
            multiply(q, t, w_in.at[pieces.needed_rows(t), :])

    with jax.named_scope("finish"):

        @pl.loop(0, pieces.depth)
        def _(t: Any) -> None:
            @pl.when(pieces.goes_on(t))
            def _() -> None:
                for i in cuts:
                    hop(t, i).wait_send()


def _add(later: Any, x_ref: Any, w_ref: Any, o_ref: Any, total: Any, tiles: Tiles) -> None:
    """o = x @ w, or o += x @ w if it is a later piece."""
    (m, k), n = x_ref.shape, w_ref.shape[1]
    x_spec, w_spec, o_spec = specs(tiles)

    def body(x_tile: Any, w_tile: Any, before: Any, o_tile: Any) -> None:
        def add(value: Any, rows: Any) -> Any:
            return value + jnp.where(later, before[rows, :].astype(jnp.float32), 0.0)

        step(x_tile, w_tile, o_tile, total, depth=k, add=add)

    with jax.named_scope("multiply"):
        specs_in = [x_spec, w_spec, o_spec]
        pltpu.emit_pipeline(body, grid=grid(tiles, m, k, n), in_specs=specs_in, out_specs=[o_spec])(
            x_ref, w_ref, o_ref, o_ref
        )
