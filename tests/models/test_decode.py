"""Decoding with the cache gives the logits of recomputing the whole sequence; which tokens may be
drawn.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.generation import keep_most_likely
from models.transformer import Transformer
from tests.models.test_hugging_face import CONFIGS
from tests.nn.conftest import drawn, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPT, STEPS = 8, 64


def decode(config, tokens, mesh, prompt):
    """Returns the logits after the prompt and after each later token, [steps + 1, B, V]: one
    prefill, then a scan.
    """

    def run(model, tokens):
        model.init_cache(tokens.shape[0], tokens.shape[1])
        first = model.decode(tokens[:, :prompt])
        graph, state = nnx.split(model)

        def step(state, token):
            model = nnx.merge(graph, state)
            logits = model.decode(token[:, None])
            return nnx.state(model), logits

        _, rest = jax.lax.scan(step, state, jnp.moveaxis(tokens[:, prompt:], 1, 0))
        return first, rest

    with jax.set_mesh(mesh):
        model = drawn(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        spec = P("data") if tokens.shape[0] % mesh.shape["data"] == 0 else P(None)
        first, rest = nnx.jit(run)(model, jax.device_put(tokens, spec))
        # The whole sequences are computed two at a time, which every mesh here divides.
        whole = nnx.jit(lambda model, tokens: model(tokens))(
            model, jax.device_put(np.tile(tokens, (2, 1)), P("data"))
        )
    got = np.concatenate([np.asarray(first)[None], np.asarray(rest)])
    want = np.moveaxis(np.asarray(whole)[: tokens.shape[0], prompt - 1 :], 1, 0)
    return got[..., : config.vocab_size], want[..., : config.vocab_size]


@pytest.mark.parametrize(
    ("name", "shape", "batch"),
    [
        ("gemma2", (2, 4), 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("llama", (2, 4), 2),
                ("qwen3", (2, 2), 3),
                ("mixtral", (1, 8), 1),
                ("qwen3_moe", (2, 4), 2),
            ]
        ),
    ],
)
def test_decoding_equals_recomputing_the_prefix(name, shape, batch):
    tokens = np.random.default_rng(0).integers(0, 30, (batch, PROMPT + STEPS)).astype(np.int32)
    got, want = decode(CONFIGS[name], tokens, make_mesh(*shape), PROMPT)
    assert got.shape == want.shape == (STEPS + 1, batch, 30)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_row_that_is_not_cached_is_noticed():
    """Negative test: without the tokens before the last, the logits are others."""
    tokens = np.random.default_rng(0).integers(0, 30, (1, 16)).astype(np.int32)
    config = dataclasses.replace(CONFIGS["qwen3"], layers=1)
    with jax.set_mesh(make_mesh(1, 1)):
        model = drawn(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match="has none: call init_cache first"):
            model.decode(tokens)
        model.init_cache(1, 16)
        whole = model.decode(tokens)
        model.init_cache(1, 16)
        assert np.abs(np.asarray(model.decode(tokens[:, -1:]) - whole)).max() > 1e-3


def test_each_device_holds_the_heads_that_it_uses():
    """Two key-value heads on four devices: every device has one, and two devices have the same."""
    with jax.set_mesh(make_mesh(2, 4)):
        model = drawn(lambda: Transformer(CONFIGS["qwen3"], rngs=nnx.Rngs(0)))
        model.init_cache(2, 16)
        keys = model.layers.attention.cached_key[...]
    assert keys.shape == (3, 2, 16, 4, 8)
    assert keys.sharding.spec == P(None, "data", None, "model", None)
    assert keys.addressable_shards[0].data.shape == (3, 1, 16, 1, 8)


@pytest.mark.parametrize(("top_p", "kept"), [
    (0.1, [1]), (0.5, [1]), (0.6, [1, 2]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3]),
])  # fmt: skip
def test_the_most_likely_tokens_that_add_up_to_top_p_are_kept(top_p, kept):
    logits = jnp.log(jnp.asarray([[0.15, 0.5, 0.3, 0.05]], jnp.float32))
    limited = np.asarray(keep_most_likely(logits, jnp.float32(top_p)))[0]
    assert np.flatnonzero(np.isfinite(limited)).tolist() == kept
    np.testing.assert_array_equal(limited[kept], np.asarray(logits)[0, kept])
