"""Tests that one row, such as a class token, is taken from padded rows that are split over the axis.

docs/your_model.md names the expression: it moves one row of each sequence, and not the sequences.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import flaxasync as fa
from tests.nn.conftest import ROWS, assert_close, assert_model_close, drawn, ones

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENS, PADDED = 17, 20  # a class token and 16 patches, padded for four devices


class Block(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def first_row(y):
    return jnp.sum(y, axis=1, where=(jnp.arange(y.shape[1]) == 0)[:, None])


@nnx.jit(static_argnames="take")
def gradients(model, x, take):
    def loss(model, x):
        y = take(model(x))
        return jnp.sum(jnp.sin(y)), y

    (params, dx), y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(model, x)
    return params, dx, y


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_a_class_token_of_padded_rows(mesh_of, axis_type):
    model, x = drawn(Block), np.random.default_rng(0).standard_normal((2, TOKENS, 16)).astype(np.float32)
    want, want_dx, want_y = gradients(model, x, take=lambda y: y[:, 0])
    with jax.set_mesh(mesh_of(2, 4, axis_type)):
        fa.nn.parallelize(model, {"up": "column", "down": "row"}, verbose=False)
        x = jax.device_put(np.pad(x, ((0, 0), (0, PADDED - TOKENS), (0, 0))), ROWS)
        got, dx, y = gradients(model, x, take=first_row)
    assert_close(y, want_y, "float32", "y")
    assert_close(np.asarray(dx)[:, :TOKENS], want_dx, "float32", "dx")
    assert not np.asarray(dx)[:, TOKENS:].any()
    assert_model_close(got, want)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_one_row_moves(mesh_of, axis_type):
    with jax.set_mesh(mesh_of(2, 4, axis_type)):
        y = ones((2, PADDED, 16), ROWS)
        compiled = jax.jit(jax.value_and_grad(lambda y: first_row(y).sum())).lower(y).compile().as_text()
    moved = re.findall(r" = (\S+?)\{\S* (all-[a-z]+|reduce-scatter|collective-permute)\(", compiled)
    assert [found for found in moved if found[0] != "f32[]"] == [("f32[1,16]", "all-reduce")]


def test_an_index_is_refused_by_jax(mesh_of):
    """The negative test: when JAX takes it, the passage in docs/your_model.md is to go."""
    with jax.set_mesh(mesh_of(2, 4)), pytest.raises(Exception, match="slicing on sharded dims"):
        jax.jit(lambda y: y[:, 0])(ones((2, PADDED, 16), ROWS))
