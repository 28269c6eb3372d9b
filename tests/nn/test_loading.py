"""Tests that plain arrays get into parallel layers under the layers' shardings, and that nothing unshards silently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import ROWS, drawn, ones

pytestmark = pytest.mark.usefixtures("quick_compile")


def plain_linear():
    return drawn(lambda: nnx.Linear(8, 12, rngs=nnx.Rngs(0)), seed=1)


def parallel_linear():
    return drawn(lambda: fa.nn.ColumnParallelLinear(8, 12, rngs=nnx.Rngs(0)), seed=2)


def gradient(layer, x):
    graph, state = nnx.split(layer)
    return jax.jit(jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x) ** 2)))(state)


@pytest.mark.parametrize("form", ["module", "state", "nested", "flat"])
def test_loading_keeps_shardings_metadata_and_gradients(mesh_of, form):
    plain = plain_linear()
    source = {
        "module": plain,
        "state": nnx.state(plain),
        "nested": nnx.to_pure_dict(nnx.state(plain)),
        "flat": {"kernel": np.asarray(plain.kernel[...]), "bias": np.asarray(plain.bias[...])},
    }[form]
    with jax.set_mesh(mesh_of(2, 4)):
        layer = parallel_linear()
        assert fa.nn.load(layer, source).names == ("bias", "kernel")
        assert layer.kernel[...].sharding.spec == P(None, "model")
        assert layer.kernel.get_metadata()["out_sharding"] == (None, "model")
        assert gradient(layer, ones((2, 8, 8), ROWS))["kernel"][...].sharding.spec == P(None, "model")
    np.testing.assert_array_equal(layer.kernel[...], plain.kernel[...])
    np.testing.assert_array_equal(layer.bias[...], plain.bias[...])


def test_plain_arrays_of_update_are_refused_and_load_mends_the_layer(mesh_of):
    plain, x = plain_linear(), np.ones((2, 8, 8), np.float32)
    with jax.set_mesh(mesh_of(2, 4)):
        layer = parallel_linear()
        nnx.update(layer, nnx.state(plain))
        with pytest.raises(ValueError, match=r"kernel \[8, 12\] must be sharded .*'model'.*flaxasync.nn.load"):
            layer(jax.device_put(x, ROWS))
        fa.nn.load(layer, plain)
        np.testing.assert_allclose(layer(jax.device_put(x, ROWS)), plain(x), rtol=1e-5, atol=1e-5)
        embed = drawn(lambda: fa.nn.VocabParallelEmbed(8, 16, rngs=nnx.Rngs(0)))
        embed.embedding.set_value(jnp.ones((8, 16)))
        with pytest.raises(ValueError, match=r"VocabParallelEmbed: the embedding \[8, 16\] must be sharded"):
            embed(jax.device_put(np.zeros((2, 8), np.int32), P("data", None)))


def test_plain_arrays_of_update_have_sharded_gradients_under_auto_axes(mesh_of):
    with jax.set_mesh(mesh_of(2, 4, AxisType.Auto)):
        layer = parallel_linear()
        nnx.update(layer, nnx.state(plain_linear()))
        assert gradient(layer, ones((2, 8, 8), ROWS))["kernel"][...].sharding.spec == P(None, "model")
        fa.nn.load(layer, plain_linear())
        assert layer.kernel[...].sharding.spec == P(None, "model")


def test_heads_that_are_a_dimension_are_merged(mesh_of):
    plain = drawn(lambda: nnx.MultiHeadAttention(4, 16, use_bias=False, decode=False, rngs=nnx.Rngs(0)))
    with jax.set_mesh(mesh_of(2, 4)):
        layer = drawn(lambda: fa.nn.ParallelSelfAttention(16, 4, rngs=nnx.Rngs(0)))
        loaded = fa.nn.load(layer, plain)
    assert loaded.reshaped["query.kernel"] == ((16, 4, 4), (16, 16))
    assert "  reshaped: out.kernel from [4, 4, 16] to [16, 16]" in str(loaded)
    np.testing.assert_array_equal(layer.out.kernel[...], plain.out.kernel[...].reshape(16, 16))


def test_names_and_shapes_that_do_not_fit_are_told_and_nothing_is_loaded(mesh_of):
    with jax.set_mesh(mesh_of(1, 4)):
        layer = parallel_linear()
        before = np.asarray(layer.kernel[...])
        with pytest.raises(ValueError, match=r"kernel is \[12, 8\] in the source and \[8, 12\] here"):
            fa.nn.load(layer, {"kernel": np.ones((12, 8)), "bias": np.ones(12)})
        with pytest.raises(ValueError, match=r"missing in the source: bias; left over in the source: scale\.x; strict"):
            fa.nn.load(layer, {"kernel": np.ones((8, 12)), "scale": {"x": np.ones(1)}})
        np.testing.assert_array_equal(layer.kernel[...], before)
        loaded = fa.nn.load(layer, {"kernel": np.ones((8, 12)), "scale.x": np.ones(1)}, strict=False)
        assert layer.kernel[...].dtype == jnp.float32
        assert (loaded.names, loaded.missing, loaded.unexpected) == (("kernel",), ("bias",), ("scale.x",))
        assert str(loaded).splitlines()[1:] == ["  missing in the source: bias", "  left over in the source: scale.x"]


def test_a_state_of_plain_arrays_and_of_random_streams_is_loaded():
    """Without a mesh, too: what a layer then has are arrays of jax."""

    def make():
        return nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    model, plain = make(), make()
    fa.nn.load(model, nnx.state(plain))
    assert isinstance(model.layers[0].kernel.get_value(), jax.Array)
    arrays = nnx.State({"layers": {0: {name: np.ones((4, 4)[:dim]) for name, dim in (("kernel", 2), ("bias", 1))}}})
    assert fa.nn.load(model, arrays).names == ("layers.0.bias", "layers.0.kernel")
    np.testing.assert_array_equal(model.layers[0].kernel[...], np.ones((4, 4)))


def test_a_list_is_no_array():
    model = drawn(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    for source, name in [({"kernel": [[1.0]]}, "kernel is a list"), ({"a": {"b": (1.0,)}}, r"a\.b is a tuple")]:
        with pytest.raises(ValueError, match=f"load: {name}; give an array"):
            fa.nn.load(model, source)
