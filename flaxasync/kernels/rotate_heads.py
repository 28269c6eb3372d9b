"""Rotates the heads of projections by their rotary positions, as a Pallas TPU kernel.

```
x, y      [b, s, h * d]    heads side by side, as projections return them and attention reads them
cos, sin  [s, d / 2]       float32

y of a head = x * [cos, cos] + [second half of x, first half of x] * [-sin, sin]
```

XLA turns rows of heads side by side into other layouts to rotate them, and back, by copies that
take longer than this.
"""

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.engine.operands import DTYPES, LANES, Ref, largest_divisor, output, sublanes

ROWS = 512  # of a tile, at most
FEATURES = 1024  # of a tile, at most: it has 1 MiB in bfloat16


def unsupported(x: Array, head_size: int) -> bool:
    """Says whether the kernel cannot rotate heads of such rows [b, s, h * d]."""
    return (
        head_size % LANES != 0
        or x.dtype.name not in DTYPES
        or x.shape[1] % sublanes(x.dtype) != 0
        or x.size == 0
    )


def rotate_heads(x: Array, cos: Array, sin: Array) -> Array:
    """Returns the rotated heads, in the dtype of x; see the head of this file."""
    batch, rows, features = x.shape
    d = 2 * cos.shape[-1]
    row_tile = largest_divisor(rows, ROWS, sublanes(x.dtype))
    width = largest_divisor(features, max(FEATURES, d), d)
    of_heads = pl.BlockSpec((None, row_tile, width), lambda i, b, j: (b, i, j))
    of_angles = pl.BlockSpec((row_tile, d), lambda i, b, j: (i, 0))
    return pl.pallas_call(
        _body,
        out_shape=output(x.shape, x, cos, sin),
        # the angles of the same rows are read once
        grid=(rows // row_tile, batch, features // width),
        in_specs=[of_heads, of_angles, of_angles],
        out_specs=of_heads,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=3 * x.size, transcendentals=0, bytes_accessed=2 * x.size * x.dtype.itemsize
        ),
        name="rotate_heads",
    )(x, jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1))


def _body(x_ref: Ref, cos_ref: Ref, sin_ref: Ref, y_ref: Ref) -> None:
    d = cos_ref.shape[-1]
    for start in range(0, x_ref.shape[-1], d):
        head = pl.ds(start, d)
        x = x_ref[:, head].astype(jnp.float32)
        turned = x * cos_ref[...] + pltpu.roll(x, d // 2, 1) * sin_ref[...]
        y_ref[:, head] = turned.astype(y_ref.dtype)
