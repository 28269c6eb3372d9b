"""Tests of the context axis: losses, text and checkpoints are the same as on a mesh that does not split sequences."""

import dataclasses

import jax
import numpy as np
import pytest

from train.config import MeshConfig
from train.data.batches import TrainingBatches, split
from train.data.corpus import open_corpora
from train.step.mesh import make_mesh, sequence_order
from train.step.run_sample import generate


def on(config, **mesh):
    return dataclasses.replace(config, mesh=MeshConfig(**mesh))


SPLIT_UP, WHOLE = {"data": 2, "context": 2, "model": 2}, {"data": 2, "model": 4}


def test_a_batch_is_laid_out_in_the_order_of_the_mesh(config):
    config = on(config, data=2, context=4)
    mesh = make_mesh(config.mesh)
    assert dict(mesh.shape) == {"data": 2, "context": 4, "model": 1}
    training, _ = split(open_corpora(config.data, vocab_size=128), config)
    tokens, targets = next(TrainingBatches(training, config, mesh))
    assert tokens.sharding.spec == jax.P("data", "context")
    back = np.argsort(sequence_order(mesh, config.mesh, 16))
    np.testing.assert_array_equal(np.asarray(tokens)[:, back][:, 1:], np.asarray(targets)[:, back][:, :-1])
    assert not np.array_equal(back, np.arange(16))


@pytest.mark.slow
def test_the_generated_text_is_the_same(config, replace, trainer_of):
    texts = []
    for mesh in (SPLIT_UP, WHOLE):
        now = replace(on(config, **mesh), eval={"temperature": 1e-6})
        with jax.set_mesh(make_mesh(now.mesh)):
            trainer = trainer_of(now, jax.sharding.get_mesh())
            texts.append(generate(trainer, trainer.init(), np.arange(17), now))
    assert texts[0] == texts[1]
