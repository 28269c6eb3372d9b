"""One parity check for every layer: the same parameters in plain nnx, unsharded and in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

# float32 sums in another order; bfloat16 keeps 8 bits, and partial sums travel in it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
ROWS = P("data", "model", None)


def make_mesh(data, model, axis_type=AxisType.Explicit):
    return jax.make_mesh((data, model), ("data", "model"), (axis_type,) * 2, devices=jax.devices()[: data * model])


def parameters(module):
    """{path: array}."""
    return {path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def load(layer, reference):
    """Puts the reference's parameters, name by name and in their global shapes, where the layer's lie."""
    state, plain = nnx.state(layer, nnx.Param), nnx.to_pure_dict(nnx.state(reference, nnx.Param))
    placed = jax.tree.map(
        lambda ours, theirs: jax.device_put(np.asarray(theirs), ours.sharding), nnx.to_pure_dict(state), plain
    )
    nnx.replace_by_pure_dict(state, placed)
    nnx.update(layer, state)


def assert_close(got, want, dtype, name):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape, name
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-6)
    assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def check_parity(
    make_layer,
    reference,
    x_shape,
    *,
    size,
    data=1,
    axis_type=AxisType.Explicit,
    dtype="float32",
    x_spec=ROWS,
    y_spec=ROWS,
    apply=lambda layer, x: layer(x),
):
    """Compares y, dx and every parameter's gradient; the cotangent is random, so sums over a wrong axis show."""
    rng = np.random.default_rng(sum(x_shape) + size)
    x = jnp.asarray(rng.standard_normal(x_shape), dtype)
    # Parameters that the dtype holds exactly: the comparison measures the layer, not the rounding of its input.
    rounded = jax.tree.map(lambda p: p.astype(dtype).astype(jnp.float32), nnx.state(reference, nnx.Param))
    nnx.update(reference, rounded)
    y_shape = nnx.eval_shape(apply, reference, x.astype(jnp.float32)).shape
    dy = jnp.asarray(rng.standard_normal(y_shape), dtype)

    def loss(layer, x, dy):
        y = apply(layer, x)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    grad = nnx.grad(loss, argnums=(0, 1), has_aux=True)
    (want_params, want_dx), want_y = nnx.jit(grad)(reference, x.astype(jnp.float32), dy.astype(jnp.float32))
    with jax.set_mesh(make_mesh(data, size, axis_type)):
        layer = make_layer(jnp.dtype(dtype))
        load(layer, reference)
        (params, dx), y = nnx.jit(grad)(layer, jax.device_put(x, x_spec), jax.device_put(dy, y_spec))
        if axis_type == AxisType.Explicit and size > 1 and data > 1:
            assert jax.typeof(y).sharding.spec == y_spec
    assert y.dtype == jnp.dtype(dtype)
    assert_close(y, want_y, dtype, "y")
    assert_close(dx, want_dx, dtype, "dx")
    got, want = (dict(nnx.to_flat_state(grads)) for grads in (params, want_params))
    assert got.keys() == want.keys()
    for path in want:
        assert_close(got[path][...], want[path][...], dtype, ".".join(map(str, path)))


@pytest.fixture
def parity():
    return check_parity


@pytest.fixture
def mesh_of():
    return make_mesh


@pytest.fixture
def load_from():
    return load


@pytest.fixture
def parameters_of():
    return parameters
