"""The decoder of `models.transformer` written out on whole arrays, layer by layer, without any of
the model's code.
"""

import jax
import numpy as np


def plain_logits(params, config, tokens, xp=np, losses=None):
    """Returns the logits of tokens, in the dtype of the parameters. `xp` is numpy, or jax.numpy to
    differentiate it.

    Appends to `losses` the load-balancing loss and the z-loss of each layer that has experts.
    """

    def norm(x, scale, *, plus_one=config.norm_plus_one):
        scale = 1 + scale if plus_one else scale
        scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
        return x / xp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def linear(x, p):
        return x @ p["kernel"] + p["bias"] if "bias" in p else x @ p["kernel"]

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
            frequency = np.select(
                [wavelength > low, wavelength < high],
                [frequency / config.rope_factor, frequency],
                between,
            )
        angle = np.arange(x.shape[1])[None, :, None, None] * frequency
        cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
        real, imaginary = x[..., :half], x[..., half:]
        return xp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)

    def attend(h, p, i):
        q, k, v = (linear(h, p[name]).reshape(*h.shape[:2], -1, config.head_features)
                   for name in ("query", "key", "value"))  # fmt: skip
        if config.qk_norm:
            q, k = (
                norm(q, p["query_ln"]["scale"], plus_one=False),
                norm(k, p["key_ln"]["scale"], plus_one=False),
            )
        k, v = (xp.repeat(x, config.heads // config.kv_heads, axis=2) for x in (rotate(k), v))
        scores = xp.einsum("bqhd,bkhd->bhqk", rotate(q), k) * (
            config.attention_scale or config.head_features**-0.5
        )
        if config.attention_softcap:
            scores = config.attention_softcap * xp.tanh(scores / config.attention_softcap)
        rows = np.arange(h.shape[1])
        allowed = rows[:, None] >= rows
        if config.alternating_window and i % 2 == 0:
            allowed &= rows[:, None] - rows < config.alternating_window
        weights = xp.exp(xp.where(allowed, scores, -np.inf))
        weights = weights / weights.sum(-1, keepdims=True)
        return linear(xp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*h.shape[:2], -1), p["out"])

    def activate(x):
        if config.activation == "silu":
            return x / (1 + xp.exp(-x))
        return x * (1 + xp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2

    def gated(h, gate, up, down):
        return activate(h @ gate) * (h @ up) @ down

    def mix(h, p):
        """Every expert multiplies every row, and those that the row did not choose have the weight
        0.
        """
        logits = h @ p["router"]["kernel"]
        exponents = xp.exp(logits)
        sums = exponents.sum(-1, keepdims=True)
        scores = (
            exponents / sums if config.router_scores == "softmax" else 1 / (1 + xp.exp(-logits))
        )
        chosen = scores >= xp.sort(scores, axis=-1)[..., -config.experts_per_token][..., None]
        weights = xp.where(chosen, scores, 0)
        if config.normalize_expert_weights:
            weights = weights / weights.sum(-1, keepdims=True)
        if losses is not None:
            score = (scores / scores.sum(-1, keepdims=True)).mean((0, 1))
            share = chosen.mean((0, 1)) / config.experts_per_token
            losses.append((config.experts * (share * score).sum(), (xp.log(sums) ** 2).mean()))
        y = sum(
            weights[..., e, None] * gated(h, p["gate"][e], p["up"][e], p["down"][e])
            for e in range(config.experts)
        )
        if config.shared_expert_width:
            y = y + gated(h, *(p["shared"][name]["kernel"] for name in ("gate", "up", "down")))
        return y

    x = params["embed"]["embedding"][tokens] * (config.width**0.5 if config.scale_embeddings else 1)
    for i in range(config.layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        y = attend(norm(x, layer["attention_norm"]["scale"]), layer["attention"], i)
        x = x + (norm(y, layer["post_attention_norm"]["scale"]) if config.post_norms else y)
        h, mlp = norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]
        if config.experts:
            y = mix(h, mlp)
        else:
            y = linear(activate(linear(h, mlp["gate"])) * linear(h, mlp["up"]), mlp["down"])
        x = x + (norm(y, layer["post_mlp_norm"]["scale"]) if config.post_norms else y)
    x = norm(x, params["final_norm"]["scale"])
    logits = x @ (
        params["embed"]["embedding"].T if config.tie_embeddings else params["output"]["kernel"]
    )
    return (
        config.logit_softcap * xp.tanh(logits / config.logit_softcap)
        if config.logit_softcap
        else logits
    )
