"""What the overlapped kernel holds: its buffers in vector memory, its tables in scalar memory, its semaphores."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.mesh.pieces import Pieces
from flaxasync.kernels.mesh.walk import Walk
from flaxasync.kernels.tiles import Tiles

KEPT = 2  # finished tiles of the own rows that may be leaving at once


def scratch_bytes(tiles: Tiles, rows: int, dtype: Any, *, gives: bool = True) -> int:
    """Bytes of vector memory: two tiles of x and of w; a float32 sum for each tile of a group; what leaves or comes."""
    size, out = jnp.dtype(dtype).itemsize, tiles.m * tiles.n
    leaving = KEPT + (rows + 1 if gives else 0)
    return size * (2 * tiles.m * tiles.k + 2 * tiles.k * tiles.n + leaving * out) + 4 * rows * out


def arrivals(walk: Walk, pieces: Pieces) -> int:
    """Semaphores for what comes: each piece of w, each tile of sums, each tile of the result at each hop."""
    weights = walk.chunks * walk.depth if pieces.size > 1 else 0
    return weights + 2 * (walk.phases - 1) * walk.rounds * walk.rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Refs, inside the kernel; shapes, where it is called. Sides in brackets are those of tiles."""

    x: Any  # [2, m, k] tiles of x, this step's and the next one's
    w: Any  # [2, k, n] tiles of w, likewise
    total: Any  # [rows, m, n] float32 sums
    kept: Any  # [KEPT, m, n] tiles of the result that leave
    given: Any  # [rows, m, n] sums that leave; None where there is nobody to give to
    added: Any  # [m, n] sums that the neighbour gave; likewise
    order: Any  # pieces of w in the order of their use
    due: Any  # pieces of the next chunk in the order in which they are sent on; None where they are when they are used
    x_sem: Any  # [2]
    w_sem: Any  # [2]
    added_sem: Any
    w_send: Any
    w_recv: Any  # [chunks, depth]
    given_send: Any  # [rows]
    given_recv: Any  # [(phases - 1) * rounds, rows]
    kept_store: Any  # [KEPT]
    kept_send: Any  # [KEPT]
    kept_again: Any  # what is sent on of the result
    kept_recv: Any  # [(phases - 1) * rounds, rows]

    @classmethod
    def shapes(cls, tiles: Tiles, walk: Walk, pieces: Pieces, events: int, dtype: Any) -> Any:
        """What to allocate: the same names, with shapes and memory spaces."""
        dma, out = pltpu.SemaphoreType.DMA, (tiles.m, tiles.n)
        gives = walk.phases > 1
        comes = dma(((walk.phases - 1) * walk.rounds, walk.rows)) if gives else None
        return cls(
            pltpu.VMEM((2, tiles.m, tiles.k), dtype),
            pltpu.VMEM((2, tiles.k, tiles.n), dtype),
            pltpu.VMEM((walk.rows, *out), jnp.float32),
            pltpu.VMEM((KEPT, *out), dtype),
            pltpu.VMEM((walk.rows, *out), dtype) if gives else None,
            pltpu.VMEM(out, dtype) if gives else None,
            pltpu.SMEM(pieces.table, jnp.int32),
            pltpu.SMEM((events,), jnp.int32) if events else None,
            dma((2,)),
            dma((2,)),
            dma if gives else None,
            dma if pieces.size > 1 else None,
            dma((walk.chunks, walk.depth)) if pieces.size > 1 else None,
            dma((walk.rows,)) if gives else None,
            comes,
            dma((KEPT,)),
            dma((KEPT,)) if gives else None,
            dma if walk.phases > 2 else None,
            comes,
        )
