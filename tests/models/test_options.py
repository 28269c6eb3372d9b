"""The options of the decoder that other families need, against the same decoder written out, in float64."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.config import TransformerConfig
from models.transformer import Transformer
from tests.models.plain_decoder import plain_logits
from tests.models.test_transformer import make_mesh
from tests.nn.conftest import drawn

pytestmark = pytest.mark.usefixtures("quick_compile")

BASE = TransformerConfig(vocab_size=30, layers=3, width=16, heads=4, kv_heads=2, mlp_width=24)
LLAMA_AND_QWEN = dataclasses.replace(
    BASE, head_dim=8, tie_embeddings=True, qk_norm=True, attention_bias=True, mlp_bias=True, rope_factor=8.0,
    rope_original_length=16,
)  # fmt: skip
GEMMA = dataclasses.replace(
    BASE, head_dim=8, activation="gelu", norm_plus_one=True, post_norms=True, scale_embeddings=True,
    attention_scale=0.7, attention_softcap=0.5, logit_softcap=1.5, alternating_window=3,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 30, (2, 12)).astype(np.int32)


def made(config):
    return drawn(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def plain_params(model):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))


@pytest.mark.parametrize(
    "config",
    [pytest.param(LLAMA_AND_QWEN, id="llama and qwen"), pytest.param(GEMMA, id="gemma", marks=pytest.mark.slow)],
)
def test_logits_are_those_of_the_plain_decoder(config):
    """Four devices share two key-value heads, and do not divide the vocabulary."""
    with jax.set_mesh(make_mesh()):
        model = made(config)
        logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jax.device_put(TOKENS, P("data"))))
        loss = nnx.jit(lambda model, tokens: model.loss(tokens, tokens))(model, jax.device_put(TOKENS, P("data")))
    want = plain_logits(plain_params(model), config, TOKENS)
    assert logits.shape == (2, 12, 32)
    np.testing.assert_allclose(logits[..., :30], want, atol=2e-5)
    assert (logits[..., 30:] == np.finfo(np.float32).min).all()
    log_sum = np.log(np.exp(want).sum(-1))
    np.testing.assert_allclose(loss, (log_sum - np.take_along_axis(want, TOKENS[..., None], -1)[..., 0]).mean(), 1e-5)


@pytest.mark.parametrize("config", [LLAMA_AND_QWEN, GEMMA], ids=["llama and qwen", "gemma"])
def test_every_option_changes_the_logits(config):
    """Negative test: the comparison above would notice an option that the model ignores."""
    with jax.set_mesh(make_mesh(1, 1)):
        params = plain_params(made(dataclasses.replace(config, tie_embeddings=False)))
    want = plain_logits(params, config, TOKENS)
    for field in dataclasses.fields(config):
        default = getattr(BASE, field.name)
        if getattr(config, field.name) == default or field.name in ("head_dim", "rope_original_length"):
            continue
        if field.name in ("attention_bias", "mlp_bias"):
            part = params["layers"]["attention" if field.name == "attention_bias" else "mlp"]
            assert all(
                "bias" in part[name] for name in ("up", "gate", "down", "query", "key", "value", "out") if name in part
            )
            continue
        changed = plain_logits(params, dataclasses.replace(config, **{field.name: default}), TOKENS)
        assert np.abs(changed - want).max() > 1e-3, field.name
