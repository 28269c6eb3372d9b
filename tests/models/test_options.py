"""The options of the decoder that other families need, against the same decoder written out in numpy."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.config import TransformerConfig, check_fits
from models.transformer import Transformer
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


def plain_logits(params, config):
    """Computes the logits of TOKENS in float64 numpy, layer by layer, without any of the model's code."""

    def norm(x, scale, *, plus_one=config.norm_plus_one):
        scale = 1 + scale if plus_one else scale
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def linear(x, p):
        return x @ p["kernel"] + p.get("bias", 0)

    def rotate(x):
        half = x.shape[-1] // 2
        frequency = config.rope_theta ** (-np.arange(half) / half)
        if config.rope_factor != 1:
            wavelength, original = 2 * np.pi / frequency, config.rope_original_length
            low, high = original / config.rope_low_frequency, original / config.rope_high_frequency
            smooth = (original / wavelength - config.rope_low_frequency) / (
                config.rope_high_frequency - config.rope_low_frequency
            )
            between = (1 - smooth) * frequency / config.rope_factor + smooth * frequency
            frequency = np.select([wavelength > low, wavelength < high], [frequency / config.rope_factor, frequency],
                                  between)  # fmt: skip
        angle = np.arange(x.shape[1])[:, None, None] * frequency
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def attend(h, p, i):
        q, k, v = (linear(h, p[name]).reshape(*h.shape[:2], -1, config.head_features)
                   for name in ("query", "key", "value"))  # fmt: skip
        if config.qk_norm:
            q, k = norm(q, p["query_ln"]["scale"], plus_one=False), norm(k, p["key_ln"]["scale"], plus_one=False)
        k, v = (np.repeat(x, config.heads // config.kv_heads, axis=2) for x in (rotate(k), v))
        scores = np.einsum("bqhd,bkhd->bhqk", rotate(q), k)
        scores *= config.attention_scale or config.head_features**-0.5
        if config.attention_softcap:
            scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
        rows = np.arange(h.shape[1])
        allowed = rows[:, None] >= rows
        if config.alternating_window and i % 2 == 0:
            allowed &= rows[:, None] - rows < config.alternating_window
        weights = np.exp(np.where(allowed, scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        return linear(np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*h.shape[:2], -1), p["out"])

    def activate(x):
        if config.activation == "silu":
            return x / (1 + np.exp(-x))
        return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2

    x = params["embed"]["embedding"][TOKENS] * (config.width**0.5 if config.scale_embeddings else 1)
    for i in range(config.layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        y = attend(norm(x, layer["attention_norm"]["scale"]), layer["attention"], i)
        x = x + (norm(y, layer["post_attention_norm"]["scale"]) if config.post_norms else y)
        h, mlp = norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]
        y = linear(activate(linear(h, mlp["gate"])) * linear(h, mlp["up"]), mlp["down"])
        x = x + (norm(y, layer["post_mlp_norm"]["scale"]) if config.post_norms else y)
    x = norm(x, params["final_norm"]["scale"])
    logits = x @ (params["embed"]["embedding"].T if config.tie_embeddings else params["output"]["kernel"])
    return config.logit_softcap * np.tanh(logits / config.logit_softcap) if config.logit_softcap else logits


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
    want = plain_logits(plain_params(model), config)
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
    want = plain_logits(params, config)
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
        changed = plain_logits(params, dataclasses.replace(config, **{field.name: default}))
        assert np.abs(changed - want).max() > 1e-3, field.name


@pytest.mark.parametrize("name", ["attention_softcap", "alternating_window"])
def test_a_context_axis_is_refused_where_all_scores_are_needed(name):
    with pytest.raises(ValueError, match=f"{name} needs all scores .*'context' axis of 2 devices"):
        check_fits(
            dataclasses.replace(BASE, kv_heads=4, vocab_size=32, **{name: 4}),
            sequence_length=16,
            mesh_shape={"data": 1, "context": 2, "model": 4},
        )


@pytest.mark.parametrize("head_dim", [0, 7])
def test_a_head_that_cannot_be_rotated_is_named(head_dim):
    config = dataclasses.replace(BASE, head_dim=head_dim)
    with pytest.raises(
        ValueError, match=f"head_dim must be even, for rotary positions, or None: got head_dim={head_dim}"
    ):
        check_fits(config, sequence_length=16, mesh_shape={"data": 1, "model": 1})
