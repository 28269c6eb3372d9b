"""One parity check for every layer: the same parameters in plain nnx, unsharded and in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa

# In float32 only the order of additions differs; bfloat16 keeps 8 bits, and partial sums travel in
# it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
ROWS, COLUMNS, SAME, TOKENS = (
    P("data", "model", None),
    P("data", None, "model"),
    P("data", None, None),
    P("data", None),
)
FSDP_AXES = ("data", "fsdp", "context", "model")


def make_mesh(data=2, model=4, axis_type=AxisType.Explicit):
    return jax.make_mesh(
        (data, model), ("data", "model"), (axis_type,) * 2, devices=jax.devices()[: data * model]
    )


def make_fsdp_mesh(*sizes, axis_type=AxisType.Explicit):
    """Returns a mesh with axes for parameters that are fully sharded, and for split sequences."""
    return jax.make_mesh(
        sizes, FSDP_AXES, (axis_type,) * 4, devices=jax.devices()[: np.prod(sizes)]
    )


def drawn(make, seed=0):
    """Returns the module that `make` makes, with parameters drawn by numpy, so that no initializer
    is compiled.
    """
    module, rng = nnx.eval_shape(make), np.random.default_rng(seed)

    def draw(leaf):
        fan_in = leaf.shape[-2] if len(leaf.shape) > 1 else 1
        values = rng.standard_normal(leaf.shape).astype(leaf.dtype) / np.sqrt(
            fan_in, dtype=leaf.dtype
        )
        return jax.device_put(values, getattr(leaf.sharding, "spec", leaf.sharding))

    nnx.update(module, jax.tree.map(draw, nnx.state(module)))
    return module


def stack(make, layers=3, **more):
    """Returns the layers that `make(rngs)` makes, stacked, for `scan`. `more` replaces arguments of
    `nnx.vmap`.
    """
    options = {"in_axes": 0, "out_axes": 0, "transform_metadata": {nnx.PARTITION_NAME: None}} | more
    return nnx.split_rngs(splits=layers)(nnx.vmap(make, **options))(nnx.Rngs(0))


def scan(layers, x, *args):
    """Applies layers of a stack one after the other."""
    options = {
        "in_axes": (0, nnx.Carry),
        "out_axes": nnx.Carry,
        "transform_metadata": {nnx.PARTITION_NAME: None},
    }
    return nnx.scan(lambda layer, x: layer(x, *args), **options)(layers, x)


def round_parameters(module, dtype):
    """Rounds parameters to a dtype, so that a comparison measures the layer and not the rounding of
    its input.
    """
    rounded = jax.tree.map(
        lambda p: np.asarray(p).astype(dtype).astype(np.float32), nnx.state(module, nnx.Param)
    )
    nnx.update(module, rounded)


def ones(shape, spec, dtype=np.float32):
    return jax.device_put(np.ones(shape, dtype), spec)


def saved(layer, x):
    """Returns what a layer saves for its backward pass, as abstract arrays."""
    graph, state = nnx.split(layer)
    vjp = jax.eval_shape(
        lambda state, x: jax.vjp(lambda *a: nnx.merge(graph, a[0])(a[1]), state, x)[1], state, x
    )
    return jax.tree.leaves(vjp)


def compiled(fn, layer, *args):
    """Returns the compiled program of `fn(layer, *args)` as text."""
    graph, state = nnx.split(layer)
    return (
        jax.jit(lambda state, *args: fn(nnx.merge(graph, state), *args))
        .lower(state, *args)
        .compile()
        .as_text()
    )


def permutes(layer, x):
    """Counts the permutes in the compiled value and gradient of a layer."""

    def loss(layer, x):
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(layer(x)))

    return compiled(nnx.value_and_grad(loss, argnums=(0, 1)), layer, x).count(
        " collective-permute("
    )


class Block(nnx.Module):
    """A layer of a plain model."""

    def __init__(self, rngs, **options):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, 16, decode=False, rngs=rngs, **options)
        self.up = nnx.Linear(16, 32, rngs=rngs, **options)
        self.down = nnx.Linear(32, 16, rngs=rngs, **options)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


def assert_close(got, want, dtype, name):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape, name
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-6)
    assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def call(layer, *args):
    return layer(*args)


# one function, so that a reference is compiled once for all tests
@functools.partial(nnx.jit, static_argnames="apply")
def gradients(layer, x, dy, *ids, apply=call):
    """Returns the gradients of the parameters and of x, which is None for integers, and y."""

    def loss(layer, x):
        y = apply(layer, x, *ids)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    if jnp.issubdtype(x.dtype, jnp.integer):
        params, y = nnx.grad(loss, has_aux=True)(layer, x)
        return params, None, y
    (params, dx), y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return params, dx, y


def check_parity(
    make_layer, reference, x_shape, *ids, size=None, data=1, axis_type=AxisType.Explicit, mesh=None, dtype="float32",
    x_spec=ROWS, y_spec=ROWS, apply=call, entries=None, order=slice(None),
):  # fmt: skip
    """Compares y, dx and every parameter's gradient. The cotangent is random, so a sum over a wrong
    axis shows.

    Args:
      *ids: Segment ids, if there are any; their rows are sharded over context.
      mesh: By default one of `data` x `size` devices.
      entries: The number of entries of an embedding; x are then numbers of entries.
      order: The order of the rows on the mesh.
    """
    mesh, held = mesh or make_mesh(data, size, axis_type), jnp.dtype(dtype)
    rng = np.random.default_rng(sum(x_shape) + mesh.size)
    round_parameters(reference, held)
    x = (
        rng.standard_normal(x_shape).astype(held)
        if entries is None
        else rng.integers(0, entries, x_shape, np.int32)
    )
    x_reference = x if entries else x.astype(np.float32)
    dy = rng.standard_normal(nnx.eval_shape(apply, reference, x_reference).shape).astype(held)
    want_params, *want = gradients(reference, x_reference, dy.astype(np.float32), *ids, apply=apply)
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(lambda: make_layer(held))
        fa.nn.load(layer, reference)
        x, dy = jax.device_put(x[:, order], x_spec), jax.device_put(dy[:, order], y_spec)
        got = gradients(
            layer,
            x,
            dy,
            *(jax.device_put(i[:, order], P("data", "context")) for i in ids),
            apply=apply,
        )
        y = got[-1]
        if mesh.axis_types[0] == AxisType.Explicit and min(mesh.axis_sizes) > 1:
            assert jax.typeof(y).sharding.spec == y_spec
    assert y.dtype == held
    assert_alike(got, (want_params, *(None if a is None else a[:, order] for a in want)), dtype)
    if entries:  # one addend a row: exact in any dtype
        np.testing.assert_array_equal(np.asarray(y, np.float32), want[-1])


def assert_alike(got, want, dtype="float32"):
    """Compares what `gradients` returned for two layers."""
    for name, ours, theirs in zip(("dx", "y"), got[1:], want[1:], strict=True):
        if theirs is not None:
            assert_close(ours, theirs, dtype, name)
    assert_parameters_close(got[0], want[0], dtype)


def assert_parameters_close(params, want, dtype):
    """Compares the gradients of all parameters, name by name."""
    got, want = (dict(nnx.to_flat_state(grads)) for grads in (params, want))
    assert got.keys() == want.keys()
    for path in want:
        assert_close(got[path][...], want[path][...], dtype, ".".join(map(str, path)))


def assert_model_close(got, want, tolerance=1e-5):
    """Compares gradients by their names, in units of the largest, because some, of key biases, are
    zero but for noise.

    Heads may be a dimension in the one and merged in the other.
    """
    got, want = (
        {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(state)} for state in (got, want)
    )
    assert got.keys() == want.keys()
    largest = max(np.abs(value).max() for value in want.values())
    for path, value in want.items():
        error = np.abs(got[path].reshape(value.shape) - value).max() / largest
        assert error <= tolerance, f"{'.'.join(map(str, path))}: relative error {error:.2e}"


@functools.partial(nnx.jit, static_argnames="wrt")
def sine_gradients(model, x, wrt=nnx.Param):
    """Returns the gradients of sum(sin(y)), and y."""

    def loss(model):
        y = model(x)
        return jnp.sum(jnp.sin(y)), y

    return nnx.grad(loss, argnums=nnx.DiffState(0, wrt), has_aux=True)(model)


def check_replaced(model, mesh, replace, *, spec=ROWS, wrt=nnx.Param):
    """Compares y and gradients of a model with those after `replace(model)` on a mesh. Returns the
    latter gradients.
    """
    x = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    want, want_y = sine_gradients(model, x, wrt=wrt)
    with jax.set_mesh(mesh):
        model = replace(model)
        got, y = sine_gradients(model, jax.device_put(x, spec), wrt=wrt)
    assert_close(y, want_y, "float32", "y")
    assert_model_close(got, want)
    return got
