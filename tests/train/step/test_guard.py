"""Tests of train/step/guard.py: which updates are skipped, and what the guard remembers of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from train.config import SkipConfig
from train.step.guard import STEPS_BEFORE, init_guard, is_on, judge


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
