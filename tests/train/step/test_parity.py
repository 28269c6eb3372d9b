"""Tests that twenty training steps give the same losses on every mesh and with every backend."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from train.step.trainer import TrainState

STEPS = 20


@pytest.fixture
def losses(config, trainer_of):
    """A function (data, model, backend, state) -> (losses of twenty steps, state that they began with)."""

    def train(data: int, model: int, backend: str, state: TrainState | None = None) -> tuple[list[float], TrainState]:
        mesh = jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model])
        rng = np.random.default_rng(0)
        with jax.set_mesh(mesh):
            trainer, history = trainer_of(dataclasses.replace(config, backend=backend), mesh), []
            if state is None:
                state = trainer.init()
            else:
                state = jax.tree.map(
                    lambda leaf, to: jax.device_put(leaf, to.sharding), state, trainer.abstract_state()
                )
            began = jax.tree.map(np.array, state)
            for _ in range(STEPS):
                # Each token is half of the one before it, rounded down, which twenty steps can begin to learn.
                first = rng.integers(0, 64, (8, 1))
                batch = (first >> np.arange(17) % 6).astype(np.int32)
                state, metrics = trainer.train_step(
                    state, *(jax.device_put(t, P("data", None)) for t in (batch[:, :-1], batch[:, 1:]))
                )
                history.append(float(metrics["loss"]))
        return history, began

    return train


@pytest.fixture
def reference(losses):
    return losses(1, 1, "none")


@pytest.mark.parametrize(("data", "model", "backend"), [
    (1, 1, "xla"), (2, 4, "xla"), (2, 4, "none"),
    pytest.param(2, 4, "xla", marks=[pytest.mark.optimized, pytest.mark.slow]),  # the program of a real run
    *(pytest.param(*mesh, backend, marks=pytest.mark.slow) for mesh in [(1, 8), (8, 1)] for backend in ("xla", "none")),
])  # fmt: skip
def test_losses_match_those_of_one_device(reference, losses, data, model, backend):
    expected, state = reference
    # Only the meshes that split both axes draw their own parameters; the others are given those that one device drew.
    # A program that draws parameters takes as long to compile as all twenty steps take to run.
    history, began = losses(data, model, backend, None if data > 1 and model > 1 else state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), began.params, state.params)
    np.testing.assert_allclose(history, expected, atol=1e-4)


def test_the_model_learns_in_these_steps(reference):
    history, _ = reference
    assert history[-1] < 0.8 * history[0]
