"""Sampling: the model continues a prompt, to show what it has learned. This is not meant for serving.

Every new token runs the whole window through the model once; there is no cache of keys and values. The window has the
sequence length of training, and the positions after the text so far are padding, which a causal model does not attend
to.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.config import Config
from train.mesh import sequence_order, token_spec
from train.step import Trainer, TrainState

PROMPT_TOKENS = 32  # most tokens of a prompt that are used


def generate(trainer: Trainer, state: TrainState, prompt: np.ndarray, config: Config) -> tuple[list[int], list[int]]:
    """Continues a prompt by `eval.sample_tokens` tokens, drawn with `eval.temperature`.

    The random key is that of the run with the step folded in, so the same checkpoint gives the same text.

    Args:
      trainer: The model's functions.
      state: The train state whose parameters are used.
      prompt: Tokens to start from, of which the first are used: at most PROMPT_TOKENS, and no more than the window has
        room for beside the generated tokens.
      config: The configuration of the run.

    Returns:
      The tokens of the prompt that were used, and the generated tokens.
    """
    length, count = config.data.sequence_length, config.eval.sample_tokens
    start = min(PROMPT_TOKENS, length - count, prompt.size)
    window = np.zeros(length, np.int32)
    window[:start] = prompt[:start]
    mesh = jax.sharding.get_mesh()
    order = sequence_order(mesh, config.mesh, length)  # the position at every index of the window
    window = window[order]
    rows = mesh.shape["data"]  # every shard of the batch computes the same row, because every device has to take part
    window_BL = jax.make_array_from_callback(
        (rows, length), jax.NamedSharding(mesh, token_spec(mesh)), lambda index: np.tile(window, (rows, 1))[index]
    )
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    drawn = np.int32(start), np.int32(count), np.float32(config.eval.temperature)
    continued = _make_continue(trainer, order)(trainer.evaluated(state), window_BL, key, *drawn)
    tokens = np.asarray(continued)[0, np.argsort(order)[: start + count]].tolist()
    return tokens[:start], tokens[start:]


def _make_continue(trainer: Trainer, order: np.ndarray) -> Callable[..., jax.Array]:
    """Makes the jitted function (params, window, key, start, count, temperature) -> window with `count` new tokens.

    Args:
      trainer: The model's functions.
      order: The position at every index of the window, int [length].
    """
    index_of = np.argsort(order)  # the index in the window of every position

    @functools.partial(jax.jit, out_shardings=jax.P(None, None))
    def run(
        params: Any, window_BL: jax.Array, key: jax.Array, start: jax.Array, count: jax.Array, temperature: jax.Array
    ) -> jax.Array:
        def fill(position: jax.Array, window_BL: jax.Array) -> jax.Array:
            logits_BLV = jax.sharding.reshard(trainer.model(params)(window_BL), jax.P(None, None, None))
            logits_V = jax.lax.dynamic_index_in_dim(logits_BLV[0], jnp.asarray(index_of)[position - 1], keepdims=False)
            token = jax.random.categorical(
                jax.random.fold_in(key, position), logits_V.astype(jnp.float32) / temperature
            )
            spec_L = jax.P(*jax.typeof(window_BL).sharding.spec[1:])
            is_new_L = jax.sharding.reshard(jnp.asarray(order) == position, spec_L)
            return jnp.where(is_new_L, token.astype(jnp.int32), window_BL)

        return jax.lax.fori_loop(start, start + count, fill, window_BL)

    return run
