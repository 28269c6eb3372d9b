"""What the overlapped kernel holds: its buffers in vector memory and its semaphores."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.tiles import Tiles
from flaxasync.kernels.walk import Walk

KEPT = 2  # finished tiles of the own rows that may be leaving at once


def scratch_bytes(tiles: Tiles, rows: int, dtype: Any) -> int:
    """Bytes of vector memory: two tiles of x and of w; a float32 sum for each tile of a group; what leaves or comes."""
    size, out = jnp.dtype(dtype).itemsize, tiles.m * tiles.n
    return size * (2 * tiles.m * tiles.k + 2 * tiles.k * tiles.n + (rows + KEPT + 1) * out) + 4 * rows * out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Refs, inside the kernel; shapes, where it is called. Sides in brackets are those of tiles."""

    x: Any  # [2, m, k] tiles of x, this step's and the next one's
    w: Any  # [2, k, n] tiles of w, likewise
    total: Any  # [rows, m, n] float32 sums
    given: Any  # [rows, m, n] sums that leave
    kept: Any  # [KEPT, m, n] tiles of the result that leave
    added: Any  # [m, n] sums that the neighbour gave
    x_sem: Any  # [2]
    w_sem: Any  # [2]
    added_sem: Any
    w_send: Any
    w_recv: Any  # [chunks, depth]
    given_send: Any  # [rows]
    given_recv: Any  # [chunks * groups, rows]
    kept_store: Any  # [KEPT]
    kept_send: Any  # [KEPT]
    kept_recv: Any

    @classmethod
    def shapes(cls, tiles: Tiles, walk: Walk, dtype: Any) -> Any:
        """What to allocate: the same names, with shapes and memory spaces."""
        dma, out = pltpu.SemaphoreType.DMA, (tiles.m, tiles.n)
        return cls(
            pltpu.VMEM((2, tiles.m, tiles.k), dtype),
            pltpu.VMEM((2, tiles.k, tiles.n), dtype),
            pltpu.VMEM((walk.rows, *out), jnp.float32),
            pltpu.VMEM((walk.rows, *out), dtype),
            pltpu.VMEM((KEPT, *out), dtype),
            pltpu.VMEM(out, dtype),
            dma((2,)),
            dma((2,)),
            dma,
            dma,
            dma((walk.chunks, walk.depth)),
            dma((walk.rows,)),
            dma((walk.chunks * walk.groups, walk.rows)),
            dma((KEPT,)),
            dma((KEPT,)),
            dma,
        )
