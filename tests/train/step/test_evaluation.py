"""Tests of train/step/evaluation.py: the sample of a run."""

import jax
import numpy as np
import pytest

from train.step.evaluation import generate
from train.step.mesh import make_mesh


def test_the_same_state_gives_the_same_text(config, trainer):
    prompt, state = np.arange(17), trainer.init()
    used, text = generate(trainer, state, prompt, config)
    assert used == list(range(12)), "eval.sample_tokens=4 of 16 leave room for 12 tokens of the prompt"
    assert len(text) == 4
    assert all(0 <= token < config.model.vocab_size for token in text)
    assert (used, text) == generate(trainer, state, prompt, config)


def test_near_temperature_zero_every_token_is_the_most_likely_one(config, trainer, replace):
    """The reference has other padding on the right, so this also proves that the padding has no influence."""
    state = trainer.init()
    config = replace(config, eval={"temperature": 1e-6})
    used, text = generate(trainer, state, np.arange(17), config)
    window = np.full((config.data.batch_size, config.data.sequence_length), 99, np.int32)
    window[:, : len(used)] = used
    forward = jax.jit(lambda params, window: trainer.model(params)(window))
    for position, token in enumerate(text, start=len(used)):
        logits = np.asarray(forward(state.params, jax.device_put(window, trainer.abstract_batch()[0].sharding)))
        assert token == logits[0, position - 1].argmax()
        window[:, position] = token


@pytest.mark.slow
def test_the_text_is_the_same_on_a_mesh_that_splits_sequences(config, replace, trainer_of):
    texts = []
    for sizes in ({"data": 2, "context": 2, "model": 2}, {"data": 2, "model": 4}):
        now = replace(config, mesh={"context": 1} | sizes, eval={"temperature": 1e-6})
        with jax.set_mesh(make_mesh(now.mesh)):
            trainer = trainer_of(now, jax.sharding.get_mesh())
            texts.append(generate(trainer, trainer.init(), np.arange(17), now))
    assert texts[0] == texts[1]
