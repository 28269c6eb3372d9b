"""What `measure_dispatch` measures and refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxasync import check
from tests.check.dispatch.functions import SIZE, work


@pytest.fixture(scope="module")
def x():
    return jax.block_until_ready(jnp.ones((SIZE, SIZE), jnp.float32))


def test_times_are_of_one_call_on_idle_devices(x):
    """Calls do not queue up: every earlier output is ready when a call begins."""
    fn, earlier = jax.jit(work), []

    def watched(x):
        assert all(array.is_ready() for array in earlier)
        earlier.append(fn(x))
        return earlier[-1]

    timing = check.measure_dispatch(watched, x, repeats=3)
    assert len(earlier) == 4
    assert 0 < timing.dispatch < timing.total
    assert timing.repeats == 3
    assert str(timing).startswith("the host does not wait: dispatch ")


def test_inputs_that_are_not_ready_are_waited_for(x):
    was_ready = []

    def watched(x):
        was_ready.append(x.is_ready())
        return x + 0

    check.measure_dispatch(watched, jax.jit(work)(x), repeats=1)
    assert was_ready == [True, True]


def test_a_short_function_is_not_judged():
    timing = check.measure_dispatch(jax.jit(lambda x: x + 1), jnp.ones(4), floor=10.0)
    assert timing.waits is None
    assert "too short to judge" in str(timing)


@pytest.mark.parametrize(
    ("fn", "repeats", "message"),
    [
        (lambda x: np.ones(3), 5, "must return jax arrays.*: got ndarray; pass a jitted function"),
        (lambda x: None, 5, "must return jax arrays.*: got nothing"),
        (jax.jit(lambda x: x + 1, donate_argnums=0), 5, "fn donates its arguments"),
        (jax.jit(lambda x: x), 0, "repeats must be at least 1: got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(fn, repeats, message):
    with pytest.raises(ValueError, match=message):
        check.measure_dispatch(fn, jnp.ones(4), repeats=repeats)
