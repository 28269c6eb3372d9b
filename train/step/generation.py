"""Generation: the model continues a prompt, token by token, with a cache of keys and values. Not meant for serving.

The prompt is computed at once. Later tokens are drawn in chunks of CHUNK, each one call of a compiled program, so that
text can be shown while the rest of it is computed. The random key of a token is that of the whole text with its
position folded in, so the same seed gives the same text whatever the chunks are.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.config import Config
from train.step.trainer import Trainer, TrainState

PROMPT_TOKENS = 32  # most tokens of a prompt that the sample of a training run uses
CHUNK = 16  # tokens that are drawn in one call


class Generator:
    """Continues a prompt several times at once, with a cache of a fixed size.

    Args:
      trainer: The model's functions.
      vocab_size: The entries of the vocabulary.
      batch: The number of continuations.
      length: The tokens that the cache has room for, prompt and continuation.
    """

    def __init__(self, trainer: Trainer, *, vocab_size: int, batch: int, length: int):
        self._trainer, self._vocab_size, self._batch, self._length = trainer, vocab_size, batch, length
        self._prefill = jax.jit(self._start)
        self._continue = jax.jit(self._draw_chunk, donate_argnums=1)

    def run(
        self, params: Any, prompt: np.ndarray, key: jax.Array, *, count: int, temperature: float, top_p: float = 1.0
    ) -> Iterator[np.ndarray]:
        """Yields the next tokens of every continuation, int [batch, up to CHUNK], until there are `count` of each.

        Args:
          params: The parameters of the model.
          prompt: The tokens to continue, at least one.
          key: The random key.
          count: The tokens to draw; with those of the prompt no more than the length of the cache.
          temperature: The divisor of the logits; 0 takes the most likely token.
          top_p: Tokens are drawn from the most likely ones whose probabilities add up to this; 1 for all.
        """
        assert 1 <= prompt.size <= prompt.size + count <= self._length, "the caller checks this"
        how = np.float32(temperature), np.float32(top_p)
        tokens_BL = np.tile(prompt.astype(np.int32), (self._batch, 1))
        cache, token_B = self._prefill(params, tokens_BL, key, *how)
        drawn = [np.asarray(token_B)[:, None]]
        position, done = prompt.size, 1
        while done < count:
            yield drawn.pop()
            cache, token_B, tokens_BN = self._continue(params, cache, token_B, key, np.int32(position), *how)
            drawn.append(np.asarray(tokens_BN)[:, : count - done])
            position, done = position + CHUNK, done + CHUNK
        yield drawn.pop()

    def _model(self, params: Any, cache: Any = None) -> Any:
        model = self._trainer.model(params)
        # The last chunk may draw more tokens than are used.
        model.init_cache(self._batch, self._length + CHUNK)
        if cache is not None:
            nnx.update(model, cache)
        return model

    def _start(
        self, params: Any, tokens_BL: jax.Array, key: jax.Array, temperature: jax.Array, top_p: jax.Array
    ) -> tuple[Any, jax.Array]:
        model = self._model(params)
        logits_BV = model.decode(tokens_BL)
        token_B = self._draw(logits_BV, key, jnp.int32(tokens_BL.shape[1]), temperature, top_p)
        return nnx.state(model, nnx.Cache), token_B

    def _draw_chunk(
        self,
        params: Any,
        cache: Any,
        token_B: jax.Array,
        key: jax.Array,
        position: jax.Array,
        temperature: jax.Array,
        top_p: jax.Array,
    ) -> tuple[Any, jax.Array, jax.Array]:
        """Draws the tokens after `token_B`, which is at `position` and not in the cache yet."""

        def step(carry: tuple[Any, jax.Array], offset: jax.Array) -> tuple[tuple[Any, jax.Array], jax.Array]:
            cache, token_B = carry
            model = self._model(params, cache)
            token_B = self._draw(model.decode(token_B[:, None]), key, position + 1 + offset, temperature, top_p)
            return (nnx.state(model, nnx.Cache), token_B), token_B

        (cache, token_B), tokens_NB = jax.lax.scan(step, (cache, token_B), jnp.arange(CHUNK, dtype=jnp.int32))
        return cache, token_B, tokens_NB.T

    def _draw(
        self, logits_BV: jax.Array, key: jax.Array, position: jax.Array, temperature: jax.Array, top_p: jax.Array
    ) -> jax.Array:
        """Draws a token for every row, int32 [batch], the same on every device."""
        logits_BV = jax.sharding.reshard(logits_BV, jax.P(None, None))[:, : self._vocab_size].astype(jnp.float32)
        warm_BV = keep_most_likely(logits_BV / jnp.maximum(temperature, 1e-6), top_p)
        drawn_B = jax.random.categorical(jax.random.fold_in(key, position), warm_BV)
        return jnp.where(temperature > 0, drawn_B, jnp.argmax(logits_BV, axis=-1)).astype(jnp.int32)


def keep_most_likely(logits_BV: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns logits that are -inf but for the most likely tokens whose probabilities add up to `top_p` or more.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020).
    """
    ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    probability_BV = jax.nn.softmax(ordered_BV, axis=-1)
    before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV  # of all tokens that are more likely
    lowest_B1 = jnp.min(jnp.where(before_BV < top_p, ordered_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where((logits_BV >= lowest_B1) | (top_p >= 1), logits_BV, -jnp.inf)


def generate(trainer: Trainer, state: TrainState, prompt: np.ndarray, config: Config) -> tuple[list[int], list[int]]:
    """Continues a prompt by `eval.sample_tokens` tokens, drawn with `eval.temperature`.

    The random key is that of the run with the step folded in, so the same checkpoint gives the same text.

    Args:
      trainer: The model's functions.
      state: The train state whose parameters are used.
      prompt: Tokens to start from, of which the first are used: at most PROMPT_TOKENS, and no more than a sequence of
        training has room for beside the generated tokens.
      config: The configuration of the run.

    Returns:
      The tokens of the prompt that were used, and the generated tokens.
    """
    length, count = config.data.sequence_length, config.eval.sample_tokens
    used = prompt[: min(PROMPT_TOKENS, length - count, prompt.size)]
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    generator = Generator(trainer, vocab_size=config.model.vocab_size, batch=1, length=used.size + count)
    temperature = config.eval.temperature
    parts = generator.run(trainer.evaluated(state), used, key, count=count, temperature=temperature)
    return used.tolist(), np.concatenate(list(parts), axis=1)[0].tolist()
