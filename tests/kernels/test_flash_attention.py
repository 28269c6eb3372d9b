"""The Pallas kernels beside the reference, in JAX's TPU interpreter on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import flaxasync as fa
from flaxasync.kernels import flash_attention
from flaxasync.kernels.attention_block import Mask, Product, Scores
from flaxasync.kernels.flash_attention import Flash, unsupported
from flaxasync.ops.attention.blocks import Reference, finish, initial_carry
from tests.kernels.conftest import as_float32, draw
from tests.simulator.split_pairs import quick_callbacks

ROWS, HEAD = 256, 64


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(flash_attention, "KV_ROWS", 128)  # two calls
    with pltpu.force_tpu_interpret_mode(), quick_callbacks():
        yield


def blocks(window, by_segment, q_rows, *, kernel):
    """Carry and gradients of one causal product by one kernel."""
    heads, mask = (1, 1, 2, ROWS, HEAD), Mask(True, window)
    q, do, kv = draw(heads), draw(heads, seed=1), draw((2, 1, 1, ROWS, HEAD), seed=2)
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (1, ROWS)), axis=1).astype(np.int32)
    scores = Scores(mask, HEAD**-0.5, jax.lax.Precision.HIGHEST)
    # The second run of q where it is a half: rows before it stay as they are.
    product = Product(ROWS // q_rows - 1, q_rows, ROWS - q_rows, 0, ROWS, 0, mask.by_position, None)

    @jax.jit
    def both(q, kv, ids, do, sums):
        segments = (ids, ids) if by_segment else None
        carry = kernel.forward(scores, q, kv, segments, product, initial_carry(q))
        log_sum = jnp.nan_to_num(finish(carry, jnp.float32)[1], neginf=0.0, posinf=0.0)
        rows = jnp.stack([log_sum, sums], axis=-2)
        zeros = initial_carry(q)[0], jnp.zeros(kv.shape, jnp.float32)
        return *carry, *kernel.backward(scores, q, kv, segments, do, rows, product, zeros)

    return as_float32(both(q, kv, ids, do, draw((1, 1, 2, ROWS), seed=3)))


@pytest.mark.parametrize(("window", "segments", "q_rows", "square"), [
    (100, True, 128, 128),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (None, False, 256, 128), (None, False, 256, 256), (None, True, 256, 256), (200, False, 256, 128),
    ]),
])  # fmt: skip
def test_they_give_what_the_reference_gives(window, segments, q_rows, square, monkeypatch):
    """With square tiles, those on the diagonal are multiplied as triangles; tiles of 256 rows have two sub-blocks."""
    monkeypatch.setattr(flash_attention, "KV_ROWS", square)
    kernel = Flash(q_tile=128, kv_tile=256, triangle_tiles=(square, square), sub_block=128)
    both = (blocks(window, segments, q_rows, kernel=kernel) for kernel in (kernel, Reference()))
    for name, got, want in zip(("acc", "stats", "dq", "dkv"), *both, strict=True):
        if name == "stats":  # a maximum that no row has reached differs between tiles, and weighs nothing
            got, want = got[..., 1, -q_rows:], want[..., 1, -q_rows:]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4, err_msg=name)


def test_whole_sequences_need_no_ring():
    """Through the op and its rule: o, dq, dk, dv."""
    q, do = (draw((1, ROWS, 2, HEAD), seed=seed) for seed in (0, 1))
    k, v = (draw((1, ROWS, 1, HEAD), seed=seed) for seed in (2, 3))

    def both(kernel):
        attention = functools.partial(fa.attention, kernel=kernel, window=200)
        out, vjp = jax.jit(lambda *qkv: jax.vjp(attention, *qkv))(q, k, v)
        return out, *jax.jit(vjp)(do)

    kernel = Flash(q_tile=128, kv_tile=256, sub_block=128)
    for name, got, want in zip(("o", "dq", "dk", "dv"), both(kernel), both("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=5e-4, err_msg=name)


@pytest.mark.parametrize(("dtype", "sizes", "lacking"), [
    ("bfloat16", (128, 256, 128), None),
    ("float16", (128, 256, 128), "float32 and bfloat16: got float16"),
    ("float32", (80, 256, 256), "head sizes 64, 128, 192 and 256: got 80"),
    ("float32", (128, 200, 128), "chunks of a multiple of 128 rows: got 200"),
])  # fmt: skip
def test_what_they_cannot_take_is_said(dtype, sizes, lacking):
    assert unsupported(jnp.dtype(dtype), *sizes) == lacking
