"""Text that the model continues: a look at what it learned, not a server.

Every new token runs the whole window through the model once; there is no cache of keys and values. The window has the
length of training, so what is right of the text so far is padding, and a causal model does not see it.
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

PROMPT_TOKENS = 32


def generate(trainer: Trainer, state: TrainState, prompt: np.ndarray, config: Config) -> tuple[list[int], list[int]]:
    """Continues `prompt` by `eval.sample_tokens` tokens, drawn with `eval.temperature`.

    The random key is the run's, with the step folded in: the same checkpoint gives the same text.

    Args:
      prompt: tokens to start from; its first ones are used, as many as leave room, at most PROMPT_TOKENS.

    Returns:
      (prompt tokens used, tokens generated).
    """
    length, count = config.data.sequence_length, config.eval.sample_tokens
    start = min(PROMPT_TOKENS, length - count, prompt.size)
    window = np.zeros(length, np.int32)
    window[:start] = prompt[:start]
    mesh = jax.sharding.get_mesh()
    order = sequence_order(mesh, config.mesh, length)  # position of every place of the window
    window = window[order]
    rows = mesh.shape["data"]  # every device takes part: a row each, all alike
    window_BL = jax.make_array_from_callback(
        (rows, length), jax.NamedSharding(mesh, token_spec(mesh)), lambda index: np.tile(window, (rows, 1))[index]
    )
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    drawn = np.int32(start), np.int32(count), np.float32(config.eval.temperature)
    continued = _continue(trainer, order)(state.params, window_BL, key, *drawn)
    tokens = np.asarray(continued)[0, np.argsort(order)[: start + count]].tolist()
    return tokens[:start], tokens[start:]


def _continue(trainer: Trainer, order: np.ndarray) -> Callable[..., jax.Array]:
    """Returns the jitted (params, window, key, start, count, temperature) -> window with count positions filled in.

    `order` has the position of every place of the window.
    """
    place_of = np.argsort(order)

    @functools.partial(jax.jit, out_shardings=jax.P(None, None))
    def run(
        params: Any, window_BL: jax.Array, key: jax.Array, start: jax.Array, count: jax.Array, temperature: jax.Array
    ) -> jax.Array:
        def fill(position: jax.Array, window_BL: jax.Array) -> jax.Array:
            logits_BLV = jax.sharding.reshard(trainer.model(params)(window_BL), jax.P(None, None, None))
            logits_V = jax.lax.dynamic_index_in_dim(logits_BLV[0], jnp.asarray(place_of)[position - 1], keepdims=False)
            token = jax.random.categorical(
                jax.random.fold_in(key, position), logits_V.astype(jnp.float32) / temperature
            )
            places = jax.P(*jax.typeof(window_BL).sharding.spec[1:])
            here_L = jax.sharding.reshard(jnp.asarray(order) == position, places)
            return jnp.where(here_L, token.astype(jnp.int32), window_BL)

        return jax.lax.fori_loop(start, start + count, fill, window_BL)

    return run
