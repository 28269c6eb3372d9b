"""Parallel self-attention against four nnx.Linear layers and a softmax that is written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import drawn, ones, permutes

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, SAME = P("data", "model", None), P("data", None, None)


def rotate(x, theta):
    """Rotates positions by complex multiplication, which is another way to the same numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * theta ** (-np.arange(half) / half)
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * np.exp(1j * angle).astype(np.complex64)
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


class PlainAttention(nnx.Module):
    def __init__(self, features, heads, kv_heads, head_dim, *, causal, rope_theta, use_bias, window=None, rngs):
        options = {"use_bias": use_bias, "rngs": rngs}
        self.query = nnx.Linear(features, heads * head_dim, **options)
        self.key = nnx.Linear(features, kv_heads * head_dim, **options)
        self.value = nnx.Linear(features, kv_heads * head_dim, **options)
        self.out = nnx.Linear(heads * head_dim, features, **options)
        self.head_dim, self.groups = head_dim, heads // kv_heads
        self.causal, self.rope_theta, self.window = causal, rope_theta, window

    def __call__(self, x):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, self.head_dim) for p in (self.query, self.key, self.value))
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta), rotate(k, self.rope_theta)
        k, v = (jnp.repeat(t, self.groups, axis=2) for t in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(self.head_dim, dtype=np.float32)
        if self.causal:
            scores = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        if self.window is not None:
            rows = np.arange(x.shape[1])
            scores = jnp.where(np.abs(rows[:, None] - rows) < self.window, scores, -jnp.inf)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return self.out(out.reshape(*x.shape[:2], -1))


def pair(heads, kv_heads, *, head_dim=4, causal=True, rope_theta=100.0, use_bias=False, window=None, **options):
    form = {"causal": causal, "rope_theta": rope_theta, "use_bias": use_bias, "window": window}
    plain = drawn(lambda: PlainAttention(8, heads, kv_heads, head_dim, **form, rngs=nnx.Rngs(0)))

    def make(dtype):
        return fa.nn.ParallelSelfAttention(
            8, heads, kv_heads=kv_heads, head_dim=head_dim, **form, dtype=dtype, rngs=nnx.Rngs(0), **options
        )

    return make, plain


@pytest.mark.parametrize(
    ("size", "groups"),
    [(1, 2), (2, 1), (3, 2), *(pytest.param(*ring, marks=pytest.mark.slow) for ring in [(5, 1), (8, 2)])],
)
def test_parity_on_every_ring(parity, size, groups):
    make, plain = pair(size * groups, size)
    parity(make, plain, (3, 3 * size, 8), size=size)


@pytest.mark.parametrize(("axis_type", "backend"), [(AxisType.Explicit, "none"), (AxisType.Auto, "xla")])
def test_parity_on_a_sub_axis(parity, axis_type, backend):
    make, plain = pair(8, 4, use_bias=True, backend=backend)
    parity(make, plain, (2, 8, 8), size=4, data=2, axis_type=axis_type)


@pytest.mark.parametrize(
    "form", [{"causal": False, "window": 3}, pytest.param({"rope_theta": None}, marks=pytest.mark.slow)]
)
def test_parity_of_other_forms(parity, form):
    make, plain = pair(4, 4, **form)
    parity(make, plain, (2, 8, 8), size=4)


def test_parity_in_bfloat16(parity):
    make, plain = pair(4, 4)
    parity(make, plain, (2, 8, 8), size=4, dtype="bfloat16")


def test_an_input_that_is_the_same_on_all_devices(parity):
    make, plain = pair(4, 4)
    parity(make, plain, (2, 7, 8), size=4, x_spec=SAME, y_spec=SAME)


def test_segments_are_sequences_of_their_own(mesh_of):
    rng = np.random.default_rng(0)
    x, ids = rng.standard_normal((1, 8, 8)).astype(np.float32), np.repeat([[3, 5]], 4, axis=1)
    with jax.set_mesh(mesh_of(1, 4)):
        layer = drawn(lambda: fa.nn.ParallelSelfAttention(8, 4, rope_theta=None, rngs=nnx.Rngs(0)))
        apply = jax.jit(lambda graph, state, x, ids: nnx.merge(graph, state)(x, ids), static_argnums=0)
        both = apply(*nnx.split(layer), jax.device_put(x, ROWS), jax.device_put(ids.astype(np.int32), P("data", None)))
        each = [apply(*nnx.split(layer), jax.device_put(half, ROWS), None) for half in np.split(x, 2, axis=1)]
    np.testing.assert_allclose(both, np.concatenate(each, axis=1), rtol=1e-5, atol=1e-6)


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


def test_rotary_embedding_keeps_norms_and_depends_on_distance_alone():
    rng = np.random.default_rng(0)
    turn = jax.jit(fa.nn.rotary_embedding)
    same = (np.broadcast_to(rng.standard_normal(8).astype(np.float32), (1, 16, 1, 8)) for _ in range(2))
    q, k = (np.asarray(turn(x)) for x in same)
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), np.linalg.norm(q[0, 0, 0]), rtol=1e-5)
    scores = np.einsum("bqhd,bkhd->qk", q, k)
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": None}, "needs heads, or num_heads, which means the same: got None and None"),
        ({"heads": 4, "num_heads": 4}, "needs heads, or num_heads, which means the same: got 4 and 4"),
        ({"heads": 4, "dropout_rate": 1.5}, "needs dropout_rate to be 0 or more and less than 1: got 1.5"),
        ({"heads": 12, "kv_heads": 8}, "heads must be a multiple of kv_heads: got heads=12, kv_heads=8"),
        ({"heads": 12, "kv_heads": 12}, "features must be divisible by heads: got features=16, heads=12"),
        ({"heads": 16}, "head_dim must be even: got 1"),
        ({"heads": 0}, "needs heads to be 1 or more: got heads=0"),
        ({"heads": -4}, "needs heads to be 1 or more: got heads=-4"),
        ({"heads": 4, "kv_heads": 0}, "needs kv_heads to be 1 or more: got kv_heads=0"),
        ({"heads": 4, "head_dim": 0}, "needs head_dim to be 1 or more: got head_dim=0"),
        ({"heads": 4, "window": 0}, "ParallelSelfAttention needs window to be 1 or more rows, or None: got 0"),
        ({"heads": 4, "context_axis": "context"}, "works on the mesh axis 'context', and the mesh has 'data', 'model'"),
        ({"heads": 4, "context_axis": "data", "context_layout": "striped"}, "layout='striped': it must be one of"),
    ],
)
def test_heads_that_do_not_fit(mesh_of, options, message):
    with jax.set_mesh(mesh_of(1, 4)), pytest.raises(ValueError, match=message):
        fa.nn.ParallelSelfAttention(16, options.pop("heads"), **options, rngs=nnx.Rngs(0))


def test_inputs_that_do_not_fit(mesh_of):
    with jax.set_mesh(mesh_of(2, 4)):
        layer = drawn(lambda: fa.nn.ParallelSelfAttention(8, 4, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=r"needs an input \[batch, rows, features\]: got \[8, 8\]"):
            layer(ones((8, 8), P("model", None)))
        with pytest.raises(ValueError, match="rows are sharded over 'data', too"):
            layer(ones((1, 8, 8), P(None, ("data", "model"), None)))
        with pytest.raises(ValueError, match=r"one segment id a row, \[2, 8\]: got \[2, 4\]"):
            layer(ones((2, 8, 8), ROWS), np.ones((2, 4), np.int32))
        with pytest.raises(ValueError, match="needs segment ids of an integer dtype: got float32"):
            layer(ones((2, 8, 8), ROWS), np.ones((2, 8), np.float32))


def test_float64_is_computed_in_float64(mesh_of):
    """Rotary positions too: an error in float32 would be 1e-7."""
    with jax.enable_x64(True):

        def make():
            return fa.nn.ParallelSelfAttention(16, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))

        x = np.random.default_rng(0).standard_normal((2, 8, 16))
        ys = []
        for size in (1, 4):
            with jax.set_mesh(mesh_of(1, size)):
                ys.append(np.asarray(drawn(make)(jax.device_put(x, ROWS))))
        with jax.set_mesh(mesh_of(1, 1)):
            layer = drawn(make)
            q, k, v = (
                (x @ np.asarray(linear.kernel[...])).reshape(2, 8, 4, 4)
                for linear in (layer.query, layer.key, layer.value)
            )
            turned = np.arange(8)[:, None] * 10_000.0 ** -np.array([0, 0.5])
            cos, sin = np.cos(turned)[:, None], np.sin(turned)[:, None]
            q, k = (
                np.concatenate([z[..., :2] * cos - z[..., 2:] * sin, z[..., 2:] * cos + z[..., :2] * sin], -1)
                for z in (q, k)
            )
            scores = np.where(np.tri(8, dtype=bool), np.einsum("bqhd,bkhd->bhqk", q, k) / 2, -np.inf)
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            want = np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(2, 8, 16) @ np.asarray(layer.out.kernel[...])
    for y in ys:
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)
