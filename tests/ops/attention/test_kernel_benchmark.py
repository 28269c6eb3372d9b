"""benchmarks/attention_kernel.py: what it compares computes the same, and its rows count the causal half."""

import functools

import jax
import numpy as np
import pytest

from benchmarks import attention_kernel as benchmark
from flaxasync.hardware import chip


@pytest.mark.slow
def test_both_compute_the_same(monkeypatch):
    monkeypatch.setattr(benchmark, "ROWS", 256)
    make = functools.partial(benchmark.jax_splash.make_splash_mqa_single_device, interpret=True)
    monkeypatch.setattr(benchmark.jax_splash, "make_splash_mqa_single_device", make)
    rng = np.random.default_rng(0)
    heads, one = (benchmark.HEADS, 256, benchmark.FEATURES), (256, benchmark.FEATURES)
    q, k, v, do = (rng.standard_normal(shape, np.float32) for shape in (heads, one, one, heads))

    def both(attention):
        o, pull = jax.vjp(attention, q, k, v)
        return o, *pull(do)

    theirs = both(benchmark.of_jax((128, 128, 128), use_fused_bwd_kernel=False))
    for mine, other in zip(both(benchmark.ours), theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def test_a_row_counts_two_causal_products_forward_and_five_backward():
    product = benchmark.HEADS * 4096**2 * 128 / chip("v6e").flops  # half of two FLOPs for each
    times = benchmark.Times(forward=4 * product, backward=10 * product, program=0.02)
    cells = benchmark.row("v6e", "flaxasync", times)
    assert [cell.partition("(")[2] for cell in cells[2:4]] == ["50%)", "50%)"]
    assert cells[-1] == "20.000"


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("flash_attention.2", "forward"),
        ("flash_attention_backward.1", "backward"),
        ("splash_mqa_fwd_residuals.1", "forward"),
        ("splash_mqa_dkv_no_residuals.1", "backward"),
        ("splash_mqa_dq_no_residuals.1", "backward"),
        ("multiply_reduce_fusion", "neither"),
    ],
)
def test_kernels_are_found_by_their_names(name, passes):
    assert bool(benchmark.FORWARD.match(name)) == (passes == "forward")
    assert bool(benchmark.BACKWARD.match(name)) == (passes == "backward")
