"""Stacks of layers, which nnx.vmap makes for nnx.scan, become stacks of parallel layers."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import COLUMNS, ROWS, check_replaced, drawn, ones, stack

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
        self.layers = stack(Block, transform_metadata=metadata, out_axes=out_axes)

    def __call__(self, x):
        options = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry, "transform_metadata": self.metadata}
        return nnx.scan(nnx.remat(lambda layer, x: layer(x)), **options)(self.layers, x)


@pytest.mark.slow
@pytest.mark.parametrize(("axis_type", "metadata"), [
    (AxisType.Explicit, {nnx.PARTITION_NAME: None}), (AxisType.Explicit, {}),
    (AxisType.Auto, {nnx.PARTITION_NAME: None}),
])  # fmt: skip
def test_a_scanned_model_computes_what_it_did(mesh_of, axis_type, metadata):
    def replace(model):
        done = fa.nn.parallelize(model, RULES, verbose=False)
        assert [found.after for found in done] == ["ParallelAttention", "RowParallelLinear", "ParallelLoRA"]
        assert model.layers.down.kernel.shape == (3, 16, 32)
        assert model.layers.down.kernel[...].sharding.spec == P(None, "model", None)
        assert model.layers.down.kernel.get_metadata()["out_sharding"] == (None, "model", None)
        return model

    got = check_replaced(drawn(lambda: Scanned(metadata)), mesh_of(2, 4, axis_type), replace, features=32)
    if axis_type == AxisType.Explicit:
        assert jax.typeof(got["layers"]["down"]["kernel"][...]).sharding.spec == P(None, "model", None)


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
        layers, message = model.layers, r"\[3, \d+, \d+\] has 3 dimensions, .* this is a stack of layers, as"
        for layer, features, spec in (
            (layers.down, 16, COLUMNS),
            (layers.attention, 32, ROWS),
            (layers.up, 32, COLUMNS),
        ):
            with pytest.raises(ValueError, match=message):
                layer(ones((2, 8, features), spec))


def test_a_stack_along_another_dimension_is_refused(mesh_of):
    with jax.set_mesh(mesh_of(2, 4)):
        model = nnx.eval_shape(lambda: Scanned({}, out_axes=1))
        message = r"its kernel is \[16, 3, 32\], .* make a stack of layers with out_axes=0 of nnx.vmap"
        with pytest.raises(ValueError, match=message):
            fa.nn.parallelize(model, {"layers.down": "row"})
