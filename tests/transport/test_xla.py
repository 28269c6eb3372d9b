"""The public pair over `lax.ppermute`: what arrives, its gradient, and the errors of misuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flaxasync as fa


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])) as mesh:
        yield mesh


def on_ring(fn, *args):
    return jax.jit(jax.shard_map(fn, in_specs=P("x"), out_specs=P("x")))(*(jax.device_put(a, P("x")) for a in args))


@pytest.mark.parametrize("shift", [1, -1, 2, 5])
def test_ppermute_brings_the_block_of_the_device_shift_before(shift):
    y = on_ring(lambda x: fa.ppermute(x, "x", shift), jnp.arange(4))
    np.testing.assert_array_equal(y, np.roll(np.arange(4), shift))


def test_start_and_done_may_have_compute_between_them():
    def f(x):
        x, future = fa.ppermute_start(x, "x")
        z = x * 10
        return z + fa.ppermute_done(x, future)

    np.testing.assert_array_equal(on_ring(f, jnp.arange(4)), np.arange(4) * 10 + np.roll(np.arange(4), 1))


def test_the_cotangent_travels_back():
    def f(x, weight):
        return jax.grad(lambda x: jnp.sum(fa.ppermute(x, "x") * weight))(x)

    weight = jnp.arange(4.0)
    np.testing.assert_array_equal(on_ring(f, jnp.ones(4), weight), np.roll(np.arange(4.0), -1))


def test_a_window_has_gradients_and_sends_what_the_start_was_given():
    def window(x, weight):
        x, future = fa.ppermute_start(x, "x")
        x, z = fa.while_travelling(x, jnp.multiply, x, weight)
        return fa.ppermute_done(2 * x, future) + z

    def gradient(x, weight):
        return jax.vjp(lambda x: window(x, weight), x)[1](weight + 1)[0]

    x, weight = jnp.arange(1.0, 5), jnp.arange(4.0)
    y, dx = on_ring(window, x, weight), on_ring(gradient, x, weight)
    np.testing.assert_array_equal(y, np.roll(x, 1) + x * weight)
    np.testing.assert_array_equal(dx, np.roll(weight + 1, -1) + weight * (weight + 1))


def test_outside_shard_map_the_error_says_where_to_call_it():
    with pytest.raises(ValueError, match=r"ppermute_start needs the mesh axis 'x' inside jax.shard_map"):
        fa.ppermute_start(jnp.ones(4), "x")


def test_an_axis_the_mesh_lacks_is_named():
    with pytest.raises(ValueError, match="mesh axis 'model'"):
        on_ring(lambda x: fa.ppermute(x, "model"), jnp.ones(4))


def test_a_future_of_another_shape_is_refused():
    def f(x):
        _, future = fa.ppermute_start(x, "x")
        return fa.ppermute_done(x[:1], future)

    with pytest.raises(ValueError, match=r"float32\[1\] with the future of float32\[2\]"):
        on_ring(f, jnp.ones(8))


def test_something_other_than_a_future_is_refused():
    with pytest.raises(ValueError, match="needs the future that ppermute_start returned: got int"):
        on_ring(lambda x: fa.ppermute_done(x, 3), jnp.ones(4))
