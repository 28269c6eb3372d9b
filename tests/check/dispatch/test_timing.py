"""What `measure_dispatch` measures and refuses, and a test of the study's explanation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxasync import check
from tests.check.dispatch.functions import SIZE, pure_callback, work

FLOOR = 0.02  # seconds


@pytest.fixture(scope="module")
def x():
    return jax.block_until_ready(jnp.ones((SIZE, SIZE), jnp.float32))


def test_times_are_of_one_call(x):
    timing = check.measure_dispatch(jax.jit(work), x, repeats=3)
    assert 0 < timing.dispatch < timing.total
    assert timing.repeats == 3
    assert str(timing).startswith("the host does not wait: dispatch ")


def test_calls_do_not_queue_up(x):
    """Each call begins on idle devices: every earlier output is ready by then."""
    fn, earlier = jax.jit(work), []

    def watched(x):
        assert all(array.is_ready() for array in earlier)
        earlier.append(fn(x))
        return earlier[-1]

    check.measure_dispatch(watched, x, repeats=3)
    assert len(earlier) == 4


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
    ("fn", "message"),
    [
        (lambda x: np.ones(3), "must return jax arrays.*: got ndarray; pass a jitted function"),
        (lambda x: None, "must return jax arrays.*: got nothing"),
        (jax.jit(lambda x: x + 1, donate_argnums=0), "fn donates its arguments"),
    ],
)
def test_what_cannot_be_measured_is_refused(fn, message):
    with pytest.raises(ValueError, match=message):
        check.measure_dispatch(fn, jnp.ones(4))


def test_repeats_must_be_a_count():
    with pytest.raises(ValueError, match="repeats must be at least 1: got 0"):
        check.measure_dispatch(jax.jit(lambda x: x), jnp.ones(4), repeats=0)


def test_a_pure_function_does_not_wait_on_the_python_path(x):
    """The study took JAX's Python dispatch for the cause of the waiting. Here it is called, through private names."""
    compiled = jax.jit(work).lower(x).compile()
    assert not check.measure_dispatch(compiled._executable.unsafe_call, x, repeats=3, floor=FLOOR).waits


def test_a_callback_waits_on_the_cpp_path_too(x):
    """The negative test: here a callback takes the C++ path, on which JAX itself would not send it."""
    compiled = jax.jit(pure_callback).lower(x).compile()
    compiled._executable.unsafe_call.has_host_callbacks = False
    assert check.measure_dispatch(compiled, x, repeats=3, floor=FLOOR).waits
    assert type(compiled._call).__name__ == "PjitFunction"
