"""The grouped products beside NumPy, in JAX's TPU interpreter on a CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from flaxasync.kernels import grouped_matmul as kernel
from flaxasync.kernels.grouped_matmul import Blocks, grouped_matmul, grouped_sum
from tests.kernels.conftest import as_float32, assert_close, draw
from tests.simulator.split_pairs import quick_callbacks

ROWS = 128
EXPERTS = np.array([0, 0, 0, 1, 2, 2, 0, 0], np.int32)  # of each tile; the last two are not live
TILES, COUNT = 6, 3
K, N = 256, 384


@pytest.fixture(autouse=True)
def interpreter():
    with pltpu.force_tpu_interpret_mode(), quick_callbacks():
        yield


def rows(features, dtype="float32", seed=0):
    """Draws sorted rows: the second expert has padding only, the last rows of the third are padding."""
    x = draw((len(EXPERTS) * ROWS, features), dtype, seed)
    x[3 * ROWS : 4 * ROWS] = 0
    x[TILES * ROWS - 50 : TILES * ROWS] = 0
    x[TILES * ROWS :] = np.nan
    return x


def live(y):
    return as_float32(y)[: TILES * ROWS]


def product(x, w):
    x, w = as_float32((x, w))
    return np.concatenate([x[i * ROWS : (i + 1) * ROWS] @ w[EXPERTS[i]] for i in range(TILES)])


def compute(fn, *arguments, **options):
    call = jax.jit(lambda experts, tiles: fn(*arguments, experts, tiles, tile_rows=ROWS, **options))
    return call(EXPERTS, np.int32(TILES))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_matmul(dtype):
    x, ws = rows(K, dtype), tuple(draw((COUNT, K, N), dtype, seed) for seed in (1, 2))
    for y, w in zip(compute(grouped_matmul, x, ws), ws, strict=True):
        assert y.dtype == dtype
        assert_close(live(y), product(x, w), dtype)
