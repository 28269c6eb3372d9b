"""benchmarks/step.py: its programs compute the same, and the peak is right."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import step
from flaxasync.hardware import chip
from models.config import TransformerConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY = TransformerConfig(
    width=64, heads=8, kv_heads=4, mlp_width=96, param_dtype="float32", dtype="float32"
)
BATCH, SEQUENCE = 2, 8


def named(tree):
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def drawn(tree):
    """Returns arrays that depend on their names, because the models order their parameters
    differently.
    """
    rng, leaves = np.random.default_rng(1), sorted(named(tree).items())
    values = {
        name: jax.device_put(rng.standard_normal(a.shape, np.float32) / 8, a.sharding)
        for name, a in leaves
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, _: values[jax.tree_util.keystr(path)], tree
    )


def assert_all_close(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name, value in want.items():  # float32, sums in another order
        atol = tolerance["atol"] * np.abs(value).max()
        np.testing.assert_allclose(
            got[name], value, rtol=tolerance["rtol"], atol=atol, err_msg=name
        )


def outcome(variant):
    config = dataclasses.replace(TINY, gathered_mib=1 if variant == step.KEPT else 0)
    mesh = step.mesh_of(jax.devices()[:4], variant, config)
    with jax.set_mesh(mesh):
        fn, (state, *arrays) = step.program(variant, config, BATCH, SEQUENCE, mesh)
        y, gradients, dx = fn(drawn(state), *drawn(arrays))
        return jax.tree.map(np.asarray, named(gradients) | {"y": y, "dx": dx})


@pytest.mark.slow
def test_all_variants_compute_the_same():
    want = outcome("automatic")
    for variant in step.OURS:
        assert_all_close(outcome(variant), want, rtol=1e-4, atol=1e-5)


def test_the_peak_counts_every_product_and_the_causal_half():
    """An MLP and four projections of 16 tokens forward and twice backward, and half of all
    scores.
    """
    weights = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96
    flops = 3 * (2 * 16 * weights + 2 * 2 * 2 * 8 * 8 * 8 * 8 / 2)
    seconds = step.peak_seconds(TINY, BATCH, SEQUENCE, "v5e:2x4")
    assert seconds == pytest.approx(flops / 8 / chip("v5e").flops)
    layer = step.architecture("llama_8b", "flaxasync")
    assert step.peak_seconds(layer, 4, 4096, "v5e:2x4") == pytest.approx(14.65e-3, rel=1e-3)
