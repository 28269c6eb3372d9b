"""benchmarks/step.py: its variants compute the same y, dx and gradients; what "at the peak" counts."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import step
from flaxasync.hardware import chip
from models.config import TransformerConfig

TINY = TransformerConfig(width=64, heads=8, kv_heads=4, mlp_width=96, param_dtype="float32", dtype="float32")
BATCH, SEQUENCE = 2, 8


def outcome(variant):
    config = dataclasses.replace(TINY, gathered_mib=1 if variant == step.KEPT else 0)
    mesh = step.mesh_of(jax.devices()[:4], variant, config)
    with jax.set_mesh(mesh):
        fn, arguments = step.program(variant, config, BATCH, SEQUENCE, mesh)
        rng = np.random.default_rng(0)
        draw = lambda a: jax.device_put(rng.standard_normal(a.shape, np.float32) / 8, a.sharding)  # noqa: E731
        named = sorted(jax.tree_util.tree_leaves_with_path(arguments[0]), key=lambda leaf: str(leaf[0]))
        drawn = {
            str(path): draw(leaf) for path, leaf in named
        }  # by name: the layers order their parameters differently
        state = jax.tree_util.tree_map_with_path(lambda path, _: drawn[str(path)], arguments[0])
        y, gradients, dx = fn(state, draw(arguments[1]), draw(arguments[2]))
        found = {str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)}
        return jax.tree.map(np.asarray, found | {"y": y, "dx": dx})


@pytest.mark.slow
def test_all_variants_compute_the_same():
    want = outcome("automatic")
    for variant in step.OURS:
        got = outcome(variant)
        assert got.keys() == want.keys()
        for name, value in want.items():  # float32, sums in another order
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_the_peak_counts_every_product_and_the_causal_half():
    """An MLP and four projections of 16 tokens forward and twice backward, and half of all scores."""
    weights = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96
    flops = 3 * (2 * 16 * weights + 2 * 2 * 2 * 8 * 8 * 8 * 8 / 2)
    seconds = step.peak_seconds(TINY, BATCH, SEQUENCE, "v5e:2x4")
    assert seconds == pytest.approx(flops / 8 / chip("v5e").flops)
    layer = step.architecture("llama_8b", "flaxasync")
    assert step.peak_seconds(layer, 4, 4096, "v5e:2x4") == pytest.approx(14.65e-3, rel=1e-3)
