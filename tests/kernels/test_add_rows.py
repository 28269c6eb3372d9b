"""Rows that are added to the rows which an index names, beside NumPy, in JAX's TPU interpreter on a
CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels.add_rows import add_rows
from tests.kernels.conftest import assert_close, draw
from tests.simulator.split_pairs import quick_callbacks

ROWS, N = 128, 32  # of a tile, and of the result


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_adds_scaled_rows_of_live_tiles(dtype):
    values, scale = draw((3 * ROWS, 256), dtype), draw((3, ROWS), seed=1)
    scaled = scale.reshape(-1, 1) * values.astype(np.float32)
    call = jax.jit(lambda values, rows, scale, tiles: add_rows(values, rows, scale, tiles, n=N))
    for tiles in (2, 0):
        # N: a row of padding
        rows = np.random.default_rng(2).integers(0, N + 1, (3, ROWS)).astype(np.int32)
        rows[max(tiles, 1) :] = -(2**30)  # what dead tiles say is not read
        if not tiles:
            rows[0] = N
        with pltpu.force_tpu_interpret_mode(), quick_callbacks():
            y = np.asarray(call(values, rows, scale, np.int32(tiles)), np.float32)
        wanted = np.zeros((N + 1, 256), np.float32)
        live = slice(0, tiles * ROWS)
        np.add.at(wanted, rows.reshape(-1)[live], scaled[live])
        assert_close(y, wanted[:N], dtype)


def test_refuses_what_the_kernel_lacks():
    with pytest.raises(
        NotImplementedError, match="in multiples of 128, and rows in multiples of 8"
    ):
        add_rows(
            jnp.zeros((ROWS, 100)),
            jnp.zeros((1, ROWS), jnp.int32),
            jnp.zeros((1, ROWS)),
            jnp.int32(1),
            n=N,
        )
    with pytest.raises(NotImplementedError, match="kernels for float32 and bfloat16"):
        add_rows(
            jnp.zeros((ROWS, 128), jnp.float16),
            jnp.zeros((1, ROWS), jnp.int32),
            jnp.zeros((1, ROWS)),
            1,
            n=N,
        )
