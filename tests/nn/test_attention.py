"""Attention layers against four nnx.Linear and a softmax that is written out, on several meshes and
in both layouts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import ROWS, SAME, check_parity, drawn, make_mesh, ones, permutes, saved

pytestmark = pytest.mark.usefixtures("quick_compile")

FEATURES, HEADS, KV_HEADS, LENGTH = 16, 4, 2, 24
TENSOR, ALONE = P("data", ("context", "model"), None), P("data", "context", None)
slow = pytest.mark.slow


def rotate(x, theta):
    """Rotates positions by complex multiplication, which is another way to the same numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[None, :, None, None] * theta ** (-np.arange(half) / half)
    real = np.float64 if x.dtype == np.float64 else np.float32
    turned = jax.lax.complex(x[..., :half].astype(real), x[..., half:].astype(real))
    turned *= np.exp(1j * angle).astype(turned.dtype)
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


class PlainAttention(nnx.Module):
    def __init__(
        self,
        features,
        heads,
        kv_heads,
        head_dim,
        *,
        causal,
        rope_theta,
        use_bias,
        window,
        rngs,
        **options,
    ):
        options |= {"use_bias": use_bias, "rngs": rngs}
        self.query = nnx.Linear(features, heads * head_dim, **options)
        self.key = nnx.Linear(features, kv_heads * head_dim, **options)
        self.value = nnx.Linear(features, kv_heads * head_dim, **options)
        self.out = nnx.Linear(heads * head_dim, features, **options)
        self.head_dim, self.groups = head_dim, heads // kv_heads
        self.causal, self.rope_theta, self.window = causal, rope_theta, window

    def __call__(self, x, ids=None):
        q, k, v = (
            p(x).reshape(*x.shape[:2], -1, self.head_dim)
            for p in (self.query, self.key, self.value)
        )
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta), rotate(k, self.rope_theta)
        k, v = (jnp.repeat(t, self.groups, axis=2) for t in (k, v))
        distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
        allowed = (np.abs(distance) < (self.window or x.shape[1]))[None, None]
        if self.causal:
            allowed = allowed & (distance >= 0)[None, None]
        if ids is not None:
            allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(self.head_dim, dtype=x.dtype)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)), v)
        return self.out(out.reshape(*x.shape[:2], -1))


def pair(
    heads,
    kv_heads,
    *,
    head_dim=4,
    causal=True,
    rope_theta=100.0,
    use_bias=False,
    window=None,
    **options,
):
    form = {"causal": causal, "rope_theta": rope_theta, "use_bias": use_bias, "window": window}
    plain = drawn(lambda: PlainAttention(8, heads, kv_heads, head_dim, **form, rngs=nnx.Rngs(0)))

    def make(dtype):
        return fa.nn.ParallelSelfAttention(
            8,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            **form,
            dtype=dtype,
            rngs=nnx.Rngs(0),
            **options,
        )

    return make, plain


@pytest.mark.parametrize(
    ("heads", "kv_heads", "form", "input_form"),
    [
        (6, 3, {}, {"size": 3}),
        (8, 4, {"use_bias": True, "backend": "none"}, {"size": 4, "data": 2}),
        (4, 4, {"causal": False, "window": 3}, {"size": 4}),
        (4, 4, {}, {"size": 4, "x_spec": SAME, "y_spec": SAME}),
        *(
            pytest.param(*case, marks=slow)
            for case in [
                (2, 1, {}, {"size": 1}),
                (
                    8,
                    4,
                    {"use_bias": True, "backend": "xla"},
                    {"size": 4, "data": 2, "axis_type": AxisType.Auto},
                ),
                (4, 4, {"rope_theta": None}, {"size": 4}),
                (4, 4, {}, {"size": 4, "dtype": "bfloat16"}),
            ]
        ),
    ],
)
def test_parity(heads, kv_heads, form, input_form):
    rows = 7 if "x_spec" in input_form else 3 * input_form["size"]
    check_parity(*pair(heads, kv_heads, **form), (4, rows, 8), **input_form)


def context_mesh(data, context, model, axis_type=AxisType.Explicit):
    devices = jax.devices()[: data * context * model]
    return jax.make_mesh(
        (data, context, model), ("data", "context", "model"), (axis_type,) * 3, devices=devices
    )


def check_split(make, mesh, x_spec, *, layout, window=None, segments=False, use_bias=False):
    """Compares a layer whose rows are laid out in an order."""
    form = {"causal": True, "rope_theta": 10_000.0, "use_bias": use_bias, "window": window}
    plain = drawn(
        lambda: PlainAttention(
            FEATURES, HEADS, KV_HEADS, FEATURES // HEADS, **form, rngs=nnx.Rngs(0)
        )
    )
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, LENGTH), np.int32), axis=1)
    options = {"kv_heads": KV_HEADS, "window": window, "use_bias": use_bias}
    check_parity(
        lambda dtype: make(FEATURES, HEADS, dtype=dtype, **options, rngs=nnx.Rngs(0)),
        plain,
        (2, LENGTH, FEATURES),
        *([ids] if segments else []),
        mesh=mesh,
        x_spec=x_spec,
        y_spec=x_spec,
        order=fa.sequence_order(layout, LENGTH, mesh.shape["context"]),
    )


RING, SELF, CONTEXT = (
    fa.nn.RingSelfAttention,
    fa.nn.ParallelSelfAttention,
    {"context_axis": "context"},
)
CONTIGUOUS, ZIGZAG = (
    CONTEXT | {"context_layout": "contiguous"},
    CONTEXT | {"context_layout": "zigzag"},
)


@pytest.mark.parametrize(
    ("cls", "told", "x_spec", "sizes", "axis_type", "form"),
    [
        pytest.param(
            RING,
            {"layout": "zigzag", "in_spec": ALONE},
            ALONE,
            (2, 2, 1),
            AxisType.Auto,
            {"layout": "zigzag", "use_bias": True},
            marks=slow,
        ),
        (
            RING,
            {},
            ALONE,
            (1, 3, 1),
            AxisType.Explicit,
            {"layout": "contiguous", "window": 7, "segments": True},
        ),
        (SELF, ZIGZAG, TENSOR, (2, 2, 2), AxisType.Auto, {"layout": "zigzag"}),
        pytest.param(
            SELF,
            ZIGZAG,
            TENSOR,
            (1, 3, 2),
            AxisType.Explicit,
            {"layout": "zigzag", "segments": True, "window": 9},
            marks=slow,
        ),
        pytest.param(
            SELF,
            CONTIGUOUS,
            TENSOR,
            (1, 4, 2),
            AxisType.Explicit,
            {"layout": "contiguous", "use_bias": True},
            marks=slow,
        ),
        pytest.param(
            SELF, ZIGZAG, TENSOR, (2, 1, 2), AxisType.Explicit, {"layout": "zigzag"}, marks=slow
        ),
        (
            SELF,
            {},
            ROWS,
            (2, 1, 2),
            AxisType.Explicit,
            {"layout": "contiguous", "window": 5, "segments": True},
        ),
    ],
)
def test_a_sequence_that_is_split_or_has_segments(cls, told, x_spec, sizes, axis_type, form):
    check_split(functools.partial(cls, **told), context_mesh(*sizes, axis_type), x_spec, **form)


@slow
def test_a_wrong_layout_gives_other_numbers():
    """Negative test: the rows are in another order than the layer was told."""
    with pytest.raises(AssertionError, match="relative error"):
        check_split(
            functools.partial(RING, layout="contiguous"),
            context_mesh(2, 2, 1),
            ALONE,
            layout="zigzag",
        )


@pytest.mark.optimized
def test_a_ring_whose_result_is_saved_is_not_run_again():
    """The backward pass computes the heads again, not the projection: R - 1 permutes each for x, y,
    dy and dx.
    """
    with jax.set_mesh(make_mesh(1, 4)):
        attention = drawn(
            lambda: fa.nn.ParallelSelfAttention(8, 4, backend="xla", rngs=nnx.Rngs(0))
        )
        # XLA merges the trips of x into one
        assert permutes(attention, ones((2, 8, 8), ROWS)) == 4 * 3


def test_no_pair_of_rows_is_saved():
    """Scores, weights and masks, which are rows x rows for each head, are computed again. Nothing
    is saved twice.
    """
    rows, width = 64, 8
    with jax.set_mesh(make_mesh(1, 2)):
        attention = drawn(
            lambda: fa.nn.ParallelSelfAttention(width, 4, rope_theta=None, rngs=nnx.Rngs(0))
        )
        sizes = [
            leaf.size
            for leaf in saved(attention, ones((1, rows, width), ROWS))
            if rows in leaf.shape
        ]
    # x, q, k, v, the output of the heads; log-sum-exps
    assert sum(sizes) == 5 * rows * width + 4 * rows


@pytest.mark.parametrize("form", ["tiles", "ring", "dense"])
def test_precision_reaches_every_product(form):
    """Those of the projections, and those of the scores and of the weights."""
    with jax.set_mesh(jax.make_mesh((2, 2), ("context", "model"), devices=jax.devices()[:4])):
        layer = drawn(
            lambda: fa.nn.ParallelSelfAttention(
                8,
                2,
                context_axis="context" if form == "ring" else None,
                precision="highest",
                rngs=nnx.Rngs(0),
            )
        )
        x = ones((2, 8, 8), P(None, ("context", "model") if form == "ring" else "model", None))
        mask = jnp.ones((8, 8), bool) if form == "dense" else None
        program = str(jax.make_jaxpr(lambda x: layer(x, mask=mask))(x))
    products = program.count(" dot_general[")
    assert products >= 6
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products


def test_float64_is_computed_in_float64():
    """Rotary positions too: an error in float32 would be 1e-7."""
    form = {
        "causal": True,
        "rope_theta": 100.0,
        "use_bias": False,
        "window": None,
        "param_dtype": jnp.float64,
    }
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        plain = drawn(lambda: PlainAttention(16, 4, 4, 4, **form, rngs=nnx.Rngs(0)))
        x = np.random.default_rng(0).standard_normal((2, 8, 16))
        want = plain(x)
        with jax.set_mesh(make_mesh(1, 4)):
            layer = nnx.eval_shape(
                lambda: fa.nn.ParallelSelfAttention(16, 4, **form, rngs=nnx.Rngs(0))
            )
            fa.nn.load(layer, plain)
            y = layer(jax.device_put(x, ROWS))
    assert y.dtype == want.dtype == np.float64
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": None}, "needs heads, or num_heads, which means the same: got None and None"),
        (
            {"heads": 4, "num_heads": 4},
            "needs heads, or num_heads, which means the same: got 4 and 4",
        ),
        (
            {"heads": 4, "dropout_rate": 1.5},
            "needs dropout_rate to be 0 or more and less than 1: got 1.5",
        ),
        (
            {"heads": 12, "kv_heads": 8},
            "heads must be a multiple of kv_heads: got heads=12, kv_heads=8",
        ),
        (
            {"heads": 12, "kv_heads": 12},
            "features must be divisible by heads: got features=16, heads=12",
        ),
        ({"heads": 16}, "head_dim must be even: got 1"),
        ({"heads": -4}, "needs heads to be 1 or more: got heads=-4"),
        ({"heads": 4, "kv_heads": 0}, "needs kv_heads to be 1 or more: got kv_heads=0"),
        ({"heads": 4, "head_dim": 0}, "needs head_dim to be 1 or more: got head_dim=0"),
        (
            {"heads": 4, "window": 0},
            "ParallelSelfAttention needs window to be 1 or more rows, or None: got 0",
        ),
        (
            {"heads": 4, "context_axis": "context"},
            "works on the mesh axis 'context', and the mesh has 'data', 'model'",
        ),
        (
            {"heads": 4, "context_axis": "data", "context_layout": "striped"},
            "layout='striped': it must be one of",
        ),
    ],
)
def test_heads_that_do_not_fit(options, message):
    with jax.set_mesh(make_mesh(1, 4)), pytest.raises(ValueError, match=message):
        fa.nn.ParallelSelfAttention(16, options.pop("heads"), **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("shape", "spec", "ids", "message"),
    [
        ((8, 8), P("model", None), None, r"needs an input \[batch, rows, features\]: got \[8, 8\]"),
        ((1, 8, 8), P(None, ("data", "model"), None), None, "rows are sharded over 'data', too"),
        (
            (2, 8, 8),
            ROWS,
            np.ones((2, 4), np.int32),
            r"one segment id a row, \[2, 8\]: got \[2, 4\]",
        ),
        (
            (2, 8, 8),
            ROWS,
            np.ones((2, 8), np.float32),
            "needs segment ids of an integer dtype: got float32",
        ),
    ],
)
def test_inputs_that_do_not_fit(shape, spec, ids, message):
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: fa.nn.ParallelSelfAttention(8, 4, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=message):
            layer(ones(shape, spec), ids)


@pytest.mark.parametrize(
    ("cls", "options", "rows", "spec", "inputs", "error", "message"),
    [
        (
            RING,
            {"axis_name": "seq"},
            24,
            ALONE,
            {},
            ValueError,
            "works on the mesh axis 'seq', and the mesh has",
        ),
        (
            RING,
            {},
            24,
            P("data", None, None),
            {},
            ValueError,
            "needs its input's rows sharded over 'context' alone",
        ),
        (
            RING,
            {"layout": "zigzag"},
            20,
            ALONE,
            {},
            ValueError,
            "20 rows, needed a multiple of 8; pad the sequence to 24",
        ),
        (
            SELF,
            CONTEXT,
            24,
            ROWS,
            {},
            ValueError,
            r"with context_axis='context' needs its input's rows sharded over",
        ),
        (
            SELF,
            CONTEXT | {"logit_softcap": 30.0},
            24,
            TENSOR,
            {},
            NotImplementedError,
            "over a split sequence lacks logit_softcap",
        ),
        (
            SELF,
            CONTEXT,
            24,
            TENSOR,
            {"mask": np.ones((1, 1, 24, 24), bool)},
            NotImplementedError,
            "over a split sequence lacks a mask: leave context_axis",
        ),
        (
            fa.nn.ParallelAttention,
            CONTEXT | {"causal": True},
            24,
            TENSOR,
            {"inputs_k": np.ones((2, 8, 16), np.float32)},
            NotImplementedError,
            "over a split sequence lacks inputs_k: leave context_axis",
        ),
    ],
)
def test_what_a_split_sequence_lacks(cls, options, rows, spec, inputs, error, message):
    def call(x):
        return cls(FEATURES, HEADS, **options, rngs=nnx.Rngs(0))(x, **inputs)

    with jax.set_mesh(context_mesh(2, 4, 1)), pytest.raises(error, match=message):
        nnx.eval_shape(call, ones((2, rows, FEATURES), spec))


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        # which ring attention lacks: it chooses
        ({"backend": "none"}, "none"),
        ({"backend": "fused"}, None),
        ({"backend": "none", "context_backend": "xla"}, "xla"),
        ({}, None),
    ],
)
def test_keys_and_values_travel_as_the_layers_backend_says(options, backend):
    with jax.set_mesh(context_mesh(1, 2, 2)):
        layer = nnx.eval_shape(
            lambda: fa.nn.ParallelSelfAttention(
                FEATURES, HEADS, context_axis="context", **options, rngs=nnx.Rngs(0)
            )
        )
    assert layer.attention.context_backend == backend


# ---- the key-value cache --------------------------------------------------------------------------------------------

X = np.random.default_rng(0).standard_normal((2, 6, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("axis_type", "prompt"),
    [pytest.param(AxisType.Auto, 4, marks=pytest.mark.slow), (AxisType.Explicit, 3)],
)
def test_rows_are_decoded_as_by_the_plain_layer(axis_type, prompt):
    """A prompt at once and then single rows, where the plain layer takes one row at a time."""
    plain = drawn(
        lambda: nnx.MultiHeadAttention(4, 16, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
    )
    plain.init_cache(X.shape)
    step = nnx.jit(lambda layer, row: layer(row))
    want = np.concatenate([step(plain, X[:, i : i + 1]) for i in range(6)], axis=1)
    with jax.set_mesh(make_mesh(1, 4, axis_type)):
        layer = nnx.eval_shape(lambda: fa.nn.ParallelAttention(16, 4, kv_heads=2, rngs=nnx.Rngs(0)))
        fa.nn.load(layer, nnx.state(plain, nnx.Param))
        layer.init_cache(X.shape)
        step = nnx.jit(lambda layer, rows: layer(rows, decode=True))
        got = [
            step(layer, X[:, :prompt]),
            *(step(layer, X[:, i : i + 1]) for i in range(prompt, 6)),
        ]
        assert layer.cache_index[...] == 6
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=1e-5)


def test_each_sequence_has_a_mask_of_its_own():
    allowed = np.random.default_rng(1).random((2, 1, 6, 6)) < 0.5
    allowed |= np.eye(6, dtype=bool)
    with jax.set_mesh(make_mesh(2, 2)):
        layer = drawn(lambda: fa.nn.ParallelAttention(16, 4, rngs=nnx.Rngs(0)))
        x = jax.device_put(X, jax.P("data"))
        want = layer(x, mask=allowed, is_causal=True)
        with pytest.raises(ValueError, match="call init_cache first"):
            layer(x, mask=allowed, decode=True)
        layer.init_cache(X.shape)
        with pytest.raises(
            ValueError,
            match=r"needs a mask that broadcasts to .* \[2, 1, 6, 6\]: got \[3, 1, 6, 6\]",
        ):
            layer(x, mask=np.ones((3, 1, 6, 6), bool), decode=True)
        got = layer(x, mask=allowed, decode=True)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_what_a_cache_lacks_is_refused():
    with jax.set_mesh(make_mesh(1, 4)):
        layer, function = (
            drawn(
                lambda options=options: fa.nn.ParallelAttention(16, 4, rngs=nnx.Rngs(0), **options)
            )
            for options in ({}, {"attention_fn": nnx.dot_product_attention})
        )
        layer.init_cache(X.shape)
        function.init_cache(X.shape)
        with pytest.raises(
            NotImplementedError, match="ParallelAttention with decode=True lacks inputs_k"
        ):
            layer(X, X, decode=True)
        with pytest.raises(NotImplementedError, match="lacks a cache with an attention_fn"):
            function(X, decode=True)
        with pytest.raises(
            ValueError, match="2 sequences of 6 rows, of which 0 are taken: got 1 sequences and 6"
        ):
            layer(X[:1], decode=True)
        with (
            jax.set_mesh(make_mesh(2, 4)),
            pytest.raises(ValueError, match="rows are sharded over 'data', too; reshard it"),
        ):
            layer(jax.device_put(X, jax.P(None, "data")), decode=True)
        layer.cache_index[...] = jnp.int32(4)
        message = (
            "of 6 rows, of which 4 are taken: got 2 sequences and 3 new rows; init_cache makes one"
        )
        with pytest.raises(ValueError, match=message):
            layer(X[:, :3], decode=True)
