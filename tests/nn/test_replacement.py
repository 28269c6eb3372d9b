"""Stacks of layers, which nnx.vmap makes for nnx.scan, become stacks of parallel layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import COLUMNS, ROWS, assert_close, assert_model_close, drawn, ones

pytestmark = pytest.mark.usefixtures("quick_compile")

RULES = {"layers.attention": "attention", "layers.up": "column", "layers.down": "row"}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, normalize_qk=True, rngs=rngs)
        self.up = nnx.LoRA(32, 2, 16, base_module=nnx.Linear(32, 16, rngs=rngs), rngs=rngs)
        self.down = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Scanned(nnx.Module):
    """A model as users of Flax write it, with metadata of the stack or without."""

    def __init__(self, metadata, out_axes=0):
        self.metadata = metadata

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=out_axes, transform_metadata=metadata)
        def stack(rngs):
            return Block(rngs)

        self.layers = stack(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=self.metadata)
        @nnx.remat
        def run(layer, x):
            return layer(x)

        return run(self.layers, x)


@nnx.jit
def step(model, x):
    def loss(model):
        y = model(x)
        return jnp.sum(jnp.sin(y)), y

    return nnx.grad(loss, has_aux=True)(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis_type", "metadata"),
    [
        (AxisType.Explicit, {nnx.PARTITION_NAME: None}),
        (AxisType.Explicit, {}),
        (AxisType.Auto, {nnx.PARTITION_NAME: None}),
    ],
)
def test_a_scanned_model_computes_what_it_did(mesh_of, axis_type, metadata):
    model, x = drawn(lambda: Scanned(metadata)), np.random.default_rng(0).standard_normal((2, 8, 32)).astype(np.float32)
    want, want_y = step(model, x)
    with jax.set_mesh(mesh_of(2, 4, axis_type)):
        done = fa.nn.parallelize(model, RULES, verbose=False)
        assert [found.after for found in done] == ["ParallelAttention", "RowParallelLinear", "ParallelLoRA"]
        assert model.layers.down.kernel.shape == (3, 16, 32)
        assert model.layers.down.kernel[...].sharding.spec == P(None, "model", None)
        assert model.layers.down.kernel.get_metadata()["out_sharding"] == (None, "model", None)
        got, y = step(model, jax.device_put(x, ROWS))
        if axis_type == AxisType.Explicit:
            assert jax.typeof(got["layers"]["down"]["kernel"][...]).sharding.spec == P(None, "model", None)
    assert_close(y, want_y, "float32", "y")
    assert_model_close(got, want)


def test_an_abstract_stack_is_loaded_afterwards(mesh_of):
    plain = drawn(lambda: Scanned({}))
    with jax.set_mesh(mesh_of(2, 4)):
        model = nnx.eval_shape(lambda: Scanned({}))
        fa.nn.parallelize(model, RULES, verbose=False)
        assert isinstance(model.layers.down.kernel.get_value(), jax.ShapeDtypeStruct)
        loaded = fa.nn.load(model, plain)
    assert loaded.reshaped["layers.attention.query.kernel"] == ((3, 32, 4, 8), (3, 32, 32))
    assert model.layers.attention.query.kernel[...].sharding.spec == P(None, None, "model")
    np.testing.assert_array_equal(model.layers.down.kernel[...], plain.layers.down.kernel[...])


def test_a_stack_is_called_in_a_scan(mesh_of):
    with jax.set_mesh(mesh_of(2, 4)):
        model = nnx.eval_shape(lambda: Scanned({}))
        fa.nn.parallelize(model, RULES | {"layers.up": "row"}, verbose=False)
        model = drawn(lambda: model)
        for layer in (model.layers.down, model.layers.attention, model.layers.up):
            x = ones(
                (2, 8, 16 if layer is model.layers.down else 32), ROWS if layer is model.layers.attention else COLUMNS
            )
            with pytest.raises(ValueError, match=r"\[3, \d+, \d+\] has 3 dimensions, .* this is a stack of layers, as"):
                layer(x)


def test_a_stack_along_another_dimension_is_refused(mesh_of):
    with jax.set_mesh(mesh_of(2, 4)):
        model = nnx.eval_shape(lambda: Scanned({}, out_axes=1))
        with pytest.raises(
            ValueError, match=r"its kernel is \[16, 3, 32\], .* make a stack of layers with out_axes=0 of nnx.vmap"
        ):
            fa.nn.parallelize(model, {"layers.down": "row"})
