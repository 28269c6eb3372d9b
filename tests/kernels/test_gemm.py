"""The matmul kernel: values with partial tiles; what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxasync.kernels import gemm as module
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.gemm import gemm
from tests.kernels.conftest import simulated

TILES = Tiles(32, 128, 128)


def operands(m, k, n, dtype):
    x, w = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(m, k), (k, n)]))
    return x.astype(jnp.dtype(dtype)), w.astype(jnp.dtype(dtype))


def parity(form, shape, dtype):
    x, w = operands(*shape, dtype)
    with simulated((1,), ("x",)):
        o = np.asarray(jax.jit(form)(x, w), np.float32)
    want = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    # float32: order of the additions; bfloat16: rounding of the result
    np.testing.assert_allclose(o, want, rtol=1e-5 if dtype == "float32" else 2e-2, atol=1e-4 * np.abs(want).max())


CASES = [
    ((64, 256, 128), Tiles(32, 128, 128), "float32"),
    ((80, 640, 384), Tiles(32, 256, 256), "float32"),  # no side divides
    ((48, 384, 256), Tiles(32, 256, 128), "bfloat16"),
]


@pytest.mark.parametrize(("shape", "tiles", "dtype"), CASES)
def test_values(shape, tiles, dtype):
    parity(functools.partial(gemm, tiles=tiles), shape, dtype)


def test_a_missing_mask_is_seen(monkeypatch):
    """The twin of the partial tiles: beyond k the simulator's memory is NaN."""
    step = module.step
    monkeypatch.setattr(module, "step", lambda *args, depth: step(*args, depth=512))
    with pytest.raises(AssertionError, match="nan location mismatch"):
        parity(lambda x, w: gemm(x, w, tiles=Tiles(32, 256, 128)), (32, 384, 128), "float32")


@pytest.mark.parametrize(("x", "w", "tiles", "error", "message"), [
    ((64, 256), (128, 128), TILES, ValueError, r"x \[m, k\] and w \[k, n\] of one dtype"),
    ((60, 256), (256, 128), TILES, ValueError, r"\[multiple of 8, multiple of 128\] for float32: got \[60, 256\]"),
    ((64, 256), (256, 100), TILES, ValueError, r"needs w in whole hardware tiles.*got \[256, 100\]"),
    ((8192, 8192), (8192, 8192), Tiles(4096, 2048, 4096), ValueError,
     r"take 3\d\d\.\d MiB.* a v5e has 120 MiB to give; the largest of this form are m=2048, k=\d+, n=\d+"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_numbers(x, w, tiles, error, message):
    with simulated((1,), ("x",)), pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(gemm, tiles=tiles), *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (x, w)))


def test_other_dtypes_are_refused():
    x = np.zeros((64, 256), np.float16)
    with pytest.raises(NotImplementedError, match="kernels for float32 and bfloat16: got x of float16"):
        gemm(x, x.T)


def test_tiles_of_no_size_are_refused():
    with pytest.raises(ValueError, match="positive sides: got m=0"):
        Tiles(0, 128, 128)
