"""Attention layers against four nnx.Linear and a softmax that is written out, on several meshes and in both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import ROWS, SAME, assert_close, assert_parameters_close, drawn, gradients, ones, permutes

pytestmark = pytest.mark.usefixtures("quick_compile")

FEATURES, HEADS, KV_HEADS, LENGTH = 16, 4, 2, 24
TENSOR, ALONE = P("data", ("context", "model"), None), P("data", "context", None)
slow = pytest.mark.slow


def rotate(x, theta):
    """Rotates positions by complex multiplication, which is another way to the same numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * theta ** (-np.arange(half) / half)
    real = np.float64 if x.dtype == np.float64 else np.float32
    turned = jax.lax.complex(x[..., :half].astype(real), x[..., half:].astype(real))
    turned *= np.exp(1j * angle).astype(turned.dtype)
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


class PlainAttention(nnx.Module):
    def __init__(self, features, heads, kv_heads, head_dim, *, causal, rope_theta, use_bias, window, rngs, **options):
        options |= {"use_bias": use_bias, "rngs": rngs}
        self.query = nnx.Linear(features, heads * head_dim, **options)
        self.key = nnx.Linear(features, kv_heads * head_dim, **options)
        self.value = nnx.Linear(features, kv_heads * head_dim, **options)
        self.out = nnx.Linear(heads * head_dim, features, **options)
        self.head_dim, self.groups = head_dim, heads // kv_heads
        self.causal, self.rope_theta, self.window = causal, rope_theta, window

    def __call__(self, x, ids=None):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, self.head_dim) for p in (self.query, self.key, self.value))
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta), rotate(k, self.rope_theta)
        k, v = (jnp.repeat(t, self.groups, axis=2) for t in (k, v))
        distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
        allowed = np.abs(distance) < (self.window or x.shape[1])
        if self.causal:
            allowed = allowed & (distance >= 0)
        if ids is not None:
            allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(self.head_dim, dtype=x.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)), v)
        return self.out(out.reshape(*x.shape[:2], -1))


def pair(heads, kv_heads, *, head_dim=4, causal=True, rope_theta=100.0, use_bias=False, window=None, **options):
    form = {"causal": causal, "rope_theta": rope_theta, "use_bias": use_bias, "window": window}
    plain = drawn(lambda: PlainAttention(8, heads, kv_heads, head_dim, **form, rngs=nnx.Rngs(0)))

    def make(dtype):
        return fa.nn.ParallelSelfAttention(
            8, heads, kv_heads=kv_heads, head_dim=head_dim, **form, dtype=dtype, rngs=nnx.Rngs(0), **options
        )

    return make, plain


@pytest.mark.parametrize(("heads", "kv_heads", "form", "input_form"), [
    (2, 1, {}, {"size": 1}), (6, 3, {}, {"size": 3}), pytest.param(16, 8, {}, {"size": 8}, marks=slow),
    (8, 4, {"use_bias": True, "backend": "none"}, {"size": 4, "data": 2}),
    (8, 4, {"use_bias": True, "backend": "xla"}, {"size": 4, "data": 2, "axis_type": AxisType.Auto}),
    (4, 4, {"causal": False, "window": 3}, {"size": 4}),
    pytest.param(4, 4, {"rope_theta": None}, {"size": 4}, marks=slow),
    (4, 4, {}, {"size": 4, "dtype": "bfloat16"}), (4, 4, {}, {"size": 4, "x_spec": SAME, "y_spec": SAME}),
])  # fmt: skip
def test_parity(parity, heads, kv_heads, form, input_form):
    rows = 7 if "x_spec" in input_form else 3 * input_form["size"]
    parity(*pair(heads, kv_heads, **form), (4, rows, 8), **input_form)


def make_mesh(data, context, model, axis_type=AxisType.Explicit):
    devices = jax.devices()[: data * context * model]
    return jax.make_mesh((data, context, model), ("data", "context", "model"), (axis_type,) * 3, devices=devices)


def check_split(make, mesh, x_spec, *, layout, window=None, segments=False, use_bias=False):
    """Compares y, dx and every parameter's gradient for a random dy, where rows are laid out in an order."""
    form = {"causal": True, "rope_theta": 10_000.0, "use_bias": use_bias, "window": window}
    plain = drawn(lambda: PlainAttention(FEATURES, HEADS, KV_HEADS, FEATURES // HEADS, **form, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, LENGTH, FEATURES)).astype(np.float32) for _ in range(2))
    ids = np.sort(rng.integers(0, 3, (2, LENGTH)), axis=1).astype(np.int32) if segments else None
    want_params, want_dx, want_y = gradients(plain, x, dy, ids)
    order = fa.sequence_order(layout, LENGTH, mesh.shape["context"])
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(lambda: make(
            FEATURES, HEADS, kv_heads=KV_HEADS, window=window, use_bias=use_bias, rngs=nnx.Rngs(0)
        ))  # fmt: skip
        fa.nn.load(layer, plain)
        ids = None if ids is None else jax.device_put(ids[:, order], P("data", "context"))
        params, dx, y = gradients(layer, *(jax.device_put(v[:, order], x_spec) for v in (x, dy)), ids)
    assert_close(y, np.asarray(want_y)[:, order], "float32", "y")
    assert_close(dx, np.asarray(want_dx)[:, order], "float32", "dx")
    assert_parameters_close(params, want_params, "float32")


def ring(**told):
    return lambda *sizes, **options: fa.nn.RingSelfAttention(*sizes, **options, **told)


@pytest.mark.parametrize(("told", "sizes", "axis_type", "form"), [
    ({"layout": "zigzag", "in_spec": ALONE}, (2, 2, 1), AxisType.Auto, {"layout": "zigzag", "use_bias": True}),
    ({}, (1, 3, 1), AxisType.Explicit, {"layout": "contiguous", "window": 7, "segments": True}),
])  # fmt: skip
def test_ring_alone(told, sizes, axis_type, form):
    check_split(ring(**told), make_mesh(*sizes, axis_type), ALONE, **form)


def test_a_wrong_layout_gives_other_numbers():
    """Negative test: the rows are in another order than the layer was told."""
    with pytest.raises(AssertionError, match="relative error"):
        check_split(ring(layout="contiguous"), make_mesh(2, 2, 1), ALONE, layout="zigzag")


@pytest.mark.parametrize(("sizes", "axis_type", "form"), [
    ((2, 2, 2), AxisType.Auto, {"layout": "zigzag"}),
    pytest.param((1, 3, 2), AxisType.Explicit, {"layout": "zigzag", "segments": True, "window": 9}, marks=slow),
    pytest.param((1, 4, 2), AxisType.Explicit, {"layout": "contiguous", "use_bias": True}, marks=slow),
    pytest.param((2, 1, 2), AxisType.Explicit, {"layout": "zigzag"}, marks=slow),
])  # fmt: skip
def test_context_and_tensor_axis(sizes, axis_type, form):
    def make(*sizes, **options):
        return fa.nn.ParallelSelfAttention(*sizes, context_axis="context", context_layout=form["layout"], **options)

    check_split(make, make_mesh(*sizes, axis_type), TENSOR, **form)


def test_a_whole_sequence_with_a_window_and_segments():
    check_split(fa.nn.ParallelSelfAttention, make_mesh(2, 1, 2), ROWS, layout="contiguous", window=5, segments=True)


@pytest.mark.optimized
def test_a_ring_whose_result_is_saved_is_not_run_again(mesh_of):
    """The backward pass computes the heads again, not the projection: R - 1 permutes each for x, y, dy and dx."""
    with jax.set_mesh(mesh_of(1, 4)):
        attention = drawn(lambda: fa.nn.ParallelSelfAttention(8, 4, backend="xla", rngs=nnx.Rngs(0)))
        assert permutes(attention, ones((2, 8, 8), ROWS)) == 4 * 3  # XLA merges the trips of x into one


def test_no_position_sees_a_later_one(mesh_of):
    """The gradient of row 3 with respect to the input is zero from row 4 on."""
    with jax.set_mesh(mesh_of(1, 4)):
        layer = drawn(lambda: fa.nn.ParallelSelfAttention(8, 4, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(layer)
        x = np.random.default_rng(0).standard_normal((1, 8, 8)).astype(np.float32)
        row = (np.arange(8) == 3).astype(np.float32)[:, None]
        dx = jax.jit(jax.grad(lambda x: jnp.sum(nnx.merge(graph, state)(x) * row)))(jax.device_put(x, ROWS))
    seen = np.abs(np.asarray(dx)).sum(axis=(0, 2))
    assert (seen[:4] > 0).all()
    assert (seen[4:] == 0).all()


def test_no_pair_of_rows_is_saved(mesh_of):
    """Scores, weights and masks, which are rows x rows for each head, are computed again. Nothing is saved twice."""
    rows, width = 64, 8
    with jax.set_mesh(mesh_of(1, 2)):
        attention = drawn(lambda: fa.nn.ParallelSelfAttention(width, 4, rope_theta=None, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(attention)
        x = ones((1, rows, width), P("data", "model", None))
        vjp = jax.eval_shape(lambda state, x: jax.vjp(lambda *a: nnx.merge(graph, a[0])(a[1]), state, x)[1], state, x)
    saved = sum(leaf.size for leaf in jax.tree.leaves(vjp) if rows in leaf.shape)
    assert saved == 5 * rows * width + 4 * rows  # x, q, k, v, the output of the heads; log-sum-exps


@pytest.mark.parametrize("form", ["tiles", "ring", "dense"])
def test_precision_reaches_every_product(form):
    """Those of the projections, and those of the scores and of the weights."""
    with jax.set_mesh(jax.make_mesh((2, 2), ("context", "model"), devices=jax.devices()[:4])):
        layer = drawn(lambda: fa.nn.ParallelSelfAttention(
            8, 2, context_axis="context" if form == "ring" else None, precision="highest", rngs=nnx.Rngs(0)
        ))  # fmt: skip
        x = ones((2, 8, 8), P(None, ("context", "model") if form == "ring" else "model", None))
        mask = jnp.ones((8, 8), bool) if form == "dense" else None
        program = str(jax.make_jaxpr(lambda x: layer(x, mask=mask))(x))
    products = program.count(" dot_general[")
    assert products >= 6
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products


def test_float64_is_computed_in_float64(mesh_of):
    """Rotary positions too: an error in float32 would be 1e-7."""
    form = {"causal": True, "rope_theta": 100.0, "use_bias": False, "window": None, "param_dtype": jnp.float64}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        plain = drawn(lambda: PlainAttention(16, 4, 4, 4, **form, rngs=nnx.Rngs(0)))
        x = np.random.default_rng(0).standard_normal((2, 8, 16))
        want = plain(x)
        with jax.set_mesh(mesh_of(1, 4)):
            layer = nnx.eval_shape(lambda: fa.nn.ParallelSelfAttention(16, 4, **form, rngs=nnx.Rngs(0)))
            fa.nn.load(layer, plain)
            y = layer(jax.device_put(x, ROWS))
    assert y.dtype == want.dtype == np.float64
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("options", "message"), [
    ({"heads": None}, "needs heads, or num_heads, which means the same: got None and None"),
    ({"heads": 4, "num_heads": 4}, "needs heads, or num_heads, which means the same: got 4 and 4"),
    ({"heads": 4, "dropout_rate": 1.5}, "needs dropout_rate to be 0 or more and less than 1: got 1.5"),
    ({"heads": 12, "kv_heads": 8}, "heads must be a multiple of kv_heads: got heads=12, kv_heads=8"),
    ({"heads": 12, "kv_heads": 12}, "features must be divisible by heads: got features=16, heads=12"),
    ({"heads": 16}, "head_dim must be even: got 1"), ({"heads": -4}, "needs heads to be 1 or more: got heads=-4"),
    ({"heads": 4, "kv_heads": 0}, "needs kv_heads to be 1 or more: got kv_heads=0"),
    ({"heads": 4, "head_dim": 0}, "needs head_dim to be 1 or more: got head_dim=0"),
    ({"heads": 4, "window": 0}, "ParallelSelfAttention needs window to be 1 or more rows, or None: got 0"),
    ({"heads": 4, "context_axis": "context"}, "works on the mesh axis 'context', and the mesh has 'data', 'model'"),
    ({"heads": 4, "context_axis": "data", "context_layout": "striped"}, "layout='striped': it must be one of"),
])  # fmt: skip
def test_heads_that_do_not_fit(mesh_of, options, message):
    with jax.set_mesh(mesh_of(1, 4)), pytest.raises(ValueError, match=message):
        fa.nn.ParallelSelfAttention(16, options.pop("heads"), **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("shape", "spec", "ids", "message"), [
    ((8, 8), P("model", None), None, r"needs an input \[batch, rows, features\]: got \[8, 8\]"),
    ((1, 8, 8), P(None, ("data", "model"), None), None, "rows are sharded over 'data', too"),
    ((2, 8, 8), ROWS, np.ones((2, 4), np.int32), r"one segment id a row, \[2, 8\]: got \[2, 4\]"),
    ((2, 8, 8), ROWS, np.ones((2, 8), np.float32), "needs segment ids of an integer dtype: got float32"),
])  # fmt: skip
def test_inputs_that_do_not_fit(mesh_of, shape, spec, ids, message):
    with jax.set_mesh(mesh_of(2, 4)):
        layer = drawn(lambda: fa.nn.ParallelSelfAttention(8, 4, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=message):
            layer(ones(shape, spec), ids)


def test_rows_that_are_not_split_as_they_have_to_be():
    with jax.set_mesh(make_mesh(2, 4, 1)):
        layer = drawn(lambda: fa.nn.RingSelfAttention(FEATURES, HEADS, rngs=nnx.Rngs(0), layout="zigzag"))
        with pytest.raises(ValueError, match="needs its input's rows sharded over 'context' alone"):
            layer(ones((2, 24, FEATURES), P("data", None, None)))
        with pytest.raises(ValueError, match="got 20 rows, needed a multiple of 8; pad the sequence to 24"):
            layer(ones((2, 20, FEATURES), ALONE))
        both = drawn(lambda: fa.nn.ParallelSelfAttention(FEATURES, HEADS, context_axis="context", rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=r"with context_axis='context' needs its input's rows sharded over"):
            both(ones((2, 24, FEATURES), ROWS))
        with pytest.raises(ValueError, match="works on the mesh axis 'seq', and the mesh has 'data', 'context'"):
            fa.nn.RingSelfAttention(FEATURES, HEADS, axis_name="seq", rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("options", "backend"), [
    ({"backend": "none"}, "none"), ({"backend": "fused"}, None),  # which ring attention lacks: it chooses
    ({"backend": "none", "context_backend": "xla"}, "xla"), ({}, None),
])  # fmt: skip
def test_keys_and_values_travel_as_the_layers_backend_says(options, backend):
    with jax.set_mesh(make_mesh(1, 2, 2)):
        layer = nnx.eval_shape(
            lambda: fa.nn.ParallelSelfAttention(FEATURES, HEADS, context_axis="context", **options, rngs=nnx.Rngs(0))
        )
    assert layer.attention.context_backend == backend


def test_eval_mode_drops_nothing(mesh_of):
    with jax.set_mesh(mesh_of(1, 4)):
        layer = fa.nn.ParallelSelfAttention(8, 4, dropout_rate=0.5, rngs=nnx.Rngs(0, dropout=1))
        x = ones((1, 8, 8), ROWS)
        assert not np.array_equal(layer(x), layer(x))
        layer.eval()
        np.testing.assert_array_equal(layer(x), layer(x))
