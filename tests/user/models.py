"""Plain NNX models in the structure of public ones, written without any thought of parallel layers.

`LanguageModel` has the structure of Flax's lm1b example: embedding with sinusoidal positions,
blocks of masked attention and a two-layer MLP, an output tied to the embedding. `Gemma` has that of
Flax's gemma example: root-mean-square norms, grouped heads from projections of its own, a gated
MLP. `VisionTransformer` has that of Dosovitskiy et al.: patches by a convolution, a class token, a
head.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class MlpBlock(nnx.Module):
    def __init__(self, width, hidden, *, rngs):
        self.wi, self.wo = (
            nnx.Linear(width, hidden, rngs=rngs),
            nnx.Linear(hidden, width, rngs=rngs),
        )

    def __call__(self, x):
        return self.wo(nnx.gelu(self.wi(x)))


class Block(nnx.Module):
    def __init__(self, width, heads, hidden, *, rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.mlp = MlpBlock(width, hidden, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.ln1(x), mask=mask)
        return x + self.mlp(self.ln2(x))


def sinusoids(rows, width):
    angle = np.arange(rows)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angle), np.cos(angle)], -1).astype(np.float32)


class LanguageModel(nnx.Module):
    def __init__(self, *, vocab=61, width=16, heads=4, hidden=32, layers=2, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = sinusoids(8, width)
        self.blocks = nnx.List([Block(width, heads, hidden, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.positions
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


class GemmaAttention(nnx.Module):
    def __init__(self, width, heads, kv_heads, *, rngs):
        self.head_dim = width // heads
        self.q = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(width, kv_heads * self.head_dim, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(width, kv_heads * self.head_dim, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        q, k, v = (
            y.reshape(*y.shape[:2], -1, self.head_dim) for y in (self.q(x), self.k(x), self.v(x))
        )
        q = q.reshape(*q.shape[:2], k.shape[2], -1, self.head_dim)
        scores = jnp.einsum("bsngd,btnd->bngst", q, k) / np.float32(self.head_dim**0.5)
        scores = 50 * jnp.tanh(scores / 50)
        scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -1e30)
        y = jnp.einsum("bngst,btnd->bsngd", jax.nn.softmax(scores), v)
        return self.o(y.reshape(*y.shape[:2], -1))


class GemmaBlock(nnx.Module):
    def __init__(self, width, heads, kv_heads, hidden, *, rngs):
        self.pre, self.post = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = GemmaAttention(width, heads, kv_heads, rngs=rngs)
        self.gate, self.up = (
            nnx.Linear(width, hidden, use_bias=False, rngs=rngs) for _ in range(2)
        )
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.pre(x))
        y = self.post(x)
        return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))


class Gemma(nnx.Module):
    def __init__(self, *, vocab=61, width=32, heads=8, kv_heads=4, hidden=32, layers=2, rngs):
        self.embedder = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List(
            [GemmaBlock(width, heads, kv_heads, hidden, rngs=rngs) for _ in range(layers)]
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embedder(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class VisionTransformer(nnx.Module):
    def __init__(self, *, width=16, heads=4, hidden=32, layers=2, classes=10, rngs):
        self.patches = nnx.Conv(3, width, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, 17, width)))
        self.blocks = nnx.List([Block(width, heads, hidden, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.zeros_like(x[:, :1]) + self.token[...]
        x = jnp.concatenate([token, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
