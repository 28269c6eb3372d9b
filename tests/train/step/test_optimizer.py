"""Tests of train/step/optimizer.py: weight decay, the learning rate, clipping, and which updates
are skipped.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import identify_run
from train.config import OptimizerConfig, SkipConfig
from train.step.optimizer import (
    STEPS_BEFORE,
    GuardState,
    decay_mask,
    init_guard,
    is_on,
    judge,
    make_optimizer,
    make_schedule,
)
from train.step.trainer import Trainer


def test_kernels_decay_and_nothing_else_does(config, mesh):
    params = Trainer(config, mesh).abstract_state().params
    leaves = jax.tree_util.tree_leaves_with_path(decay_mask(params))
    decays = {
        jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in leaves
    }
    assert any(decays.values())
    assert not all(decays.values())
    for name, value in decays.items():
        assert value == name.endswith(".kernel"), name


def test_a_parameter_with_an_unknown_name_is_refused():
    with pytest.raises(
        ValueError,
        match=r"parameter head.blend must end in one of \['bias', 'down', 'embedding', 'ga",
    ):
        decay_mask({"head": {"blend": jnp.ones(3)}})


def test_without_a_gradient_only_kernels_shrink():
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5), steps=10
    )
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones((2, 2)), "embedding": jnp.ones((2, 2))}
    with jax.numpy_dtype_promotion("standard"):
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = jax.jit(optimizer.update)(zeros, jax.jit(optimizer.init)(params), params)
    rate = float(make_schedule(OptimizerConfig(learning_rate=0.1, warmup_steps=0), steps=10)(0))
    np.testing.assert_allclose(updates["kernel"], -0.5 * rate, rtol=1e-6)
    assert not np.any(updates["scale"])
    assert not np.any(updates["embedding"])


@given(steps=st.integers(1, 200), warmup=st.integers(0, 100), percent=st.integers(0, 100))
def test_the_learning_rate_rises_then_falls_to_the_floor(steps, warmup, percent):
    floor = percent / 100
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=warmup, decay_floor=floor)
    with jax.numpy_dtype_promotion("standard"):
        schedule = make_schedule(config, steps=steps)
        # the same shape each time, because each shape is compiled
        rates = np.asarray(schedule(np.arange(200)))[:steps]
    peak = min(max(warmup - 1, 0), steps - 1)
    assert np.all(rates > 0) or floor == 0
    assert np.all(np.diff(rates[: peak + 1]) > 0)
    assert np.all(np.diff(rates[peak:]) <= 1e-6)
    if warmup:
        np.testing.assert_allclose(rates[peak], 2.0 * (peak + 1) / warmup, rtol=1e-5)
    if steps > warmup:
        np.testing.assert_allclose(rates[-1], 2.0 * floor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("schedule", "expected"), [
    ("cosine", [1.0, 1.0 - 0.9 * (1 - np.cos(np.pi / 2)) / 2, 0.1]),
    ("linear", [1.0, 0.55, 0.1]),
    ("wsd", [1.0, 1.0, 0.1]),
    ("constant", [1.0, 1.0, 1.0]),
])  # fmt: skip
def test_the_schedules_at_their_peak_in_the_middle_and_at_the_end(schedule, expected):
    config = OptimizerConfig(
        learning_rate=1.0, warmup_steps=20, decay_floor=0.1, decay_fraction=0.2, schedule=schedule
    )
    with jax.numpy_dtype_promotion("standard"):
        rates = np.asarray(make_schedule(config, steps=120)(np.arange(120)))
    np.testing.assert_allclose(rates[[19, 69, 119]], expected, rtol=1e-5)
    if schedule == "wsd":
        np.testing.assert_allclose(rates[[95, 107]], [1.0, 0.55], rtol=1e-5)


def test_gradients_are_scaled_down_to_the_norm():
    # Adam's update does not depend on the scale of the gradient, so the test looks at its first
    # moment, which is (1 - b1) * gradient after one update.
    optimizer = make_optimizer(OptimizerConfig(clip_norm=1.0, b1=0.9), steps=10)
    params = {"kernel": jnp.zeros(4)}
    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(optimizer.init)(params)
        _, state = jax.jit(optimizer.update)({"kernel": jnp.full(4, 100.0)}, state, params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,)]
    # four equal parts of a vector of norm 1
    np.testing.assert_allclose(moments[0], 0.1 * 0.5, rtol=1e-5)


def judge_all(config, norms, loss=1.0):
    guard, skipped = init_guard(), []
    for norm in norms:
        skip, guard = judge(guard, jnp.float32(loss), jnp.float32(norm), config)
        skipped.append(bool(skip))
    return skipped, guard


def test_nothing_is_skipped_by_default():
    assert not is_on(SkipConfig())
    assert judge_all(SkipConfig(), [1.0, np.nan, 1e9])[0] == [False] * 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_skipped_and_not_remembered(bad):
    skipped, guard = judge_all(SkipConfig(nonfinite=True), [2.0, bad, 2.0])
    assert skipped == [False, True, False]
    assert (float(guard.norm), int(guard.applied), int(guard.skipped)) == (2.0, 2, 1)
    assert judge_all(SkipConfig(nonfinite=True), [2.0], loss=bad)[0] == [True]


def test_a_spike_is_skipped_once_the_usual_norm_is_known():
    usual = [1.0] * STEPS_BEFORE
    assert judge_all(SkipConfig(spike_factor=10.0), [*usual, 9.0, 15.0, 100.0])[0][-3:] == [
        False,
        True,
        True,
    ]
    assert not any(judge_all(SkipConfig(spike_factor=10.0), [*usual[1:], 100.0])[0]), (
        "one step too early"
    )


def test_what_is_not_finite_is_not_the_usual_norm():
    norms = [np.nan, *[1.0] * STEPS_BEFORE, 100.0]
    skipped, guard = judge_all(SkipConfig(spike_factor=5.0), norms)
    assert skipped == [False] * (len(norms) - 1) + [True]
    assert float(guard.norm) == 1.0


def test_a_run_that_begins_to_skip_where_it_continues_learns_its_usual_norm_first(
    config, mesh, replace
):
    """Its first norm may be far below those that follow."""
    skip = SkipConfig(spike_factor=5.0)
    trainer = Trainer(replace(config, skip=dataclasses.asdict(skip)), mesh)
    of_checkpoint = dataclasses.replace(trainer.init(), step=jnp.int32(100), guard=None)
    guard = trainer.complete(of_checkpoint).guard
    for norm in [0.1, *[1.0] * (STEPS_BEFORE - 1)]:
        is_skipped, guard = judge(guard, jnp.float32(1), jnp.float32(norm), skip)
        assert not is_skipped
    assert judge(guard, jnp.float32(1), jnp.float32(100), skip)[0]


@pytest.mark.slow
def test_a_checkpoint_keeps_what_the_guard_remembers_and_one_without_it_gets_it(
    config, replace, mesh, tmp_path
):
    guarded = replace(config, skip={"nonfinite": True})
    trainer, identity = Trainer(guarded, mesh), identify_run(config, {})
    state = dataclasses.replace(trainer.init(), step=jnp.int32(3))
    state = dataclasses.replace(state, guard=GuardState(jnp.float32(2), jnp.int32(5), jnp.int32(1)))
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step, one in ((1, state), (2, dataclasses.replace(state, guard=None))):
            checkpoints.save(step, one, data={}, tokens=0, identity=identity)
            checkpoints.wait()
        kept, bare = (
            checkpoints.restore(step, trainer.abstract_state(), identity)[0] for step in (1, 2)
        )
    assert [float(value) for value in kept.guard] == [2, 5, 1]
    assert bare.guard is None
    assert [float(value) for value in trainer.complete(bare).guard] == [0, 0, 0]
