"""Rotary positions: their gradient, and what policies of `jax.checkpoint` keep of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from flaxasync import check
from flaxasync.nn.attention import rotary
from flaxasync.nn.attention.rotary import rotary_tables
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


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "shape", "rounding"), [
    ("float32", (2, 16, 3, 128), 2**-20), ("bfloat16", (1, 544, 2, 256), 2**-7),
])  # fmt: skip
def test_the_kernel_rotates_as_xla_does(dtype, shape, rounding):
    x, dy = (jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype) for seed in (0, 1))
    tables = rotary_tables(shape[1], shape[3], jnp.float32, positions=jnp.arange(shape[1]) + 7)

    def both(kernel):
        y, pull = jax.vjp(functools.partial(rotary.rotate, tables=tables, kernel=kernel), x)
        return y, *pull(dy)

    with pltpu.force_tpu_interpret_mode():
        found = both(True)
    for name, got, want in zip(("y", "dx"), found, both(False), strict=True):
        assert got.dtype == want.dtype, name
        np.testing.assert_allclose(
            *(np.float32(value) for value in (got, want)), rounding, 1e-6, err_msg=name
        )


@pytest.mark.parametrize(("heads", "in_kernel"), [((4, 128), True), ((8, 64), False)])
def test_the_kernel_serves_heads_that_are_whole_registers_wide(heads, in_kernel):
    mesh = check.topology_mesh("v5e:2x4", (8,), ("model",))
    x = jax.ShapeDtypeStruct((2, 16, 8 * heads[0], heads[1]), jnp.bfloat16)
    spec = P(None, None, "model", None)
    with jax.set_mesh(mesh):
        traced = str(
            jax.make_jaxpr(jax.shard_map(fa.nn.rotary_embedding, in_specs=spec, out_specs=spec))(x)
        )
    assert ("rotate_heads" in traced) is in_kernel
