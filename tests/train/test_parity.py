"""Twenty training steps give the same losses on every mesh and with every backend."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs.tiny import tiny
from models.transformer import TransformerConfig
from train.config import DataConfig, OptimizerConfig
from train.step import Trainer

STEPS = 20
CONFIG = dataclasses.replace(
    tiny(),
    steps=STEPS,
    model=TransformerConfig(vocab_size=64, layers=2, width=32, heads=8, kv_heads=8, mlp_width=64),
    data=DataConfig(sequence_length=16, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
)


def losses(data, model, backend):
    mesh = jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model])
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        trainer = Trainer(dataclasses.replace(CONFIG, backend=backend), mesh)
        state, history = trainer.init(), []
        for _ in range(STEPS):
            # Each token is half of the one before, rounded: something that twenty steps can begin to learn.
            first = rng.integers(0, 64, (8, 1))
            batch = (first >> np.arange(17) % 6).astype(np.int32)
            state, metrics = trainer.train_step(
                state, *(jax.device_put(t, P("data", None)) for t in (batch[:, :-1], batch[:, 1:]))
            )
            history.append(float(metrics["loss"]))
    return history


@pytest.fixture(scope="module")
def reference():
    return losses(1, 1, "none")


@pytest.mark.parametrize(("data", "model", "backend"), [
    (1, 1, "xla"), (1, 8, "xla"), (8, 1, "xla"), (2, 4, "xla"), (2, 4, "none"),
    pytest.param(2, 4, "xla", marks=[pytest.mark.optimized, pytest.mark.slow]),  # as a run has it
    *(pytest.param(*mesh, "none", marks=pytest.mark.slow) for mesh in [(1, 8), (8, 1)]),
])  # fmt: skip
def test_losses_are_those_of_one_device(reference, data, model, backend):
    np.testing.assert_allclose(losses(data, model, backend), reference, atol=1e-4)


def test_the_model_learns_meanwhile(reference):
    assert reference[-1] < 0.8 * reference[0]
