"""Tests of train/step/guard.py: which updates are skipped, and what the guard remembers of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import identify_run
from train.config import SkipConfig
from train.step.guard import STEPS_BEFORE, GuardState, init_guard, is_on, judge
from train.step.trainer import Trainer


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
    assert judge_all(SkipConfig(spike_factor=10.0), [*usual, 9.0, 15.0, 100.0])[0][-3:] == [False, True, True]
    assert not any(judge_all(SkipConfig(spike_factor=10.0), [*usual[1:], 100.0])[0]), "one step too early"


def test_a_checkpoint_keeps_what_the_guard_remembers_and_one_without_it_gets_it(config, replace, mesh, tmp_path):
    guarded = replace(config, skip={"nonfinite": True})
    trainer, identity = Trainer(guarded, mesh), identify_run(config, {})
    state = dataclasses.replace(trainer.init(), step=jnp.int32(3))
    state = dataclasses.replace(state, guard=GuardState(jnp.float32(2), jnp.int32(5), jnp.int32(1)))
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step, one in ((1, state), (2, dataclasses.replace(state, guard=None))):
            checkpoints.save(step, one, data={}, tokens=0, identity=identity)
            checkpoints.wait()
        kept, bare = (checkpoints.restore(step, trainer.abstract_state(), identity)[0] for step in (1, 2))
    assert [float(value) for value in kept.guard] == [2, 5, 1]
    assert bare.guard is None
    assert [float(value) for value in trainer.complete(bare).guard] == [0, 3, 0]
