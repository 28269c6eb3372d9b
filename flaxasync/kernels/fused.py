"""The gather and the matmul of LHS[M_X, K_Y] . RHS[K_X, N] on 2 x 2 devices as one kernel: the study's fused variant.

```
x  [m, k]   this mesh row's rows, this mesh column's half of the contraction
w  [k, n]   the half of the contraction that this mesh *row* holds
o  [m, n]   sums over this mesh column's half: to be added over the column axis
```

Each device sends its w to its neighbour on rows. Devices on the diagonal hold the w that they need and multiply while
it travels; the others begin when it is there. `overlapped` has neither wait; this one is kept for comparison.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.gemm import TILES, cost, stream
from flaxasync.kernels.neighbours import HBM, enter
from flaxasync.kernels.tiles import Tiles, vmem_limit
from flaxasync.transport.devices import at


def gather_gemm(
    x: jax.Array,
    w: jax.Array,
    axis_names: tuple[str, str] = ("x", "y"),
    *,
    tiles: Tiles = TILES,
    collective_id: int | None = None,
) -> jax.Array:
    """Returns o; see the file. Both axes have two devices; shapes are whole hardware tiles.

    Args:
      x: [m, k].
      w: [k, n].
      axis_names: of rows and of columns of the mesh.
      tiles: of a step.
      collective_id: of the entry barrier; by default one that no other kernel of the program has.

    Raises:
      ValueError: tiles that exceed vector memory.
    """
    (m, k), n = x.shape, w.shape[1]
    tiles = tiles.within(m, k, n)
    need = tiles.check("gather_gemm", x.dtype)
    rows, columns = axis_names

    def body(x_ref: Any, w_ref: Any, o_ref: Any, w_in: Any, send_sem: Any, recv_sem: Any, total: Any) -> None:
        neighbour = at(rows, 1)
        enter("gather_gemm", [neighbour], collective_id)
        diagonal = lax.axis_index(rows) == lax.axis_index(columns)
        send = pltpu.make_async_remote_copy(w_ref, w_in, send_sem, recv_sem, device_id=neighbour)
        send.start()
        pl.when(diagonal)(lambda: stream(x_ref, w_ref, o_ref, total, tiles=tiles))
        with jax.named_scope("wait"):
            send.wait()
        pl.when(jnp.logical_not(diagonal))(lambda: stream(x_ref, w_in, o_ref, total, tiles=tiles))

    sent = w.size * w.dtype.itemsize
    kind = jax.typeof(x).mat
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(s, x.dtype, manual_axis_type=kind) for s in ((m, n), w.shape)],
        in_specs=[HBM, HBM],
        out_specs=[HBM, HBM],
        scratch_shapes=[
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
            pltpu.VMEM((tiles.m, tiles.n), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, vmem_limit_bytes=vmem_limit(need)),
        cost_estimate=cost(tiles, m, k, n, x.dtype.itemsize, sent=sent, moved=2 * sent),
        name="fused",
    )(x, w)[0]
