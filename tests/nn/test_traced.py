"""Tests of models that are made and replaced in a program that is traced: by `nnx.eval_shape` and
by `nnx.jit`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType

import flaxasync as fa
from tests.nn.conftest import ROWS, Block, assert_close, drawn, make_mesh

pytestmark = pytest.mark.usefixtures("quick_compile")
AXES = [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]
X = np.random.default_rng(0).standard_normal((8, 16, 16)).astype(np.float32)


def varied(key, shape, dtype):
    """Returns the initial values of a kernel, which are compiled faster than random ones."""
    return jnp.sin(jnp.arange(math.prod(shape), dtype=dtype)).reshape(shape) / np.sqrt(
        shape[0], dtype=dtype
    )


def make_block(rngs):
    return Block(rngs, kernel_init=varied)


class Model(nnx.Module):
    """Two layers in a stack, which `nnx.vmap` makes and `nnx.scan` runs, and a plain layer with an
    annotation.
    """

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(make_block, in_axes=0, out_axes=0))(rngs)
        self.last = make_block(rngs)
        self.kept = nnx.Linear(
            16, 16, kernel_init=varied, kernel_metadata={"out_sharding": (None, "model")}, rngs=rngs
        )

    def __call__(self, x):
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.last(run(self.blocks, x))


RULES = {"**.attention": "attention", "**.up": "column", "**.down": "row"}


def make():
    model = Model()
    fa.nn.parallelize(model, RULES, verbose=False)
    return model


def values(model):
    return {
        path: np.asarray(variable[...]) for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def assert_sharded_as_annotated(model, mesh):
    state = nnx.state(model)
    for (path, found), (_, needed) in zip(
        nnx.to_flat_state(state),
        nnx.to_flat_state(nnx.get_named_sharding(state, mesh)),
        strict=True,
    ):
        value = found.get_value()
        assert value.sharding.is_equivalent_to(needed.get_value(), value.ndim), path
    assert model.blocks.up.kernel.get_metadata()["out_sharding"] == (None, None, "model")
    assert model.last.down.kernel.get_metadata()["out_sharding"] == ("model", None)
    assert model.blocks.norm.scale.get_metadata().get("out_sharding") is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the checkpoint of a parallel model, its values, and the output of the plain model on
    one device.
    """
    with jax.set_mesh(make_mesh(1, 1)):
        plain = drawn(Model)
        y = np.asarray(nnx.jit(lambda model, x: model(x))(plain, X))
    with jax.set_mesh(make_mesh(2, 4)):
        model = nnx.eval_shape(make)
        fa.nn.load(model, plain)
        path = tmp_path_factory.mktemp("checkpoint") / "model"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, nnx.state(model))
    return path, values(model), y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axis_type"),
    [((1, 8), AxisType.Auto), ((4, 2), AxisType.Explicit), ((8, 1), AxisType.Explicit)],
)
def test_a_checkpoint_is_restored_to_another_mesh(saved, shape, axis_type):
    path, want, want_y = saved
    mesh = make_mesh(*shape, axis_type)
    graph, state = nnx.get_abstract_model(make, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        model = nnx.merge(graph, checkpointer.restore(path, state))
    assert_sharded_as_annotated(model, mesh)
    got = values(model)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], strict=True)
    with jax.set_mesh(mesh):
        y = nnx.jit(lambda model, x: model(x))(model, jax.device_put(X, ROWS))
    assert_close(y, want_y, "float32", "y")


@pytest.mark.parametrize("axis_type", AXES)
def test_parameters_are_made_where_they_stay(axis_type):
    mesh = make_mesh(2, 4, axis_type)
    with jax.set_mesh(mesh):
        plain, model = nnx.jit(Model)(), nnx.jit(make)()
    assert_sharded_as_annotated(model, mesh)
    assert type(model.blocks.up) is fa.nn.ColumnParallelLinear
    want = values(plain)
    for name, value in values(model).items():
        # sines are inexact
        np.testing.assert_allclose(value, want[name].reshape(value.shape), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("axis_type", AXES)
def test_an_argument_is_replaced(axis_type):
    """`nnx.jit` hands the new layers on to the model of its caller."""
    mesh = make_mesh(2, 4, axis_type)
    with jax.set_mesh(mesh):
        model = drawn(Model)
        want = values(model)
        nnx.jit(lambda model: fa.nn.parallelize(model, RULES, verbose=False) and None)(model)
    assert type(model.last.up) is fa.nn.ColumnParallelLinear
    assert_sharded_as_annotated(model, mesh)
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, want[name].reshape(value.shape))


@pytest.mark.parametrize("axis_type", AXES)
def test_arrays_are_loaded_in_a_program(axis_type):
    mesh = make_mesh(2, 4, axis_type)
    with jax.set_mesh(make_mesh(1, 1)):
        plain = drawn(Model)

    def loaded():
        model = make()
        fa.nn.load(model, plain)
        return model

    with jax.set_mesh(mesh):
        abstract, model = nnx.eval_shape(loaded), nnx.jit(loaded)()
    assert abstract.kept.kernel.get_metadata()["out_sharding"] == (None, "model")
    assert_sharded_as_annotated(model, mesh)
    np.testing.assert_array_equal(model.kept.kernel[...], plain.kept.kernel[...])
    np.testing.assert_array_equal(model.blocks.down.kernel[...], plain.blocks.down.kernel[...])
