"""Tests of models/generation.py: which tokens may be drawn."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.generation import keep_most_likely


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.1, [1]), (0.5, [1]), (0.6, [1, 2]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_the_most_likely_tokens_that_add_up_to_top_p_are_kept(top_p, kept):
    logits = jnp.log(jnp.asarray([[0.15, 0.5, 0.3, 0.05]], jnp.float32))
    limited = np.asarray(keep_most_likely(logits, jnp.float32(top_p)))[0]
    assert np.flatnonzero(np.isfinite(limited)).tolist() == kept
    np.testing.assert_array_equal(limited[kept], np.asarray(logits)[0, kept])
