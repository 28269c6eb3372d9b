"""Tests of train/step/trainer.py: the train state, the steps, their options, and what the model
writes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.generation import Generator, Sampling
from train.step.mesh import make_mesh, token_spec
from train.step.trainer import Trainer


@pytest.fixture
def batch(config, mesh):
    rows = jax.random.randint(jax.random.key(1), (8, 17), 0, config.model.vocab_size, jnp.int32)
    sharding = jax.NamedSharding(mesh, token_spec(mesh))
    return tuple(jax.device_put(np.asarray(part), sharding) for part in (rows[:, :-1], rows[:, 1:]))


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
    assert abs(losses[0] - np.log(128)) < 1.0, (
        "a new model should be about as good as a uniform guess"
    )
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_the_gradient_norm_is_measured_before_clipping(trainer, batch):
    params = trainer.init().params
    grads = jax.jit(jax.grad(lambda params: trainer.model(params).loss(*batch)))(params)
    expected = np.sqrt(
        sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(grads))
    )
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


@pytest.mark.slow
def test_a_mixture_trains_reports_the_losses_of_its_routers_and_is_validated_without_them(
    config, mesh, replace, batch
):
    mixture = replace(config, model={"layers": 1, "experts": 4, "load_balance_weight": 0.1})
    # which compiles in half of the time
    trainer = Trainer(dataclasses.replace(mixture, backend="none"), mesh)
    state = trainer.init()
    total, lines = trainer.eval_step(state.params, jnp.zeros(2), *batch), []
    for _ in range(20):
        state, metrics = trainer.train_step(state, *batch)
        lines.append({name: float(value) for name, value in metrics.items()})
    first, last = lines[0], lines[-1]
    np.testing.assert_allclose(first["loss"], total[0] / total[1], rtol=1e-5)
    assert first["load_balance"] > 1
    assert first["router_z"] > 0
    assert last["loss"] < first["loss"] - 0.5


@pytest.mark.slow
def test_master_copies_keep_updates_that_bfloat16_rounds_away(config, mesh, replace, batch):
    """At 1 a bfloat16 cannot hold an update of 1e-4, so the scales of the norms move only with
    float32 copies.
    """
    few = {"learning_rate": 1e-4, "warmup_steps": 0, "schedule": "constant"}
    moved = {}
    for copies in (False, True):
        settings = few | {"master_copies": copies}
        trainer = Trainer(
            replace(config, model={"param_dtype": "bfloat16"}, optimizer=settings), mesh
        )
        state = trainer.init()
        for _ in range(4):
            state, _ = trainer.train_step(state, *batch)
        scale = state.params["final_norm"]["scale"]
        assert scale.dtype == (jnp.float32 if copies else jnp.bfloat16)
        assert trainer.model(state.params).final_norm.scale.dtype == jnp.bfloat16
        moved[copies] = float(jnp.max(jnp.abs(scale.astype(jnp.float32) - jnp.float32(1))))
    assert moved[True] == pytest.approx(4e-4, rel=0.2)
    assert moved[False] < 1e-6 or moved[False] > 3e-3


def test_a_run_that_begins_to_skip_continues_its_schedule(config, mesh, replace, batch):
    plain = Trainer(config, mesh)
    state, _ = plain.train_step(plain.init(), *batch)
    skipping = Trainer(replace(config, skip={"nonfinite": True}), mesh)
    guarded = jax.tree.map(jnp.copy, skipping.complete(state))
    _, wanted = plain.train_step(state, *batch)
    _, found = skipping.train_step(guarded, *batch)
    assert found["learning_rate"] == wanted["learning_rate"]


@pytest.mark.parametrize("optimizer", [{}, {"master_copies": True}])
def test_a_run_takes_parameters_of_another_type_in_its_own(config, mesh, replace, optimizer):
    own = replace(config, model={"param_dtype": "bfloat16"}, optimizer=optimizer)
    trainer = Trainer(own, mesh)
    wanted = trainer.abstract_state()
    dtype = jnp.dtype("float32" if optimizer else "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(wanted.params)} == {dtype}
    for given in (jnp.float32, jnp.bfloat16):
        params = jax.tree.map(
            lambda leaf: jnp.ones(leaf.shape, given, device=leaf.sharding), wanted.params
        )
        made = trainer.start_from(params)
        assert [leaf.dtype for leaf in jax.tree.leaves(made)] == [
            leaf.dtype for leaf in jax.tree.leaves(wanted)
        ]


@pytest.mark.slow
def test_a_first_moment_in_bfloat16_trains_as_one_in_float32_does(config, mesh, replace, batch):
    losses = {}
    for dtype in (None, "bfloat16"):
        trainer = Trainer(replace(config, optimizer={"first_moment_dtype": dtype}), mesh)
        state, losses[dtype] = trainer.init(), []
        expected = trainer.abstract_state()
        for _ in range(20):
            state, metrics = trainer.train_step(state, *batch)
            losses[dtype].append(float(metrics["loss"]))
        (adam,) = [
            part for part in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(part)
        ]
        assert {leaf.dtype for leaf in jax.tree.leaves(adam.mu)} == {
            jnp.dtype(dtype or jnp.float32)
        }
        assert {leaf.dtype for leaf in jax.tree.leaves((adam.nu, state.params))} == {
            jnp.dtype(jnp.float32)
        }
        for leaf, to in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            assert (leaf.dtype, leaf.sharding.is_equivalent_to(to.sharding, leaf.ndim)) == (
                to.dtype,
                True,
            )
    assert losses["bfloat16"] != losses[None]
    # An element of bfloat16 has 8 bits, so updates differ by 0.4 % at most.
    np.testing.assert_allclose(losses["bfloat16"], losses[None], rtol=0.01)
    assert losses["bfloat16"][-1] < losses["bfloat16"][0] - 0.5


def is_adam(part):
    return isinstance(part, optax.ScaleByAdamState)


@pytest.mark.slow
def test_documents_do_not_see_each_other(config, mesh, trainer_of):
    """The logits of a document do not depend on the one before it, with segment ids; without them
    they do.
    """
    trainer = trainer_of(config, mesh)
    params = trainer.init().params
    spec = jax.NamedSharding(mesh, jax.P("data", None))
    dice = np.random.default_rng(1)
    tokens = dice.integers(1, 128, (2, 16)).astype(np.int32)
    other = np.concatenate([dice.integers(1, 128, (2, 8)), tokens[:, 8:]], axis=1).astype(np.int32)
    segments = jax.device_put(
        np.repeat([[0, 1]], 8, axis=1).repeat(2, axis=0).astype(np.int32), spec
    )

    @jax.jit
    def logits(params, *batch):
        return jax.sharding.reshard(trainer.model(params)(*batch), jax.P("data", None, None))

    apart = [
        np.asarray(logits(params, jax.device_put(x, spec), segments))[:, 8:]
        for x in (tokens, other)
    ]
    together = [np.asarray(logits(params, jax.device_put(x, spec)))[:, 8:] for x in (tokens, other)]
    np.testing.assert_allclose(apart[0], apart[1], rtol=1e-4, atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 1e-3


def most_likely(trainer, state, prompt):
    """Returns the four most likely tokens after a prompt."""
    generator = Generator(trainer.model, batch=1, length=len(prompt) + 4)
    sampling = Sampling(jax.random.key(0), np.float32(0))
    parts = generator.run(state.params, np.array(prompt, np.int32), sampling, count=4)
    return np.concatenate(list(parts), axis=1)[0].tolist()


@pytest.mark.slow
def test_every_token_of_a_generated_text_is_the_most_likely_one(config, trainer):
    """The reference has other padding on the right, so this also proves that the padding has no
    influence.
    """
    state = trainer.init()
    prompt = list(range(12))
    window = np.full((config.data.batch_size, config.data.sequence_length), 99, np.int32)
    window[:, : len(prompt)] = prompt
    forward = jax.jit(lambda params, window: trainer.model(params)(window))
    for position, token in enumerate(most_likely(trainer, state, prompt), start=len(prompt)):
        logits = np.asarray(
            forward(state.params, jax.device_put(window, trainer.abstract_batch()[0].sharding))
        )
        assert token == logits[0, position - 1].argmax()
        window[:, position] = token


@pytest.mark.slow
def test_the_text_is_the_same_on_a_mesh_that_splits_sequences(config, replace, trainer_of):
    texts = []
    for sizes in ({"data": 2, "context": 2, "model": 2}, {"data": 2, "model": 4}):
        now = replace(config, mesh={"context": 1} | sizes)
        with jax.set_mesh(make_mesh(now.mesh)):
            trainer = trainer_of(now, jax.sharding.get_mesh())
            texts.append(most_likely(trainer, trainer.init(), range(12)))
    assert texts[0] == texts[1]
