"""Tests of train/step/trainer.py: the train state, the training step and the validation step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.step.mesh import token_spec


@pytest.fixture
def batch(config, mesh):
    rows = jax.random.randint(jax.random.key(1), (8, 17), 0, config.model.vocab_size, jnp.int32)
    sharding = jax.NamedSharding(mesh, token_spec(mesh))
    return tuple(jax.device_put(np.asarray(part), sharding) for part in (rows[:, :-1], rows[:, 1:]))


def test_the_abstract_state_matches_the_initial_state(trainer, mesh):
    abstract, state = trainer.abstract_state(), trainer.init()
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for expected, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
    assert int(state.step) == 0


def test_moments_are_sharded_as_their_parameters(trainer):
    state = trainer.abstract_state()
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(state.params)]
    assert any("model" in spec for spec in specs)
    moments = [leaf.sharding.spec for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert moments == specs * 2


def test_repeated_steps_on_one_batch_lower_its_loss(trainer, batch):
    state, losses = trainer.init(), []
    given = jax.tree.leaves(state.params)
    step = trainer.compile_train_step()
    for _ in range(20):
        state, metrics = step(state, *batch)
        assert {name: value.dtype for name, value in metrics.items()} == dict.fromkeys(
            ("loss", "grad_norm", "learning_rate"), jnp.float32
        )
        losses.append(float(metrics["loss"]))
    assert int(state.step) == 20
    assert all(leaf.is_deleted() for leaf in given), "the state was not donated"
    assert abs(losses[0] - np.log(128)) < 1.0, "a new model should be about as good as a uniform guess"
    assert losses[-1] < losses[0] - 0.5


def test_the_gradient_norm_is_measured_before_clipping(trainer, batch):
    params = trainer.init().params
    grads = jax.jit(jax.grad(lambda params: trainer.model(params).loss(*batch)))(params)
    expected = np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(grads)))
    _, metrics = trainer.train_step(trainer.init(), *batch)
    np.testing.assert_allclose(float(metrics["grad_norm"]), expected, rtol=1e-5)


def test_steps_are_repeatable_bit_by_bit(trainer, batch):
    def run():
        state = trainer.init()
        for _ in range(3):
            state, metrics = trainer.train_step(state, *batch)
        return jax.tree.map(np.asarray, (state, metrics))

    jax.tree.map(np.testing.assert_array_equal, run(), run())


def test_validation_adds_the_losses_and_their_number(trainer, batch):
    state = trainer.init()
    once = trainer.eval_step(state.params, jnp.zeros(2), *batch)
    twice = trainer.eval_step(state.params, once, *batch)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)
    assert once[1] == 8 * 16
    loss = float(trainer.train_step(state, *batch)[1]["loss"])
    np.testing.assert_allclose(float(once[0] / once[1]), loss, rtol=1e-5)
