"""Tests that one row, such as a class token, is taken from padded rows that are split over the axis.

docs/your_model.md names the expression: it moves one row of each sequence, and not the sequences.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.nn.conftest import ROWS, ones

pytestmark = pytest.mark.usefixtures("quick_compile")
PADDED = 20  # a class token and 16 patches, padded for four devices


def first_row(y):
    return jnp.sum(y, axis=1, where=(jnp.arange(y.shape[1]) == 0)[:, None])


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_one_row_moves_and_its_value_and_gradient_are_exact(mesh_of, axis_type):
    x = np.random.default_rng(0).standard_normal((2, PADDED, 16)).astype(np.float32)
    with jax.set_mesh(mesh_of(2, 4, axis_type)):
        run = jax.jit(jax.value_and_grad(lambda y: jnp.sin(first_row(y)).sum())).lower(ones(x.shape, ROWS)).compile()
        value, dx = run(jax.device_put(x, ROWS))
    moved = re.findall(r" = (\S+?)\{\S* (all-[a-z]+|reduce-scatter|collective-permute)\(", run.as_text())
    assert [found for found in moved if found[0] != "f32[]"] == [("f32[1,16]", "all-reduce")]
    np.testing.assert_allclose(value, np.sin(x[:, 0]).sum(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(dx)[:, 0], np.cos(x[:, 0]), rtol=1e-6, atol=1e-6)
    assert not np.asarray(dx)[:, 1:].any()


def test_an_index_is_refused_by_jax(mesh_of):
    """The negative test: when JAX takes it, the passage in docs/your_model.md is to go."""
    with jax.set_mesh(mesh_of(2, 4)), pytest.raises(Exception, match="slicing on sharded dims"):
        jax.jit(lambda y: y[:, 0])(ones((2, PADDED, 16), ROWS))
