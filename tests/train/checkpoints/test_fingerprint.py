"""Tests of train/checkpoints/fingerprint.py: it is the same on every mesh and changes with any damaged bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.checkpoints.record import fingerprint


def test_the_names_are_those_of_the_leaves():
    assert fingerprint({"a": {"b": jnp.zeros(2)}, "c": [jnp.ones(1, jnp.uint32)]}) == {"a.b": 0, "c.0": 1}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_the_fingerprint_does_not_depend_on_the_sharding(dtype):
    values = np.asarray(jax.random.normal(jax.random.key(0), (8, 16)) * 50).astype(dtype)
    prints = []
    for shape in ((1, 8), (2, 4), (8, 1)):
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        prints.append(fingerprint({"x": jax.device_put(values, jax.NamedSharding(mesh, jax.P("data", "model")))}))
    assert prints[0] == prints[1] == prints[2]


@given(element=st.integers(0, 63), bit=st.integers(0, 31))
def test_any_flipped_bit_is_detected(element, bit):
    values = np.linspace(-3, 3, 64, dtype=np.float32)
    damaged = values.copy()
    damaged.view(np.uint32)[element] ^= np.uint32(1) << np.uint32(bit)
    assert fingerprint([jnp.asarray(values)]) != fingerprint([jnp.asarray(damaged)])
