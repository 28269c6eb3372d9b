"""The public pair over `lax.ppermute`: what arrives, and its gradient."""

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
