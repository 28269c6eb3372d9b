"""Benchmarks of ops: samples of plan_layers.py, rows of attention_kernel.py."""

import functools

import jax
import numpy as np
import pytest

from benchmarks import attention_kernel, plan_layers
from benchmarks.plan_layers import Form
from benchmarks.programs import kept
from flaxasync.hardware import chip


def test_what_was_made_is_kept_by_its_facts(tmp_path):
    made = []

    def make():
        return made.append(1) or len(made)

    assert [kept(tmp_path / "new", facts, make) for facts in ("a", "b", "a", "b")] == [1, 2, 1, 2]


def test_a_choice_without_memory_is_compared_with_forms_that_keep_nothing():
    played = {Form("none"): 3.0, Form("fused"): 2.0, Form("fused", True): 1.0}
    assert plan_layers.behind(2.0, Form(None, False, None), played) == 0
    assert plan_layers.behind(2.0, Form(None, True, None), played) == 1
    # a choice may mix backends, and be faster
    assert plan_layers.behind(0.9, Form(None, True, None), played) == 0


@pytest.mark.slow
def test_both_attention_kernels_compute_the_same(monkeypatch):
    monkeypatch.setattr(attention_kernel, "ROWS", 256)
    make = functools.partial(
        attention_kernel.jax_splash.make_splash_mqa_single_device, interpret=True
    )
    monkeypatch.setattr(attention_kernel.jax_splash, "make_splash_mqa_single_device", make)
    rng = np.random.default_rng(0)
    heads, one = (
        (attention_kernel.HEADS, 256, attention_kernel.FEATURES),
        (256, attention_kernel.FEATURES),
    )
    q, k, v, do = (rng.standard_normal(shape, np.float32) for shape in (heads, one, one, heads))

    def both(attention):
        o, pull = jax.vjp(attention, q, k, v)
        return o, *pull(do)

    theirs = both(attention_kernel.of_jax((128, 128, 128), use_fused_bwd_kernel=False))
    for mine, other in zip(both(attention_kernel.ours), theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def test_a_row_counts_two_causal_products_forward_and_five_backward():
    # half of two FLOPs for each
    product = attention_kernel.HEADS * 4096**2 * 128 / chip("v6e").flops
    times = attention_kernel.Times(forward=4 * product, backward=10 * product, program=0.02)
    cells = attention_kernel.row("v6e", "flaxasync", times)
    assert [cell.partition("(")[2] for cell in cells[2:4]] == ["50%)", "50%)"]
    assert cells[-1] == "20.000"


@pytest.mark.parametrize(
    ("passes", "names"),
    [
        ("forward", ["flash_attention.2", "splash_mqa_fwd_residuals.1"]),
        (
            "backward",
            [
                "flash_attention_backward.1",
                "splash_mqa_dkv_no_residuals.1",
                "splash_mqa_dq_no_residuals.1",
            ],
        ),
        ("neither", ["multiply_reduce_fusion"]),
    ],
)
def test_kernels_are_found_by_their_names(passes, names):
    for name in names:
        assert bool(attention_kernel.FORWARD.match(name)) == (passes == "forward")
        assert bool(attention_kernel.BACKWARD.match(name)) == (passes == "backward")
