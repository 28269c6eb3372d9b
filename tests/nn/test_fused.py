"""Fused projections become parallel ones part by part: nothing that the model takes apart moves
between devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import (
    ROWS,
    assert_close,
    assert_model_close,
    drawn,
    make_mesh,
    ones,
    permutes,
    scan,
    stack,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

PARTS = {"query": 16, "key": 8, "value": 8}


class FusedBlock(nnx.Module):
    """A block of a plain model: queries, keys and values are one product, which the model takes
    apart.
    """

    def __init__(self, rngs):
        self.qkv = nnx.Linear(16, 32, rngs=rngs)

    def parts(self, x):
        y = self.qkv(x)
        return y if isinstance(y, tuple) else (y[..., :16], y[..., 16:24], y[..., 24:])

    def __call__(self, x):
        q, k, v = self.parts(x)
        return q.sum(-1, keepdims=True) * x + (k * jnp.tanh(v)).sum(-1, keepdims=True)


def fused(model, path="qkv", parts=PARTS):
    return fa.nn.parallelize(model, {path: fa.nn.Fused(parts)}, verbose=False)


@nnx.jit
def gradients(model, x):
    return nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))))(model)


def test_a_fused_layer_computes_what_it_did():
    plain = drawn(lambda: FusedBlock(nnx.Rngs(0)))
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    want, want_parts, want_y = gradients(plain, x), plain.parts(x), plain(x)
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.clone(plain)
        (replaced,) = fused(model)
        assert str(replaced).startswith(
            f"qkv: Linear -> ColumnParallelProjections (Fused(parts={PARTS})), "
        )
        assert model.qkv.value.kernel[...].sharding.spec == P(None, "model")
        for got, part in zip(model.parts(jax.device_put(x, ROWS)), want_parts, strict=True):
            assert_close(got, part, "float32", "part")
        assert_close(model(jax.device_put(x, ROWS)), want_y, "float32", "y")
        got = gradients(model, jax.device_put(x, ROWS))
        joined = nnx.clone(plain)
        fa.nn.load(joined, _with_state(model, got))
        assert_model_close(nnx.state(joined, nnx.Param), want)


def _with_state(model, state):
    """Returns a model that has gradients in the place of its parameters."""
    copy = nnx.clone(model)
    nnx.update(copy, state)
    return copy


@pytest.mark.slow
def test_taking_the_parts_apart_sends_nothing():
    with jax.set_mesh(make_mesh(1, 4)):
        x = ones((2, 8, 16), P(None, "model", None))
        alone = drawn(lambda: fa.nn.ColumnParallelProjections(16, PARTS, rngs=nnx.Rngs(0)))
        model = drawn(lambda: FusedBlock(nnx.Rngs(0)))
        fused(model)
        assert permutes(model.qkv, x) == permutes(alone, x)


def test_a_fused_checkpoint_is_loaded_and_given_back():
    plain, other = (drawn(lambda: nnx.Dict(block=FusedBlock(nnx.Rngs(0))), seed) for seed in (1, 2))
    with jax.set_mesh(make_mesh(2, 4)):
        fused(plain_copy := nnx.clone(plain), "block.qkv")
        loaded = fa.nn.load(plain_copy, nnx.to_pure_dict(nnx.state(other)))
        assert (loaded.missing, loaded.unexpected) == ((), ())
        q, k, v = (plain_copy.block.qkv.query, plain_copy.block.qkv.key, plain_copy.block.qkv.value)
        np.testing.assert_array_equal(
            np.concatenate([layer.kernel[...] for layer in (q, k, v)], -1),
            other.block.qkv.kernel[...],
        )
        fa.nn.load(plain, plain_copy)
    assert_model_close(nnx.state(plain, nnx.Param), nnx.state(other, nnx.Param), tolerance=0)


@pytest.mark.slow
def test_a_stack_of_fused_layers_and_an_abstract_one():
    plain = stack(FusedBlock)
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    want = scan(plain, x)
    with jax.set_mesh(make_mesh(2, 4)):
        layers = nnx.clone(plain)
        fused(layers)
        assert layers.qkv.key.bias.shape == (3, 8)
        assert_close(nnx.jit(scan)(layers, jax.device_put(x, ROWS)), want, "float32", "y")
        abstract = nnx.eval_shape(lambda: FusedBlock(nnx.Rngs(0)))
        fused(abstract)
        assert abstract.qkv.query.kernel.get_value().sharding.spec == P(None, "model")


def test_what_does_not_fit_is_refused():
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.Dict(
            qkv=nnx.Linear(16, 32, rngs=nnx.Rngs(0)), embed=nnx.Embed(8, 8, rngs=nnx.Rngs(0))
        )
        with pytest.raises(
            ValueError,
            match=r"{'q': 16, 'k': 8}\): kernel is \[16, 32\], and its parts have the features {'q",
        ):
            fused(model, parts={"q": 16, "k": 8})
        with pytest.raises(
            ValueError,
            match="out_features must be divisible by the 'model' axis: got out_features=10",
        ):
            fused(model, parts={"q": 10, "k": 22})
        with pytest.raises(
            ValueError, match=r"embed by the rule Fused\(.* replaces nnx.Linear: got Embed"
        ):
            fused(model, "embed")
        fused(model)
        wrong = {"qkv": {"kernel": np.ones((16, 48), np.float32), "bias": np.ones(48, np.float32)}}
        message = (
            r"qkv.kernel is \[16, 48\], and its parts have the features "
            r"{'qkv.query.kernel': 16, 'qkv.key.kernel': 8, 'qkv.value.kernel': 8}"
        )
        with pytest.raises(ValueError, match=message):
            fa.nn.load(model, wrong, strict=False)
