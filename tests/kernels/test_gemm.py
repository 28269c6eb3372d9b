"""The matmul kernel: values with partial tiles; what is refused."""

import functools

import jax
import pytest

from flaxasync.kernels import gemm as module
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.gemm import gemm
from tests.kernels.conftest import as_float32, assert_close, draw, simulated


def parity(form, shape, dtype):
    m, k, n = shape
    x, w = draw((m, k), dtype), draw((k, n), dtype, 1)
    with simulated((1,), ("x",)):
        o = as_float32(jax.jit(form)(x, w))
    assert_close(o, as_float32(x) @ as_float32(w), dtype)


@pytest.mark.parametrize(("shape", "tiles", "dtype"), [
    ((64, 256, 128), Tiles(32, 128, 128), "float32"),
    ((80, 640, 384), Tiles(32, 256, 256), "float32"),  # no side divides
    ((48, 384, 256), Tiles(32, 256, 128), "bfloat16"),
])  # fmt: skip
def test_values(shape, tiles, dtype):
    parity(functools.partial(gemm, tiles=tiles), shape, dtype)


def test_a_missing_mask_is_seen(monkeypatch):
    """Negative test of the partial tiles: beyond k the simulator's memory is NaN."""
    step = module.step
    monkeypatch.setattr(module, "step", lambda *args, depth: step(*args, depth=512))
    with pytest.raises(AssertionError, match="nan location mismatch"):
        parity(lambda x, w: gemm(x, w, tiles=Tiles(32, 256, 128)), (32, 384, 128), "float32")


def test_tiles_of_no_size_are_refused():
    with pytest.raises(ValueError, match="positive sides: got m=0"):
        Tiles(0, 128, 128)
