"""Tests of the context axis: losses, text and checkpoints are the same as on a mesh that does not split sequences."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from train.config import MeshConfig
from train.data.batches import TrainingBatches, split
from train.data.corpus import open_corpora
from train.lifecycle.errors import InputError
from train.run import main
from train.step.mesh import infer_sizes, make_mesh, sequence_order
from train.step.run_sample import generate


def on(config, **mesh):
    return dataclasses.replace(config, mesh=MeshConfig(**mesh))


def losses(config, trainer_of, steps=20):
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        training, _ = split(open_corpora(config.data, vocab_size=128), config)
        batches, trainer = TrainingBatches(training, config, mesh), trainer_of(config, mesh)
        state, history = trainer.init(), []
        for _ in range(steps):
            state, metrics = trainer.train_step(state, *next(batches))
            history.append(float(metrics["loss"]))
    return history


SPLIT_UP, WHOLE = {"data": 2, "context": 2, "model": 2}, {"data": 2, "model": 4}


@pytest.mark.slow
@pytest.mark.parametrize("split_up", [SPLIT_UP, {"data": 1, "context": 4, "model": 2}], ids=str)
def test_losses_match_those_of_whole_sequences(split_up, config, trainer_of):
    split_up = losses(on(config, **split_up), trainer_of)
    np.testing.assert_allclose(split_up, losses(on(config, **WHOLE), trainer_of), atol=1e-4)
    assert split_up[-1] < split_up[0]


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


@pytest.mark.slow  # test_run.py continues a run with other data and model axes
def test_a_run_continues_with_sequences_split_and_back(preset, tmp_path):
    def run(workdir, steps, *options):
        command = [
            str(preset("auto")),
            "--workdir",
            str(tmp_path / workdir),
            "--steps",
            str(steps),
            "--mesh.model",
            "2",
        ]
        assert main([*command, "--eval.sample_tokens", "0", "--eval.every", "0", *options]) == 0
        return [json.loads(line)["loss"] for line in (tmp_path / workdir / "metrics.jsonl").read_text().splitlines()]

    straight = run("one", 9, "--mesh.data", "4")
    run("two", 3, "--mesh.data", "4")
    run("two", 6, "--mesh.data", "1", "--mesh.context", "4")
    np.testing.assert_allclose(run("two", 9, "--mesh.data", "4"), straight, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"data": 2, "context": 3}, "mesh.data=2 x mesh.context=3 x mesh.model=1 must multiply to the number of"),
        ({"context": 0}, "mesh.context must be at least 1, or -1 to infer it: got 0"),
    ],
)
def test_a_mesh_that_does_not_match_the_devices_is_refused(mesh, message):
    with pytest.raises(InputError, match=message):
        make_mesh(MeshConfig(**mesh))


def test_a_size_is_inferred_beside_the_context_axis():
    assert infer_sizes({"data": -1, "context": 2, "model": 2}, 8) == {"data": 2, "context": 2, "model": 2}
