"""The split embedding and the split loss against nnx.Embed and a softmax over whole logits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import (
    COLUMNS,
    ROWS,
    SAME,
    TOKENS,
    check_parity,
    compiled,
    drawn,
    make_mesh,
    ones,
)

pytestmark = pytest.mark.usefixtures("quick_compile")


def embed_pair(size, **options):
    plain = drawn(lambda: nnx.Embed(6 * size, 8, rngs=nnx.Rngs(0)))
    return lambda dtype: fa.nn.VocabParallelEmbed(
        6 * size, 8, dtype=dtype, rngs=nnx.Rngs(0), **options
    ), plain


@pytest.mark.parametrize(("size", "rows", "options", "form"), [
    (3, 9, {"backend": "none"}, {}),
    (4, 8, {}, {"data": 2, "dtype": "bfloat16"}),
    (4, 7, {"layout": "replicated"}, {"data": 2, "y_spec": SAME}),
    (4, 8, {"backend": "fused"}, {}),  # a look-up lacks it, and chooses another
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (1, 3, {"backend": "none"}, {}), (8, 24, {"backend": "xla"}, {}),
        (4, 8, {}, {"data": 2, "axis_type": AxisType.Auto}),
    ]),
])  # fmt: skip
def test_lookup(size, rows, options, form):
    """Every entry is looked up more than once, so that additions of its gradients show."""
    check_parity(
        *embed_pair(size, **options), (2, rows), size=size, x_spec=TOKENS, entries=6 * size, **form
    )


@pytest.mark.parametrize("size", [1, 4])
def test_ids_of_a_small_type_are_not_cut_off(size):
    """In uint8, 256 entries would be 0, and the second half of 512 entries would begin at 0."""
    with jax.set_mesh(make_mesh(1, size)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(512, 4, rngs=nnx.Rngs(0)))
        ids, row = (
            np.array([[0, 7, 200, 255]], np.uint8),
            5.0 * (np.arange(512) == 200).astype(np.float32),
        )
        y = nnx.jit(lambda layer, ids: layer(ids))(layer, jax.device_put(ids, TOKENS))
        logits = jax.device_put(np.broadcast_to(row, (1, 4, 512)), COLUMNS)
        losses = jax.jit(fa.nn.softmax_cross_entropy)(logits, jax.device_put(ids, TOKENS))
    np.testing.assert_array_equal(y, np.asarray(layer.embedding[...])[ids.astype(int)])
    want = (np.log(np.exp(row).sum()) - row)[ids.astype(int)]
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def test_many_gradients_of_one_id_are_not_lost_in_bfloat16():
    """Summed one by one in bfloat16, 512 ones would stop at 256."""
    with jax.set_mesh(make_mesh(1, 4)):
        layer = drawn(
            lambda: fa.nn.VocabParallelEmbed(
                8, 4, layout="replicated", dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
            )
        )
        ids = jax.device_put(np.zeros((1, 512), np.int32), TOKENS)
        grads = nnx.jit(nnx.grad(lambda layer, ids: jnp.sum(layer(ids).astype(jnp.float32))))(
            layer, ids
        )
    np.testing.assert_array_equal(np.asarray(grads["embedding"][...])[0], 512.0)


@pytest.mark.parametrize("layout", [pytest.param("sequence", marks=pytest.mark.slow), "replicated"])
def test_gradients_of_one_id_are_summed_in_float32_for_a_parameter_in_bfloat16(layout):
    """Summed one by one in bfloat16, 4096 ones stop at 256, or where a tree of sums stops."""
    rows = 4096

    def total(layer, ids):
        return jnp.sum(layer(ids).astype(jnp.float32))

    with jax.set_mesh(make_mesh(2, 4)):
        options = {"layout": layout, "param_dtype": jnp.bfloat16}
        layer = fa.nn.VocabParallelEmbed(8, 4, rngs=nnx.Rngs(0), **options)
        ids = jax.device_put(np.full((2, rows // 2), 5, np.int32), TOKENS)
        grads = nnx.jit(nnx.grad(total))(layer, ids)
    want = np.where(np.arange(8) == 5, float(rows), 0.0)
    assert grads["embedding"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(grads["embedding"][...], np.float32), np.tile(want[:, None], (1, 4))
    )


def sum_and_rows(layer, ids):
    """Returns what is differentiated, and the rows of the ids."""
    y = layer(ids)
    return jnp.sum(y), y


@pytest.mark.parametrize(("entries", "layout"), [(7, "sequence"), (8, "replicated")])
def test_an_id_outside_the_vocabulary_gives_nan_and_no_gradient(layout, entries):
    """Also where the number is that of an entry that pads the vocabulary."""
    with jax.set_mesh(make_mesh(1, 4)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(entries, 4, layout=layout, rngs=nnx.Rngs(0)))
        ids = jax.device_put(np.array([[-1, entries, 3, 100]], np.int32), TOKENS)
        grads, y = nnx.jit(nnx.grad(sum_and_rows, has_aux=True))(layer, ids)
    assert np.isnan(np.asarray(y)[0, [0, 1, 3]]).all()
    np.testing.assert_array_equal(np.asarray(y)[0, 2], np.asarray(layer.embedding[...])[3])
    want = np.where(np.arange(entries) == 3, 1.0, 0.0)
    np.testing.assert_array_equal(np.asarray(grads["embedding"][...])[:, 0], want)


def test_a_parallel_embedding_has_the_nan_of_the_embedding_that_it_replaces():
    plain = drawn(lambda: nnx.Embed(8, 4, rngs=nnx.Rngs(0)))
    ids = np.array([[3, 8, 7, 100]], np.int32)
    with jax.set_mesh(make_mesh(1, 4)):
        layer = fa.nn.VocabParallelEmbed(8, 4, rngs=nnx.Rngs(0))
        fa.nn.load(layer, plain)
        y = layer(jax.device_put(ids, TOKENS))
    np.testing.assert_array_equal(y, plain(ids))


def attend(layer, x):
    return layer.attend(x)


@pytest.mark.parametrize(("spec", "axis_type"), [(ROWS, AxisType.Auto), (SAME, AxisType.Explicit)])
def test_attend_is_that_of_nnx_embed(spec, axis_type):
    form = {"axis_type": axis_type, "x_spec": spec, "y_spec": COLUMNS}
    check_parity(*embed_pair(4), (2, 8, 8), size=4, data=2, apply=attend, **form)


OPTIONS = {"ignore": -100, "label_smoothing": 0.1, "z_loss": 0.01}


@pytest.mark.parametrize(("size", "axis_type", "dtype", "options", "vocab"), [
    (4, AxisType.Explicit, "float64", OPTIONS, 13),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (1, AxisType.Auto, "float32", {}, 4), (3, AxisType.Auto, "float32", {}, 12),
        (8, AxisType.Explicit, "float32", {}, 32),
    ]),
])  # fmt: skip
def test_cross_entropy_and_its_derivatives(size, axis_type, dtype, options, vocab):
    """With and without ignored targets, label smoothing, z-loss and a padded vocabulary."""
    rng = np.random.default_rng(size)
    logits, weights = (
        rng.standard_normal(shape).astype(dtype) for shape in ((2, 6, 4 * size), (2, 6))
    )
    targets = rng.integers(0, vocab, (2, 6)).astype(np.int32)
    if options:
        targets[0, :2] = -100

    def plain(logits):
        scores, smoothing = logits[..., :vocab], options.get("label_smoothing", 0)
        lse, one_hot = (
            jax.nn.logsumexp(scores, -1),
            jax.nn.one_hot(targets, vocab, dtype=scores.dtype),
        )
        at_target = (1 - smoothing) * jnp.sum(scores * one_hot, -1) + smoothing * jnp.mean(
            scores, -1
        )
        return jnp.where(targets == -100, 0, lse - at_target + options.get("z_loss", 0) * lse**2)

    def ours(logits):
        return fa.nn.softmax_cross_entropy(
            logits, jax.device_put(targets, TOKENS), vocab_size=vocab, **options
        )

    def derivatives(losses, logits):
        def loss(logits):
            return jnp.sum(losses(logits) ** 2 * weights)

        penalty = jax.value_and_grad(lambda logits: jnp.sum(jnp.sin(jax.grad(loss)(logits))))
        return losses(logits), jax.grad(loss)(logits), *penalty(logits)

    with jax.enable_x64(dtype == "float64"):
        want = jax.jit(lambda logits: derivatives(plain, logits))(logits)
        with jax.set_mesh(make_mesh(1, size, axis_type)):
            got = jax.jit(lambda logits: derivatives(ours, logits))(jax.device_put(logits, COLUMNS))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(
            ours, theirs, rtol=1e-4, atol=1e-5 if dtype == "float32" else 1e-12
        )


def test_cross_entropy_of_huge_logits_is_finite():
    with jax.set_mesh(make_mesh(1, 4)):
        logits = jax.device_put(
            np.where(np.arange(8) == 5, 1e30, -1e30).astype(np.float32)[None, None], COLUMNS
        )
        targets = jax.device_put(np.array([[5]], np.int32), TOKENS)
        assert np.asarray(jax.jit(fa.nn.softmax_cross_entropy)(logits, targets)).item() == 0.0


def softmax_of(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


# one program for each smoothing
@functools.partial(jax.jit, static_argnames="smoothing")
def loss_and_gradient(logits, targets, smoothing):
    def total(logits):
        return jnp.sum(fa.nn.softmax_cross_entropy(logits, targets, label_smoothing=smoothing))

    return jax.value_and_grad(total)(logits)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("offset", [0.0, 8e6, -8e6, 1e8])
def test_an_offset_of_all_logits_changes_neither_the_loss_nor_its_gradient(offset, smoothing):
    """A float32 of 8e6 is known to a half, so the maximum may not be added to a sum before it is
    subtracted again.
    """
    logits = np.array([0, 1, 3, 2, -2, 8, 4, 0], np.float32) * (
        8 if offset == 1e8 else 1
    ) + np.float32(offset)
    exact = (logits.astype(np.float64) - offset)[None, None]
    wanted = (1 - smoothing) * np.eye(8)[2] + smoothing / 8
    probabilities = softmax_of(exact)
    want = -np.sum(np.log(probabilities) * wanted)
    with jax.set_mesh(make_mesh(1, 4)):
        targets = jax.device_put(np.array([[2]], np.int32), TOKENS)
        logits = jax.device_put(logits[None, None], COLUMNS)
        loss, gradient = loss_and_gradient(logits, targets, smoothing=smoothing)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, probabilities - wanted, rtol=1e-5, atol=1e-7)


def test_equal_logits_of_any_size_have_the_loss_of_a_uniform_distribution():
    with jax.set_mesh(make_mesh(1, 4)):
        logits = jax.device_put(np.full((1, 4, 4), 1e8, np.float32), COLUMNS)
        targets = jax.device_put(np.arange(4, dtype=np.int32)[None], TOKENS)
        losses = jax.jit(fa.nn.softmax_cross_entropy)(logits, targets)
    np.testing.assert_allclose(losses, np.full((1, 4), np.log(4)), rtol=1e-6)


@pytest.mark.parametrize("vocab", [pytest.param(8, marks=pytest.mark.slow), 7])
def test_a_target_outside_the_vocabulary_gives_nan_unless_it_is_ignored(vocab):
    targets = np.array([[-100, -1, vocab, 100, 3, 0]], np.int32)
    absent = np.array([False, True, True, True, False, False])
    with jax.set_mesh(make_mesh(1, 4)):
        logits = ones((1, 6, 8), COLUMNS)

        def losses(logits):
            where = jax.device_put(targets, TOKENS)
            loss = fa.nn.softmax_cross_entropy(logits, where, ignore=-100, vocab_size=vocab)
            return jnp.sum(loss), loss

        gradient, loss = jax.jit(jax.grad(losses, has_aux=True))(logits)
    np.testing.assert_array_equal(np.isnan(np.asarray(loss)[0]), absent)
    np.testing.assert_allclose(
        np.asarray(loss)[0, ~absent], [0, np.log(vocab), np.log(vocab)], rtol=1e-6
    )
    np.testing.assert_array_equal(np.isnan(np.asarray(gradient)[0, :, :vocab]).all(-1), absent)


@pytest.mark.optimized
@pytest.mark.parametrize("backend", ["xla", "none"])
def test_no_device_ever_holds_whole_logits(backend):
    """No array of the compiled loss and its gradient has V = 64 features; some have the 16 of a
    shard.
    """
    with jax.set_mesh(make_mesh(1, 4)):
        embed = drawn(lambda: fa.nn.VocabParallelEmbed(64, 8, backend=backend, rngs=nnx.Rngs(0)))

        def loss(embed, x, targets):
            return jnp.sum(fa.nn.softmax_cross_entropy(embed.attend(x), targets))

        text = compiled(
            nnx.value_and_grad(loss), embed, ones((2, 12, 8), ROWS), ones((2, 12), TOKENS, np.int32)
        )
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    assert "2,12,16" in shapes
    assert not [shape for shape in shapes if "64" in shape.split(",")]


def look_up(shape, spec=None, dtype=np.int32):
    return lambda layer: layer(jax.device_put(np.zeros(shape, dtype), spec or P()))


def lose(shape, dtype=np.int32, **options):
    return lambda _: fa.nn.softmax_cross_entropy(
        ones((2, 6, 8), COLUMNS), np.zeros(shape, dtype), **options
    )


@pytest.mark.parametrize(
    ("call", "mesh", "error"),
    [
        (look_up((2, 4), dtype=np.float32), (1, 4), "looks up integers: got ids of float32"),
        (look_up((2, 4), P(None, "model")), (1, 4), "needs all ids on every device of 'model'"),
        (look_up((2, 6)), (1, 4), "got 6 rows on 4 devices; pad them to 8"),
        (
            look_up((12,), P("data")),
            (2, 4),
            "over 'data', 'model': got 12 rows on 8 devices; pad them to 16",
        ),
        (lose((2, 6), np.float32), (1, 4), "needs targets of an integer dtype: got float32"),
        (lose((2, 6), vocab_size=9), (1, 4), r"needs vocab_size to be 1 \.\. 8, or None: got 9"),
        (lose((2, 3)), (1, 4), "needs one target a row"),
    ],
)
def test_ids_and_targets_that_are_refused(call, mesh, error):
    with jax.set_mesh(make_mesh(*mesh)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(8, 8, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=error):
            call(layer)


def test_ids_and_logits_inside_a_shard_map():
    with jax.set_mesh(make_mesh(1, 4)):
        graph, state = nnx.split(drawn(lambda: fa.nn.VocabParallelEmbed(8, 8, rngs=nnx.Rngs(0))))
        specs = P("model"), P(None, "model")
        look_up = jax.shard_map(
            lambda state, ids: nnx.merge(graph, state)(ids), in_specs=specs, out_specs=ROWS
        )
        with pytest.raises(ValueError, match="got ids that vary over it"):
            jax.eval_shape(
                look_up, state, jax.device_put(np.zeros((2, 16), np.int32), P(None, "model"))
            )
        loss = jax.shard_map(fa.nn.softmax_cross_entropy, in_specs=(P(), P()), out_specs=P())
        with pytest.raises(ValueError, match="got logits that are the same on all of its devices"):
            jax.eval_shape(loss, np.ones((2, 4, 8), np.float32), np.zeros((2, 4), np.int32))
