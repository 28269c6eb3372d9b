"""A run whose mesh and micro-batches change again and again has the losses of a run on one mesh."""

import itertools
import random

import jax
import numpy as np
import pytest

from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import identify_run
from train.data.batches import TrainingBatches, split
from train.data.corpus import open_corpora
from train.step.mesh import make_mesh

CHANGES = 5
STEPS_BETWEEN = 5
MESHES = [
    {"data": data, "fsdp": fsdp, "context": context, "model": 8 // (data * fsdp * context)}
    for data, fsdp, context in itertools.product((1, 2, 4, 8), repeat=3)
    if 8 % (data * fsdp * context) == 0
]


@pytest.fixture
def train(config, replace, trainer_of, tmp_path):
    """A function that continues the run in a folder on a mesh for some steps, and returns their
    losses.
    """
    learning = {"learning_rate": 1e-3, "warmup_steps": 0, "schedule": "constant"}
    config = replace(config, optimizer=learning, data={"batch_size": 16})
    corpora = open_corpora(config.data, vocab_size=128)

    def train(folder: str, sizes: dict[str, int], steps: int, parts: int = 1) -> list[float]:
        on_mesh = replace(config, mesh=sizes, data={"microbatches": parts})
        mesh = make_mesh(on_mesh.mesh)
        identity = identify_run(on_mesh, {})
        with jax.set_mesh(mesh), Checkpoints(tmp_path / folder, keep=1) as checkpoints:
            trainer = trainer_of(on_mesh, mesh)
            batches = TrainingBatches(split(corpora, on_mesh)[0], on_mesh, mesh)
            start = checkpoints.choose(None)
            if start:
                state, record, _ = checkpoints.restore(start, trainer.abstract_state(), identity)
                batches.set_state(record.data)
            else:
                state = trainer.init()
            step, losses = trainer.compile_train_step(), []
            for _ in range(steps):
                state, metrics = step(state, *next(batches))
                losses.append(float(metrics["loss"]))
            checkpoints.save(
                start + steps, state, data=batches.get_state(), tokens=0, identity=identity
            )
            checkpoints.wait()
        return losses

    return train


@pytest.mark.slow
def test_losses_do_not_depend_on_random_changes_of_the_mesh(train):
    dice = random.Random(0)
    meshes = dice.sample(MESHES, CHANGES + 1)
    expected = train("one", MESHES[4], STEPS_BETWEEN * len(meshes))
    assert expected[-1] < expected[0] - 0.3, "the run must learn something"
    losses = []
    for mesh in meshes:
        losses += train("changing", mesh, STEPS_BETWEEN, dice.choice((1, 2)))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
def test_on_one_mesh_the_losses_are_equal_and_a_step_that_is_left_out_is_noticed(train):
    """The negative test: the same comparison fails if one step is missing."""
    expected = train("one", MESHES[4], 4, parts=2)
    losses = train("changing", MESHES[4], 2, parts=2)
    assert losses + train("changing", MESHES[4], 2, parts=2) == expected  # exactly
    losses = train("gap", MESHES[4], 2, parts=2)
    train("gap", MESHES[4], 1, parts=2)
    losses += train("gap", MESHES[4], 2, parts=2)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
