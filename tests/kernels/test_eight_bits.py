"""The fused kernels on 8-bit values with scales, in several tiles of every dimension, against
NumPy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flaxasync.kernels.all_gather_matmul import all_gather_matmul
from flaxasync.kernels.engine import beside
from flaxasync.kernels.engine.beside import WeightGradient
from flaxasync.kernels.engine.matmul import Scales
from flaxasync.kernels.engine.operands import Tiles
from flaxasync.kernels.engine.slots import IncomingTiles
from flaxasync.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from flaxasync.kernels.weight_gradient import gather_weight_gradient
from tests.kernels.conftest import run

TILES = Tiles(32, 128, 128)
SIZE, BATCH, ROWS, K, N = 2, 2, 64, 256, 256
RING = {"shape": (SIZE,), "names": ("model",), "mode": "eager"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unawaited(IncomingTiles):
    def wait(self, *_):
        pass


def draw(rng, shape, dtype):
    values = rng.integers(-127, 128, shape) if dtype == jnp.int8 else rng.normal(size=shape)
    return np.asarray(values).astype(dtype)


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "transposed", "cores"),
    [(jnp.int8, True, 1), (jnp.float8_e4m3fn, False, 1), (jnp.int8, False, 2)],
)
def test_gathered_values_are_multiplied_and_scaled(dtype, transposed, cores):
    rng = np.random.default_rng(0)
    x, of_rows = (
        draw(rng, (BATCH, SIZE * ROWS, K), dtype),
        rng.random((BATCH, SIZE * ROWS), np.float32),
    )
    ws = [draw(rng, (n, K) if transposed else (K, n), dtype) for n in (SIZE * N, SIZE * 128)]
    of_columns = [rng.random(n, np.float32) for n in (SIZE * N, SIZE * 128)]

    def local(x, ws, of_rows, of_columns):
        return all_gather_matmul(
            x, ws, "model", transposed=transposed, keep_gathered=True, scales=(of_rows, of_columns),
            result=jnp.bfloat16, tiles=TILES, cores=cores,
        )  # fmt: skip

    columns = P("model") if transposed else P(None, "model")
    in_specs = P(None, "model"), columns, P(), P("model")
    out_specs = (P(None, None, "model"),) * 2, P(None, None, "model")
    operands = x, ws, of_rows, of_columns
    ys, gathered = run(local, operands, in_specs, out_specs, **RING, cores=cores)
    for y, w, scale in zip(ys, ws, of_columns, strict=True):
        sums = wide(x) @ (wide(w).T if transposed else wide(w))
        np.testing.assert_allclose(
            wide(y), sums * of_rows[..., None] * scale, rtol=2**-8, atol=1e-3
        )
    np.testing.assert_array_equal(wide(gathered), np.concatenate([wide(x)] * SIZE, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int8])
@pytest.mark.parametrize("cores", [1, 2])
def test_scaled_sums_are_reduced(dtype, cores):
    rng = np.random.default_rng(1)
    x, w = draw(rng, (BATCH, SIZE * ROWS, SIZE * K), dtype), draw(rng, (SIZE * K, N), dtype)
    of_rows = rng.random((SIZE, BATCH, SIZE * ROWS), np.float32)
    of_columns = rng.random((SIZE, N), np.float32)

    def local(x, w, of_rows, of_columns):
        scales = of_rows[0], of_columns[0]
        return matmul_reduce_scatter(
            (x,), (w,), "model", scales=scales, result=jnp.float32, tiles=TILES, cores=cores
        )[0]

    in_specs = P(None, None, "model"), P("model"), P("model"), P("model")
    operands = x, w, of_rows, of_columns
    y = run(local, operands, in_specs, P(None, "model"), **RING, cores=cores)
    xs, ws = np.split(wide(x), SIZE, -1), np.split(wide(w), SIZE)
    want = sum(
        (a @ b) * rows[..., None] * columns
        for a, b, rows, columns in zip(xs, ws, of_rows, of_columns, strict=True)
    )
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (jnp.int8, jnp.int8, "eager", 1),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, "on_wait", 1),
        (jnp.bfloat16, jnp.bfloat16, "on_wait", 1),
        (jnp.int8, jnp.int8, "eager", 2),
    ],
)
def test_weight_gradients_are_computed_beside_the_sums(monkeypatch, case):
    """Two of them between the steps of a product in bfloat16: several tiles of each side, padded,
    in two sub-blocks.
    """
    of_x, of_y, mode, cores = case
    monkeypatch.setattr(beside, "TILES", Tiles(256, 128, 256))
    monkeypatch.setattr(beside, "SUB_BLOCK", 128)
    rng = np.random.default_rng(3)
    x, w = (
        draw(rng, shape, jnp.bfloat16) for shape in [(1, SIZE * ROWS, SIZE * 128), (SIZE * 128, N)]
    )
    sides = [(SIZE * 300, SIZE * 128), (SIZE * 256, SIZE * 360)]  # of all devices
    pairs = [(draw(rng, (320, k), of_x), draw(rng, (320, n), of_y)) for k, n in sides]
    scaled = jnp.dtype(of_x).itemsize == 1
    scales = [
        (rng.random(a.shape[1], np.float32), rng.random(b.shape[1], np.float32)) for a, b in pairs
    ]

    def local(x, w, pairs, scales):
        given = [
            WeightGradient(*pair, one if scaled else None)
            for pair, one in zip(pairs, scales, strict=True)
        ]
        return matmul_reduce_scatter(
            (x,), (w,), "model", result=jnp.float32, gradients=given, tiles=TILES, cores=cores
        )

    in_specs = P(None, None, "model"), P("model"), P(None, "model"), P("model")
    out_specs = P(None, "model"), P("model"), P("model")
    ring = RING | {"mode": mode, "cores": cores}
    y, *dws = run(local, (x, w, pairs, scales), in_specs, out_specs, **ring)
    np.testing.assert_allclose(y, wide(x) @ wide(w), rtol=1e-4, atol=1e-2)
    for dw, pair, of_pair in zip(dws, pairs, scales, strict=True):
        a, b, of_a, of_b = (np.split(wide(side), SIZE, -1) for side in (*pair, *of_pair))
        wants = [a[i].T @ b[i] * (of_a[i][:, None] * of_b[i] if scaled else 1) for i in range(SIZE)]
        np.testing.assert_allclose(
            dw, np.concatenate(wants), rtol=1e-5, atol=1e-5 * np.abs(wants).max()
        )


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_the_sums_of_a_weight_gradient_are_scaled(cores):
    dtype = of_dy = jnp.int8
    rng = np.random.default_rng(2)
    x, of_x = draw(rng, (BATCH, SIZE * ROWS, K), dtype), rng.random(K, np.float32)
    dys = [draw(rng, (BATCH, SIZE * ROWS, SIZE * n), of_dy) for n in (N, 128)]
    of_dys = [rng.random(SIZE * n, np.float32) for n in (N, 128)]

    def local(x, dys, of_x, of_dys):
        scales = of_x, of_dys
        tiles = Tiles(128, 128, 128)
        return gather_weight_gradient(
            x, tuple(dys), "model", scales=scales, result=jnp.float32, tiles=tiles, cores=cores
        )

    in_specs = P(None, "model"), P(None, None, "model"), P(), P("model")
    out_specs = (P(None, "model"),) * 2
    dws = run(local, (x, dys, of_x, of_dys), in_specs, out_specs, **RING, cores=cores)
    for dw, dy, scale in zip(dws, dys, of_dys, strict=True):
        want = np.einsum("bmk,bmn->kn", wide(x), wide(dy)) * of_x[:, None] * scale
        np.testing.assert_allclose(dw, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
def test_a_tile_that_is_not_waited_for_is_seen_beside_the_sums(monkeypatch):
    """The negative test: it is read while it is written."""
    monkeypatch.setattr(beside, "IncomingTiles", Unawaited)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        test_weight_gradients_are_computed_beside_the_sums(
            monkeypatch, (jnp.int8, jnp.int8, "eager", 1)
        )


@pytest.mark.slow
def test_scales_that_are_not_waited_for_are_seen(monkeypatch):
    """The negative test: sums are multiplied with scales that have not arrived."""
    monkeypatch.setattr(Scales, "wait", lambda *_: None)
    monkeypatch.setitem(RING, "mode", "on_wait")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_scaled_sums_are_reduced(jnp.int8, cores=1)
