"""Rotary positions: their gradient, and what policies of `jax.checkpoint` keep of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxasync as fa
from flaxasync import check
from tests.nn.test_attention import rotate


def test_the_gradient_is_the_rotation_by_the_negative_angles():
    x, dy = np.random.default_rng(0).normal(size=(2, 2, 5, 3, 8)).astype(np.float32)
    y, pull = jax.vjp(fa.nn.rotary_embedding, x)
    np.testing.assert_allclose(y, rotate(x, 10_000.0), atol=1e-6)
    (dx,) = pull(dy)
    np.testing.assert_allclose(rotate(dx, 10_000.0), dy, atol=1e-6)


@pytest.mark.parametrize("policy", [fa.save_matmuls, fa.save_costly])
def test_policies_that_keep_products_keep_none_of_the_rotation(policy, capsys):
    """On a TPU the rotation has a product in float32, which was twice the size of x."""
    with jax.set_mesh(check.topology_mesh("v5e:2x4", (8,), ("model",))):
        fn = jax.checkpoint(lambda x: jnp.sum(jnp.sin(fa.nn.rotary_embedding(x))), policy=policy)
        x = jax.ShapeDtypeStruct((2, 16, 4, 128), jnp.bfloat16)
        assert "precision=" in str(jax.make_jaxpr(fa.nn.rotary_embedding)(x))
        jax.ad_checkpoint.print_saved_residuals(fn, x)
    kept = capsys.readouterr().out
    assert "bf16[2,16,4,128] from the argument x" in kept
    assert "f32[2,16,4,128]" not in kept
