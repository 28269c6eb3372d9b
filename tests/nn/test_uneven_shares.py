"""Heads, vocabularies and rows that the axis does not divide, and key-value heads that several
devices need.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import flaxasync as fa
from flaxasync.nn.uneven_shares import Shares, head_shares
from tests.nn.conftest import (
    ROWS,
    TOKENS,
    assert_close,
    assert_model_close,
    assert_parameters_close,
    drawn,
    make_mesh,
    ones,
)

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(4, 4), (8, 2), (6, 6), (6, 2), (6, 3), (12, 4), (5, 1), (3, 3)]
)
def test_every_head_is_computed_once_and_finds_its_keys(heads, kv_heads, devices):
    shares = head_shares(heads, kv_heads, 1, devices)
    q, kv = (np.arange(s.size) if s.order is None else np.array(s.order) for s in shares)
    q, kv = (
        np.pad(o, (0, s.local * devices - len(o)), constant_values=-1)
        for o, s in zip((q, kv), shares, strict=True)
    )
    assert sorted(q[q >= 0]) == list(range(heads))
    for device in range(devices):
        queries, keys = (o.reshape(devices, -1)[device] for o in (q, kv))
        group = len(queries) // len(keys)
        for i, head in enumerate(queries):
            assert head < 0 or keys[i // group] == head // (heads // kv_heads)


def test_a_share_that_is_no_padding_needs_no_transfer():
    assert Shares.equal(8, 4).whole
    assert not Shares.equal(6, 4).whole
    assert all(shares.whole for shares in head_shares(8, 4, 16, 4))


@pytest.mark.parametrize(("heads", "kv_heads", "form", "axis_type"), [
    (4, 2, {}, AxisType.Explicit), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (6, 6, {"mask": "heads"}, AxisType.Explicit),
        (6, 2, {"mask": "batch", "cross": True}, AxisType.Explicit),
        (6, 2, {"mask": "batch", "cross": True}, AxisType.Auto),
        (4, 4, {"bias": True, "cross": True, "normalize_qk": True}, AxisType.Explicit),
    ]),
])  # fmt: skip
def test_attention_is_that_of_nnx(heads, kv_heads, form, axis_type):
    """Outputs, and gradients of all parameters in their dense shapes, of `nnx.MultiHeadAttention`."""
    rng, cross = np.random.default_rng(0), "cross" in form
    normalize = form.get("normalize_qk", False)
    plain = drawn(
        lambda: nnx.MultiHeadAttention(
            heads,
            24,
            qkv_features=4 * heads,
            num_kv_heads=kv_heads,
            decode=False,
            normalize_qk=normalize,
            rngs=nnx.Rngs(1),
        )
    )
    x, other = (rng.standard_normal((4, rows, 24)).astype(np.float32) for rows in (8, 12))
    shape = (4, heads if form.get("mask") == "heads" else 1, 8, 12 if cross else 8)
    masks = {"mask": rng.random(shape) > 0.3} if "mask" in form else {}
    biases = {"bias": rng.standard_normal(shape[1:]).astype(np.float32)} if "bias" in form else {}

    def loss(layer, x, other):
        given = biases if isinstance(layer, fa.nn.ParallelAttention) else {}
        y = layer(x, *((other,) if cross else ()), **masks, **given)
        # |y| is up to 32, and the error of a sine grows with what it is given
        return jnp.sum(jnp.sin(y / 8)), y

    if biases:  # nnx.MultiHeadAttention takes no bias, but its attention function does
        plain.attention_fn = lambda *args, **kwargs: nnx.dot_product_attention(
            *args, **kwargs, bias=biases["bias"]
        )
    step = {"argnums": (0, 1, 2), "has_aux": True}  # the gradients of parameters and of both inputs
    (_, want_y), (want, *want_dx) = nnx.jit(nnx.value_and_grad(loss, **step))(plain, x, other)
    with jax.set_mesh(make_mesh(2, 4, axis_type)):
        layer = drawn(
            lambda: fa.nn.ParallelAttention(
                24,
                num_heads=heads,
                kv_heads=kv_heads,
                head_dim=4,
                normalize_qk=normalize,
                rngs=nnx.Rngs(0),
            )
        )
        fa.nn.load(layer, plain)
        run = nnx.jit(nnx.value_and_grad(loss, **step))
        (_, y), (got, *dx) = run(layer, jax.device_put(x, ROWS), jax.device_put(other, ROWS))
        assert jax.tree.map(lambda g: g.sharding, got) == jax.tree.map(
            lambda p: p.sharding, nnx.state(layer, nnx.Param)
        )
    assert_close(y, want_y, "float32", "y")
    for name, ours, theirs in zip(
        ("dx of queries", "dx of keys and values"), dx, want_dx, strict=True
    ):
        assert_close(ours, theirs, "float32", name)
    assert_model_close(got, want)


@pytest.mark.slow
def test_a_vocabulary_of_50257_tied_to_its_output():
    vocab, rng = 50257, np.random.default_rng(0)
    plain = drawn(lambda: nnx.Embed(vocab, 8, rngs=nnx.Rngs(0)))
    ids, targets = (rng.integers(vocab - 40, vocab, (2, 8)).astype(np.int32) for _ in range(2))

    def reference(layer):
        logits = layer.attend(layer(ids))
        at_target = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        smooth = jnp.mean(jax.nn.log_softmax(logits), -1)
        return -jnp.mean(0.9 * at_target[..., 0] + 0.1 * smooth)

    def loss(layer, ids, targets):
        logits = layer.attend(layer(ids))
        assert logits.shape[-1] == 50260
        return jnp.mean(
            fa.nn.softmax_cross_entropy(logits, targets, label_smoothing=0.1, vocab_size=vocab)
        )

    want_loss, want = nnx.jit(nnx.value_and_grad(reference))(plain)
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(vocab, 8, rngs=nnx.Rngs(0)))
        fa.nn.load(layer, plain)
        assert layer.embedding.shape == (vocab, 8)
        assert layer.embedding[...].addressable_shards[0].data.shape == (vocab, 2)
        placed = jax.device_put(ids, TOKENS), jax.device_put(targets, TOKENS)
        got_loss, got = nnx.jit(nnx.value_and_grad(loss))(layer, *placed)
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-5)
    assert_parameters_close(got, want, "float32")


def test_an_output_over_a_padded_vocabulary():
    plain, x = drawn(lambda: nnx.Linear(8, 13, rngs=nnx.Rngs(0))), np.ones((2, 8, 8), np.float32)
    with jax.set_mesh(make_mesh(2, 4)):
        layer = drawn(lambda: fa.nn.ColumnParallelLinear(8, 13, pad=True, rngs=nnx.Rngs(0)))
        fa.nn.load(layer, plain)
        y = layer(jax.device_put(x, ROWS))
        assert layer.kernel.shape == (8, 13)
    assert y.shape == (2, 8, 16)
    np.testing.assert_allclose(np.asarray(y)[..., :13], plain(x), rtol=1e-5, atol=1e-6)
    # padding wins no argmax
    np.testing.assert_array_equal(np.asarray(y)[..., 13:], np.finfo(np.float32).min)


@pytest.mark.slow
def test_options_that_need_all_scores():
    """Scale, soft cap and an attention function, against the formula; dropout keeps the mean and
    follows its key.
    """
    q, k, v = (
        np.random.default_rng(i).standard_normal((2, 8, 16)).astype(np.float32) for i in range(3)
    )
    identity = np.eye(16, dtype=np.float32)

    def layer(**options):
        made = fa.nn.ParallelAttention(16, 4, use_bias=False, rngs=nnx.Rngs(0), **options)
        fa.nn.load(made, {f"{name}.kernel": identity for name in ("query", "key", "value", "out")})
        return made

    def formula(scale, cap):
        heads = [x.reshape(2, 8, 4, 4) for x in (q, k, v)]
        scores = cap * np.tanh(np.einsum("bshd,bthd->bhst", *heads[:2]) * scale / cap)
        return np.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), heads[2]).reshape(2, 8, 16)

    with jax.set_mesh(make_mesh(2, 4)):
        inputs = [jax.device_put(x, ROWS) for x in (q, k, v)]
        plain, causal = layer()(*inputs), layer(causal=True)(*inputs)
        np.testing.assert_allclose(plain, formula(0.5, 1e6), atol=1e-4)
        np.testing.assert_allclose(
            layer(softmax_scale=0.3, logit_softcap=2.0)(*inputs), formula(0.3, 2.0), atol=1e-5
        )
        np.testing.assert_allclose(
            layer(attention_fn=nnx.dot_product_attention)(*inputs), plain, atol=1e-5
        )
        np.testing.assert_array_equal(layer()(*inputs, is_causal=True), causal)
        assert not np.allclose(causal, plain)

        dropping = layer(dropout_rate=0.5)
        np.testing.assert_allclose(dropping(*inputs, deterministic=True), plain, atol=1e-5)
        run = jax.jit(lambda seed: dropping(*inputs, rngs=nnx.Rngs(dropout=jax.random.key(seed))))
        many = np.stack([run(seed) for seed in range(256)])
        np.testing.assert_array_equal(many[0], run(0))
        assert not np.allclose(many[0], many[1])
        # the deviation of the mean
        error, deviation = many.mean(0) - plain, many.std(0) / np.sqrt(len(many))
        assert (np.abs(error) <= 5 * deviation + 1e-5).all()

        for name in ("dropout_rate", "logit_softcap"):
            with pytest.raises(ValueError, match=f"takes no {name}: apply it inside attention_fn"):
                layer(attention_fn=nnx.dot_product_attention, **{name: 0.5})
        with pytest.raises(NotImplementedError, match="ParallelAttention lacks sow_weights of nnx"):
            dropping(*inputs, sow_weights=True)
        with pytest.raises(
            ValueError, match=r"needs a mask that broadcasts to \[b, heads, s, t\] = \[2, 4, 8, 8\]"
        ):
            dropping(*inputs, mask=np.ones((2, 1, 8, 9), bool))


PADDED = 20  # a class token and 16 patches, padded for four devices


def first_row(y):
    """Takes the class token as docs/your_model.md says: one row of each sequence moves, and not the
    sequences.
    """
    return jnp.sum(y, axis=1, where=(jnp.arange(y.shape[1]) == 0)[:, None])


@pytest.mark.parametrize(
    "axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)]
)
def test_one_row_moves_and_its_value_and_gradient_are_exact(axis_type):
    x = np.random.default_rng(0).standard_normal((2, PADDED, 16)).astype(np.float32)
    with jax.set_mesh(make_mesh(2, 4, axis_type)):
        run = (
            jax.jit(jax.value_and_grad(lambda y: jnp.sin(first_row(y)).sum()))
            .lower(ones(x.shape, ROWS))
            .compile()
        )
        value, dx = run(jax.device_put(x, ROWS))
    moved = re.findall(
        r" = (\S+?)\{\S* (all-[a-z]+|reduce-scatter|collective-permute)\(", run.as_text()
    )
    assert [found for found in moved if found[0] != "f32[]"] == [("f32[1,16]", "all-reduce")]
    np.testing.assert_allclose(value, np.sin(x[:, 0]).sum(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(dx)[:, 0], np.cos(x[:, 0]), rtol=1e-6, atol=1e-6)
    assert not np.asarray(dx)[:, 1:].any()


def test_an_index_is_refused_by_jax():
    """The negative test: when JAX takes it, the passage in docs/your_model.md is to go."""
    with jax.set_mesh(make_mesh(2, 4)), pytest.raises(Exception, match="slicing on sharded dims"):
        jax.jit(lambda y: y[:, 0])(ones((2, PADDED, 16), ROWS))
