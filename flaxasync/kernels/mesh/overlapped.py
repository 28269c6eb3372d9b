"""LHS[M_X, K_Y] . RHS[K_X, N] on X x Y devices as one kernel in which every transfer hides behind a product.

```
x  [m, k]   this mesh row's rows, this mesh column's part of the contraction        m = M/X, k = K/Y
w  [k', n]  the part of the contraction that this mesh *row* holds                  k' = K/X
o  [m, n]   this mesh row's rows of the product, the same in all mesh columns
```

A device multiplies its rows with the k rows of RHS of its mesh column. `pieces` says from which mesh rows they come,
and in which order they are used. It owns one of Y parts of its m rows: it adds up the others' sums on their way around
the mesh row, keeps the finished part, and sends it around. `walk` has the order of all steps. Three streams run beside
the products: pieces of w around the mesh column (`weights`); sums, then results, around the mesh row (`sums`).

```
                  round 0                                    round 1
core              give for c-1   give for c-2  ...  keep     give for c-1   give for c-2  ...
around the column pieces of w, as long as it takes: those of round 1 while round 0 is multiplied
around the row                   sums           sums  ...    results        results, again    ...
```

No buffer is written twice from outside, so nothing is acknowledged: pieces, sums and results have a place each.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.cut import Cut
from flaxasync.kernels.gemm import cost
from flaxasync.kernels.mesh.pieces import Pieces, check_unit, enter_column
from flaxasync.kernels.mesh.scratch import Scratch, arrivals, scratch_bytes
from flaxasync.kernels.mesh.sums import Sums
from flaxasync.kernels.mesh.walk import Place, Walk
from flaxasync.kernels.mesh.weights import Weights, events
from flaxasync.kernels.neighbours import HBM, toward, type_over
from flaxasync.kernels.tiles import (
    LANES,
    RESERVED,
    Tiles,
    check_vmem,
    chip_in_use,
    fitting,
    largest_side,
    sublanes,
    vmem_limit,
)

TILES = Tiles()
GROUP = 4096  # rows whose sums stay in vector memory, at most
SEMAPHORES = 400  # that may be used for what arrives: a kernel has 512, of which libtpu 0.0.52 leaves 436 to 440


def overlapped(
    x: jax.Array,
    w: jax.Array,
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    tiles: Tiles | None = None,
    directions: int | None = None,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns o; see the file. One axis at least has two devices or more; shapes are whole hardware tiles.

    Args:
      x: [m, k].
      w: [k', n].
      axis_names: of rows and of columns of the mesh.
      tiles: of a step, at most; those used divide m/Y and what divides both k and k'; the last chunk of columns may be
        narrower. None is `TILES`, or what the chip's vector memory has room for.
      directions: 1, or 2 to send half of everything the other way around axes of more than two devices; None is 2
        where rows can be halved.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: tiles that exceed vector memory; rows or a contraction that cannot be cut.
      NotImplementedError: more tiles than there are semaphores.
    """
    plan = _plan(x, w, axis_names, tiles, directions)
    walk, pieces, tiles = plan.walk, plan.pieces, plan.tiles
    (m, k), n, size = x.shape, w.shape[1], x.dtype.itemsize
    kind = type_over(x, axis_names[1])
    unused = (sublanes(x.dtype), LANES)  # an output has a size
    comes = (k, n) if pieces.size > 1 else unused
    sums = (m - m // walk.phases, n) if walk.phases > 1 else unused
    sent = (k * n * (pieces.size > 1) + 2 * math.prod(sums) * (walk.phases > 1)) * size
    return pl.pallas_call(
        functools.partial(_kernel, plan, collective_id),
        out_shape=[jax.ShapeDtypeStruct(s, x.dtype, manual_axis_type=kind) for s in ((m, n), comes, sums)],
        in_specs=[HBM, HBM],
        out_specs=[HBM, HBM, HBM],
        scratch_shapes=[Scratch.shapes(tiles, walk, pieces, events(walk, pieces), x.dtype)],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=vmem_limit(plan.need)),
        cost_estimate=cost(tiles, m, k, n, size, sent=sent, moved=sent),
        name="overlapped_mesh_matmul",
    )(x, w)[0]


@dataclasses.dataclass(frozen=True)
class _Plan:
    axis_names: tuple[str, str]
    walk: Walk
    pieces: Pieces
    tiles: Tiles
    columns: Cut  # in chunks
    ways: int  # around a mesh row
    need: int  # bytes of vector memory


def check_overlapped(x: jax.Array, w: jax.Array, axis_names: tuple[str, str], *, directions: int | None = None) -> bool:
    """Returns True; raises as `overlapped` would for these operands."""
    return bool(_plan(x, w, axis_names, None, directions))


def _plan(
    x: jax.Array, w: jax.Array, axis_names: tuple[str, str], tiles: Tiles | None, directions: int | None
) -> _Plan:
    """Cuts the operands, or says why it cannot."""
    (m, k), (held, n) = x.shape, w.shape
    size, phases = (lax.axis_size(name) for name in axis_names)
    unit, rows, part = check_unit("overlapped", axis_names, k, held), sublanes(x.dtype), m // phases
    ways = 2 if phases > 2 and directions != 1 and part % (2 * rows) == 0 else 1
    if directions == 2 and phases > 2 and ways == 1:
        raise ValueError(
            f"overlapped sends half of the rows each way around {axis_names[1]!r}: got {m} rows of {x.dtype}, needed a "
            f"multiple of {phases * 2 * rows}; use directions=1"
        )

    def cut(most: Tiles) -> Tiles:
        return Tiles(
            largest_side(part, most.m, rows * ways), largest_side(unit, most.k, LANES), Cut.of((n,), most.n).size
        )

    def need(used: Tiles, group: int | None = None) -> int:
        return scratch_bytes(used, (group or used.m) // used.m, x.dtype, gives=phases > 1)

    used = fitting(tiles, TILES, cut, need)
    groups = [used.m * g for g in range(max(1, GROUP // used.m), 0, -1) if part % (used.m * g) == 0]
    limit = chip_in_use().vmem_bytes - RESERVED
    group = next((g for g in groups if need(used, g) <= limit), used.m)
    columns = Cut((n,), used.n, LANES)
    walk = Walk(columns.count, part // group, group // used.m, k // used.k, phases)
    pieces = Pieces(axis_names, size, used.k, walk.depth, held // used.k, 2 if size > 2 and directions != 1 else 1)
    if arrivals(walk, pieces) > SEMAPHORES:
        raise NotImplementedError(
            f"overlapped has a semaphore for each piece that arrives, and a TPU has {SEMAPHORES} for them: "
            f"x {list(x.shape)} and w {list(w.shape)} in tiles of m={used.m}, k={used.k}, n={used.n} are "
            f"{arrivals(walk, pieces)} pieces; use larger tiles, a loop over columns of w, or backend='serial'"
        )
    needed = check_vmem("overlapped", used, lambda t: need(t, group // used.m * t.m))
    return _Plan(axis_names, walk, pieces, used, columns, ways, needed)


def _kernel(
    plan: _Plan,
    collective_id: int | None,
    x_ref: Any,  # [m, k] HBM
    w_ref: Any,  # [k', n] HBM
    o_ref: Any,  # [m, n] HBM
    w_in: Any,  # [k, n] HBM: the pieces of w that come from others
    sums_in: Any,  # [(Y-1)*m/Y, n] HBM: what the neighbour gave, phase by phase
    scratch: Scratch,
) -> None:
    body = _Body(plan, x_ref, w_ref, o_ref, w_in, sums_in, scratch)
    row = [toward(plan.axis_names[1], 1 - way) for way in range(plan.ways)] if plan.walk.phases > 1 else []
    enter_column(f"overlapped {plan.ways}", plan.pieces, collective_id, row)
    body.weights.begin()
    body.fetch(plan.walk.at(0), 0)
    pl.loop(0, plan.walk.steps)(body.step)
    with jax.named_scope("finish"):
        body.sums.finish()
        body.weights.finish()


class _Body:
    """What one device does, step by step."""

    def __init__(self, plan: _Plan, x: Any, w: Any, o: Any, w_in: Any, sums_in: Any, scratch: Scratch) -> None:
        self.walk, self.columns, self.scratch = plan.walk, plan.columns, scratch
        self.weights = Weights(plan.walk, plan.pieces, plan.columns, w, w_in, scratch)
        self.sums = Sums(plan.axis_names[1], plan.ways, plan.walk, plan.columns, x, o, sums_in, scratch)

    def step(self, s: Any) -> None:
        """Fetches for the next step, multiplies, and lets go what is finished."""
        here, walk = self.walk.at(s), self.walk
        slot = lax.rem(s, 2)
        pl.when(s + 1 < walk.steps)(lambda: self.fetch(walk.at(s + 1), 1 - slot))
        begins = (here.phase == 0) & (here.position == 0) & (here.group == 0)
        ahead = here.chunk + self.weights.ahead
        pl.when(begins & (ahead < walk.chunks))(lambda: self.weights.send(ahead))
        self.weights.send_on(here)
        self.sums.send_on(here)
        last, keeps = here.t == walk.depth - 1, here.phase == walk.phases - 1
        if walk.phases > 1:
            pl.when(last & (here.phase > 0))(lambda: self.sums.fetch(here))
        with jax.named_scope("wait"):
            self.sums.wait_rows(slot)
            self.weights.wait(here)
        with jax.named_scope("multiply"):
            self.columns.sized(here.chunk, functools.partial(self.multiply, here, slot))
        if walk.phases > 1:
            pl.when(last & jnp.logical_not(keeps))(lambda: self.sums.give(here))
        pl.when(last & keeps)(lambda: self.sums.keep(here))

    def multiply(self, here: Place, slot: Any, n: int) -> None:
        """The product of two tiles, n columns of it, is the sum, or is added to it."""
        total, columns = jnp.where(here.outer, here.i, 0), slice(0, n)
        x_tile, w_tile = self.scratch.x.at[slot], self.scratch.w.at[here.w_slot]

        def product() -> jax.Array:
            return jnp.dot(x_tile[...], w_tile[:, columns], preferred_element_type=jnp.float32)

        @pl.when(here.t == 0)
        def _() -> None:
            self.scratch.total[total, :, columns] = product()

        @pl.when(here.t > 0)
        def _() -> None:
            self.scratch.total[total, :, columns] += product()

    def fetch(self, place: Place, slot: Any) -> None:
        """Starts the copies of a step's tiles; of w where it is another one."""
        with jax.named_scope("fetch"):
            piece = self.weights.pieces.needed_rows(self.weights.piece(place))
            self.sums.fetch_rows(place, piece, slot)
            self.weights.fetch(place)
