"""Generation: a model continues a prompt, token by token, with a cache of keys and values. Not
meant for serving.

The prompt is computed at once. Later tokens are drawn in chunks of CHUNK, each one call of a
compiled program, so that text can be shown while the rest of it is computed. The random key of a
token is that of the whole text with its position folded in, so the same seed gives the same text
whatever the chunks are.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from models.transformer import Transformer

CHUNK = 16  # tokens that are drawn in one call


class Sampling(NamedTuple):
    """How tokens are drawn.

    Attributes:
      key: The random key of the text.
      temperature: The divisor of the logits, float32; 0 takes the most likely token.
      top_p: Tokens are drawn from the most likely ones whose probabilities add up to this, float32;
        1 for all.
    """

    key: jax.Array
    temperature: np.float32 | jax.Array
    top_p: np.float32 | jax.Array = np.float32(1)


class Generator:
    """Continues a prompt several times at once, with a cache of a fixed size.

    Args:
      model: A function that makes the model of its parameters.
      batch: The number of continuations.
      length: The tokens that the cache has room for, prompt and continuation.
    """

    def __init__(self, model: Callable[[PyTree], Transformer], *, batch: int, length: int):
        self._make_model = model
        self._batch = batch
        self._length = length
        self._prefill = jax.jit(self._start)
        self._continue = jax.jit(self._draw_chunk, donate_argnums=1)

    def run(
        self, params: PyTree, prompt: np.ndarray, sampling: Sampling, *, count: int
    ) -> Iterator[np.ndarray]:
        """Yields the next tokens of every continuation, int [batch, up to CHUNK], until there are
        `count` of each.

        Args:
          params: The parameters of the model.
          prompt: The tokens to continue, at least one.
          sampling: How tokens are drawn.
          count: The tokens to draw; with those of the prompt no more than the length of the cache.
        """
        assert 1 <= prompt.size <= prompt.size + count <= self._length, "the caller checks this"
        tokens_BL = np.tile(prompt.astype(np.int32), (self._batch, 1))
        cache, token_B = self._prefill(params, tokens_BL, sampling)
        drawn = np.asarray(token_B)[:, None]
        for done in range(1, count, CHUNK):
            yield drawn
            position = np.int32(prompt.size + done - 1)
            cache, token_B, tokens_BN = self._continue(params, cache, token_B, position, sampling)
            drawn = np.asarray(tokens_BN)[:, : count - done]
        yield drawn

    def _model(self, params: PyTree, cache: nnx.State | None = None) -> Transformer:
        model = self._make_model(params)
        # the last chunk may draw more tokens than are used
        model.init_cache(self._batch, self._length + CHUNK)
        if cache is not None:
            nnx.update(model, cache)
        return model

    def _start(
        self, params: PyTree, tokens_BL: jax.Array, sampling: Sampling
    ) -> tuple[nnx.State, jax.Array]:
        model = self._model(params)
        token_B = _draw(model, tokens_BL, jnp.int32(tokens_BL.shape[1]), sampling)
        return nnx.state(model, nnx.Cache), token_B

    def _draw_chunk(
        self,
        params: PyTree,
        cache: nnx.State,
        token_B: jax.Array,
        position: jax.Array,
        sampling: Sampling,
    ) -> tuple[nnx.State, jax.Array, jax.Array]:
        """Draws the tokens after `token_B`, which is at `position` and not in the cache yet."""

        def step(
            carry: tuple[nnx.State, jax.Array], offset: jax.Array
        ) -> tuple[tuple[nnx.State, jax.Array], jax.Array]:
            cache, token_B = carry
            model = self._model(params, cache)
            token_B = _draw(model, token_B[:, None], position + 1 + offset, sampling)
            return (nnx.state(model, nnx.Cache), token_B), token_B

        (cache, token_B), tokens_NB = jax.lax.scan(
            step, (cache, token_B), jnp.arange(CHUNK, dtype=jnp.int32)
        )
        return cache, token_B, tokens_NB.T


def _draw(
    model: Transformer, tokens_BL: jax.Array, position: jax.Array, sampling: Sampling
) -> jax.Array:
    """Adds tokens to the cache and draws the one after them for every row, int32 [batch], the same
    on every device.
    """
    logits_BV = jax.sharding.reshard(model.decode(tokens_BL), jax.P(None, None))
    # without padding of the vocabulary
    logits_BV = logits_BV[:, : model.config.vocab_size].astype(jnp.float32)
    warm_BV = keep_most_likely(logits_BV / jnp.maximum(sampling.temperature, 1e-6), sampling.top_p)
    drawn_B = jax.random.categorical(jax.random.fold_in(sampling.key, position), warm_BV)
    return jnp.where(sampling.temperature > 0, drawn_B, jnp.argmax(logits_BV, axis=-1)).astype(
        jnp.int32
    )


def keep_most_likely(logits_BV: jax.Array, top_p: np.float32 | jax.Array) -> jax.Array:
    """Returns logits that are -inf but for the most likely tokens whose probabilities add up to
    `top_p` or more.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020).
    """
    ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    probability_BV = jax.nn.softmax(ordered_BV, axis=-1)
    # of all tokens that are more likely
    before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
    lowest_B1 = jnp.min(jnp.where(before_BV < top_p, ordered_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where((logits_BV >= lowest_B1) | (top_p >= 1), logits_BV, -jnp.inf)
