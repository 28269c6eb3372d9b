"""The sample of a run: what its model writes after the first tokens of the validation data."""

import jax
import numpy as np

from models.generation import Generator, Sampling
from train.config import Config
from train.data.corpus import Corpus
from train.data.tokenizer import decode_bytes
from train.step.trainer import Trainer, TrainState

PROMPT_TOKENS = 32  # most tokens of the prompt


def generate(trainer: Trainer, state: TrainState, prompt: np.ndarray, config: Config) -> tuple[list[int], list[int]]:
    """Continues a prompt by `eval.sample_tokens` tokens, drawn with `eval.temperature`.

    The random key is that of the run with the step folded in, so the same checkpoint gives the same text.

    Returns:
      The first tokens of the prompt, of which at most PROMPT_TOKENS are used, and no more than a sequence of training
      has room for beside the generated ones; and the generated tokens.
    """
    length, count = config.data.sequence_length, config.eval.sample_tokens
    used = prompt[: min(PROMPT_TOKENS, length - count, prompt.size)]
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    generator = Generator(trainer.model, batch=1, length=used.size + count)
    sampling = Sampling(key, np.float32(config.eval.temperature))
    parts = generator.run(trainer.evaluated(state), used, sampling, count=count)
    return used.tolist(), np.concatenate(list(parts), axis=1)[0].tolist()


def render(corpus: Corpus, prompt: list[int], generated: list[int]) -> str:
    """Formats the prompt and its continuation, as text if the tokens are bytes or have a tokenizer, else as ids."""
    if corpus.tokenizer is None and not corpus.is_text:
        return f"{prompt} \u2502 {generated}"
    decode = corpus.tokenizer.decode if corpus.tokenizer else decode_bytes
    return f"{decode(prompt)}\u2502{decode(generated)}"
