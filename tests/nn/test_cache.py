"""The key-value cache of a layer against that of `nnx.MultiHeadAttention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import flaxasync as fa
from tests.nn.conftest import drawn, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")
X = np.random.default_rng(0).standard_normal((2, 6, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("axis_type", "prompt"), [pytest.param(AxisType.Auto, 4, marks=pytest.mark.slow), (AxisType.Explicit, 3)]
)
def test_rows_are_decoded_as_by_the_plain_layer(axis_type, prompt):
    """A prompt at once and then single rows, where the plain layer takes one row at a time."""
    plain = drawn(lambda: nnx.MultiHeadAttention(4, 16, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0)))
    plain.init_cache(X.shape)
    step = nnx.jit(lambda layer, row: layer(row))
    want = np.concatenate([step(plain, X[:, i : i + 1]) for i in range(6)], axis=1)
    with jax.set_mesh(make_mesh(1, 4, axis_type)):
        layer = nnx.eval_shape(lambda: fa.nn.ParallelAttention(16, 4, kv_heads=2, rngs=nnx.Rngs(0)))
        fa.nn.load(layer, nnx.state(plain, nnx.Param))
        layer.init_cache(X.shape)
        step = nnx.jit(lambda layer, rows: layer(rows, decode=True))
        got = [step(layer, X[:, :prompt]), *(step(layer, X[:, i : i + 1]) for i in range(prompt, 6))]
        assert layer.cache_index[...] == 6
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=1e-5)


def test_each_sequence_has_a_mask_of_its_own():
    allowed = np.random.default_rng(1).random((2, 1, 6, 6)) < 0.5
    allowed |= np.eye(6, dtype=bool)
    with jax.set_mesh(make_mesh(2, 2)):
        layer = drawn(lambda: fa.nn.ParallelAttention(16, 4, rngs=nnx.Rngs(0)))
        x = jax.device_put(X, jax.P("data"))
        want = layer(x, mask=allowed, is_causal=True)
        with pytest.raises(ValueError, match="call init_cache first"):
            layer(x, mask=allowed, decode=True)
        layer.init_cache(X.shape)
        with pytest.raises(ValueError, match=r"needs a mask that broadcasts to .* \[2, 1, 6, 6\]: got \[3, 1, 6, 6\]"):
            layer(x, mask=np.ones((3, 1, 6, 6), bool), decode=True)
        got = layer(x, mask=allowed, decode=True)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_what_a_cache_lacks_is_refused():
    with jax.set_mesh(make_mesh(1, 4)):
        layer, function = (drawn(lambda options=options: fa.nn.ParallelAttention(16, 4, rngs=nnx.Rngs(0), **options))
                           for options in ({}, {"attention_fn": nnx.dot_product_attention}))  # fmt: skip
        layer.init_cache(X.shape)
        function.init_cache(X.shape)
        with pytest.raises(NotImplementedError, match="ParallelAttention with decode=True lacks inputs_k"):
            layer(X, X, decode=True)
        with pytest.raises(NotImplementedError, match="lacks a cache with an attention_fn"):
            function(X, decode=True)
        with pytest.raises(ValueError, match="2 sequences of 6 rows, of which 0 are taken: got 1 sequences and 6"):
            layer(X[:1], decode=True)
        layer.cache_index[...] = jnp.int32(4)
        message = "of 6 rows, of which 4 are taken: got 2 sequences and 3 new rows; make a larger one"
        with pytest.raises(ValueError, match=message):
            layer(X[:, :3], decode=True)
