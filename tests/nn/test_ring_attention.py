"""Attention layers over a split sequence against plain nnx on one device, on several meshes and in both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import assert_close, assert_parameters_close, drawn, gradients, load, ones

pytestmark = pytest.mark.usefixtures("quick_compile")

FEATURES, HEADS, KV_HEADS, ROWS = 16, 4, 2, 24
TENSOR, ALONE = P("data", ("context", "model"), None), P("data", "context", None)


class PlainAttention(nnx.Module):
    """Four nnx.Linear and all scores at once, with the `ids` and `window` that the layers take."""

    def __init__(self, *, window, use_bias):
        options = {"use_bias": use_bias, "rngs": nnx.Rngs(0)}
        self.query = nnx.Linear(FEATURES, FEATURES, **options)
        self.key = nnx.Linear(FEATURES, FEATURES // 2, **options)
        self.value = nnx.Linear(FEATURES, FEATURES // 2, **options)
        self.out = nnx.Linear(FEATURES, FEATURES, **options)
        self.window = window

    def __call__(self, x, ids=None):
        rows, size = x.shape[1], FEATURES // HEADS
        q, k, v = (p(x).reshape(*x.shape[:2], -1, size) for p in (self.query, self.key, self.value))
        q, k = fa.nn.rotary_embedding(q), fa.nn.rotary_embedding(k)
        k, v = (jnp.repeat(t, HEADS // KV_HEADS, axis=2) for t in (k, v))
        distance = np.arange(rows)[:, None] - np.arange(rows)[None]
        allowed = (distance >= 0) & (distance < (self.window or rows))
        if ids is not None:
            allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
        scores = jnp.where(allowed, jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(size, dtype=np.float32), -jnp.inf)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape))


def make_mesh(data, context, model, axis_type=AxisType.Explicit):
    devices = jax.devices()[: data * context * model]
    return jax.make_mesh((data, context, model), ("data", "context", "model"), (axis_type,) * 3, devices=devices)


def check(make, mesh, x_spec, *, layout, window=None, segments=False, use_bias=False):
    """Compares y, dx and every parameter's gradient for a random dy."""
    plain = drawn(lambda: PlainAttention(window=window, use_bias=use_bias))
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, ROWS, FEATURES)).astype(np.float32) for _ in range(2))
    ids = np.sort(rng.integers(0, 3, (2, ROWS)), axis=1).astype(np.int32) if segments else None
    want_params, want_dx, want_y = gradients(plain, x, dy, ids)
    order = fa.sequence_order(layout, ROWS, mesh.shape["context"])
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(make)
        load(layer, plain)
        ids = None if ids is None else jax.device_put(ids[:, order], P("data", "context"))
        params, dx, y = gradients(layer, *(jax.device_put(v[:, order], x_spec) for v in (x, dy)), ids)
    assert_close(y, np.asarray(want_y)[:, order], "float32", "y")
    assert_close(dx, np.asarray(want_dx)[:, order], "float32", "dx")
    assert_parameters_close(params, want_params, "float32")


def check_ring(layout, axis_type, *, told):
    """Compares a layer that was told one layout, on rows in another or the same layout."""
    in_spec = ALONE if axis_type == AxisType.Auto else None
    options = {"layout": told, "in_spec": in_spec, "use_bias": True}
    check(
        lambda: fa.nn.RingSelfAttention(FEATURES, HEADS, kv_heads=KV_HEADS, **options, rngs=nnx.Rngs(0)),
        make_mesh(2, 2, 1, axis_type), ALONE, layout=layout, use_bias=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "axis_type"),
    [pytest.param("contiguous", AxisType.Explicit, marks=pytest.mark.slow), ("zigzag", AxisType.Auto)],
)
def test_ring_alone(layout, axis_type):
    check_ring(layout, axis_type, told=layout)


def test_a_wrong_layout_gives_other_numbers():
    """Negative test: the rows are in another order than the layer was told."""
    with pytest.raises(AssertionError, match="relative error"):
        check_ring("zigzag", AxisType.Explicit, told="contiguous")


def test_ring_alone_with_a_window_and_segments():
    check(
        lambda: fa.nn.RingSelfAttention(FEATURES, HEADS, kv_heads=KV_HEADS, window=7, rngs=nnx.Rngs(0)),
        make_mesh(1, 3, 1), ALONE, layout="contiguous", window=7, segments=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        pytest.param((2, 2, 2), {"layout": "zigzag"}, marks=pytest.mark.slow),
        pytest.param((1, 3, 2), {"layout": "zigzag", "segments": True, "window": 9}, marks=pytest.mark.slow),
        pytest.param((1, 4, 2), {"layout": "contiguous", "use_bias": True}, marks=pytest.mark.slow),
        pytest.param((2, 1, 2), {"layout": "zigzag"}, marks=pytest.mark.slow),
    ],
)
def test_context_and_tensor_axis(sizes, form):
    options = {"context_axis": "context", "context_layout": form["layout"], "window": form.get("window")}
    check(
        lambda: fa.nn.ParallelSelfAttention(
            FEATURES, HEADS, kv_heads=KV_HEADS, use_bias=form.get("use_bias", False), rngs=nnx.Rngs(0), **options
        ),
        make_mesh(*sizes), TENSOR, **form,
    )  # fmt: skip


def test_context_and_tensor_axis_under_auto_axes():
    options = {"context_axis": "context", "context_layout": "zigzag"}
    check(
        lambda: fa.nn.ParallelSelfAttention(FEATURES, HEADS, kv_heads=KV_HEADS, rngs=nnx.Rngs(0), **options),
        make_mesh(2, 2, 2, AxisType.Auto), TENSOR, layout="zigzag",
    )  # fmt: skip


@pytest.mark.parametrize("form", [{"window": 5}, pytest.param({"segments": True}, marks=pytest.mark.slow)])
def test_a_whole_sequence_with_the_same_options(form):
    """A window and segments mean the same without a context axis."""
    check(
        lambda: fa.nn.ParallelSelfAttention(
            FEATURES, HEADS, kv_heads=KV_HEADS, window=form.get("window"), rngs=nnx.Rngs(0)
        ),
        make_mesh(2, 1, 2), P("data", "model", None), layout="contiguous", **form,
    )  # fmt: skip


def test_bad_input_is_refused_with_its_numbers():
    with jax.set_mesh(make_mesh(2, 4, 1)):
        ring = drawn(lambda: fa.nn.RingSelfAttention(FEATURES, HEADS, rngs=nnx.Rngs(0), layout="zigzag"))
        with pytest.raises(ValueError, match="needs its input's rows sharded over 'context' alone"):
            ring(ones((2, 24, FEATURES), P("data", None, None)))
        with pytest.raises(ValueError, match="got 20 rows, needed a multiple of 8; pad the sequence to 24"):
            ring(ones((2, 20, FEATURES), ALONE))
        with pytest.raises(ValueError, match=r"one segment id a row, \[2, 24\]: got \[24\]"):
            ring(ones((2, 24, FEATURES), ALONE), np.ones(24, np.int32))
        with pytest.raises(ValueError, match=r"needs an input \[batch, rows, features\]: got \[24, 16\]"):
            ring(ones((24, FEATURES), P("context", None)))
        both = drawn(lambda: fa.nn.ParallelSelfAttention(FEATURES, HEADS, context_axis="context", rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=r"with context_axis='context' needs its input's rows sharded over"):
            both(ones((2, 24, FEATURES), P("data", "model", None)))
        with pytest.raises(ValueError, match="works on the mesh axis 'seq', and the mesh has 'data', 'context'"):
            fa.nn.RingSelfAttention(FEATURES, HEADS, axis_name="seq", rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="RingSelfAttention: heads must be a multiple of kv_heads"):
            fa.nn.RingSelfAttention(FEATURES, 4, kv_heads=3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"backend": "none"}, "none"),
        ({"backend": "fused"}, None),  # which ring attention lacks: it chooses
        ({"backend": "none", "context_backend": "xla"}, "xla"),
        ({}, None),
    ],
)
def test_keys_and_values_travel_as_the_layers_backend_says(options, backend):
    with jax.set_mesh(make_mesh(1, 2, 2)):
        layer = nnx.eval_shape(
            lambda: fa.nn.ParallelSelfAttention(FEATURES, HEADS, context_axis="context", **options, rngs=nnx.Rngs(0))
        )
    assert layer.attention.context.backend == backend
