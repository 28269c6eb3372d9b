"""The split embedding and the split loss against nnx.Embed and a softmax over whole logits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import COLUMNS, ROWS, SAME, TOKENS, drawn, ones, round_parameters

pytestmark = pytest.mark.usefixtures("quick_compile")


def embed_pair(size, **options):
    plain = drawn(lambda: nnx.Embed(6 * size, 8, rngs=nnx.Rngs(0)))
    return lambda dtype: fa.nn.VocabParallelEmbed(6 * size, 8, dtype=dtype, rngs=nnx.Rngs(0), **options), plain


@nnx.jit
def lookup_gradients(layer, ids, dy):
    def loss(layer, ids, dy):
        y = layer(ids)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    return nnx.grad(loss, has_aux=True)(layer, ids, dy)


def check_lookup(mesh, make, plain, rows, *, dtype="float32", y_spec=ROWS):
    """Compares y and the table's gradient. Every id appears more than once, so that additions show."""
    held = jnp.dtype(dtype)
    round_parameters(plain, held)
    ids = np.random.default_rng(rows).integers(0, plain.num_embeddings, (2, rows)).astype(np.int32)
    dy = np.random.default_rng(1).standard_normal((2, rows, 8)).astype(held)
    want, want_y = lookup_gradients(plain, ids, dy.astype(np.float32))
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(lambda: make(held))
        fa.nn.load(layer, plain)
        got, y = lookup_gradients(layer, jax.device_put(ids, TOKENS), jax.device_put(dy, y_spec))
    np.testing.assert_array_equal(np.asarray(y, np.float32), want_y)  # one addend a row: exact in any dtype
    atol = 1e-5 if dtype == "float32" else 2e-2 * 4
    np.testing.assert_allclose(got["embedding"][...], want["embedding"][...], atol=atol)


@pytest.mark.parametrize(("mesh", "axis_type", "rows", "dtype", "options", "y_spec"), [
    *(((1, size), AxisType.Explicit, 3 * size, "float32", {"backend": backend}, ROWS)
      for size, backend in [(1, "none"), (2, "xla"), (3, "none"), (5, "xla"), (8, "xla")]),
    *(((2, 4), axis_type, 8, dtype, {}, ROWS)
      for axis_type in (AxisType.Explicit, AxisType.Auto) for dtype in ("float32", "bfloat16")),
    ((2, 4), AxisType.Explicit, 7, "float32", {"layout": "replicated"}, SAME),
    ((1, 4), AxisType.Explicit, 8, "float32", {"backend": "fused"}, ROWS),  # a look-up lacks it, and chooses another
])  # fmt: skip
def test_lookup(mesh_of, mesh, axis_type, rows, dtype, options, y_spec):
    make, plain = embed_pair(mesh[1], **options)
    check_lookup(mesh_of(*mesh, axis_type), make, plain, rows, dtype=dtype, y_spec=y_spec)


@pytest.mark.parametrize("size", [1, 4])
def test_ids_of_a_small_type_are_not_cut_off(mesh_of, size):
    """In uint8, 256 entries would be 0, and the second half of 512 entries would begin at 0."""
    with jax.set_mesh(mesh_of(1, size)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(512, 4, rngs=nnx.Rngs(0)))
        ids, row = np.array([[0, 7, 200, 255]], np.uint8), 5.0 * (np.arange(512) == 200).astype(np.float32)
        y = nnx.jit(lambda layer, ids: layer(ids))(layer, jax.device_put(ids, TOKENS))
        logits = jax.device_put(np.broadcast_to(row, (1, 4, 512)), COLUMNS)
        losses = jax.jit(fa.nn.softmax_cross_entropy)(logits, jax.device_put(ids, TOKENS))
    np.testing.assert_array_equal(y, np.asarray(layer.embedding[...])[ids.astype(int)])
    want = (np.log(np.exp(row).sum()) - row)[ids.astype(int)]
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def test_many_gradients_of_one_id_are_not_lost_in_bfloat16(mesh_of):
    """Summed one by one in bfloat16, 512 ones would stop at 256."""
    with jax.set_mesh(mesh_of(1, 4)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(8, 4, layout="replicated", dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        ids = jax.device_put(np.zeros((1, 512), np.int32), TOKENS)
        grads = nnx.jit(nnx.grad(lambda layer, ids: jnp.sum(layer(ids).astype(jnp.float32))))(layer, ids)
    np.testing.assert_array_equal(np.asarray(grads["embedding"][...])[0], 512.0)


def test_an_id_outside_the_vocabulary_gives_zeros(mesh_of):
    with jax.set_mesh(mesh_of(1, 4)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(8, 4, rngs=nnx.Rngs(0)))
        y = nnx.jit(lambda layer, ids: layer(ids))(layer, jax.device_put(np.array([[-1, 8, 100, 3]], np.int32), TOKENS))
    assert (np.asarray(y)[0, :3] == 0).all()
    assert (np.asarray(y)[0, 3] != 0).any()


def attend(layer, x):
    return layer.attend(x)


@pytest.mark.parametrize("spec", [ROWS, SAME])
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_attend_is_that_of_nnx_embed(parity, spec, axis_type):
    form = {"axis_type": axis_type, "x_spec": spec, "y_spec": COLUMNS}
    parity(*embed_pair(4), (2, 8, 8), size=4, data=2, apply=attend, **form)


@pytest.mark.parametrize(("size", "axis_type"), [
    (1, AxisType.Auto), (2, AxisType.Explicit), (3, AxisType.Auto), (5, AxisType.Explicit), (8, AxisType.Explicit),
    (8, AxisType.Auto),
])  # fmt: skip
def test_cross_entropy_and_its_gradient(mesh_of, size, axis_type):
    rng = np.random.default_rng(size)
    logits, dloss = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 6, 4 * size), (2, 6)))
    targets = rng.integers(0, 4 * size, (2, 6)).astype(np.int32)

    def plain(logits):
        return jnp.sum(-jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0] * dloss)

    with jax.set_mesh(mesh_of(1, size, axis_type)):
        placed = jax.device_put(10 * logits, COLUMNS), *(jax.device_put(a, TOKENS) for a in (targets, dloss))
        loss, dlogits = jax.jit(jax.value_and_grad(lambda x, t, d: jnp.sum(fa.nn.softmax_cross_entropy(x, t) * d)))(
            *placed
        )
    want, want_dlogits = jax.jit(jax.value_and_grad(plain))(10 * logits)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(dlogits, want_dlogits, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_options_of_cross_entropy(mesh_of, dtype):
    """Ignored targets, label smoothing, z-loss and a padded vocabulary: values, gradients and second derivatives."""
    rng, vocab = np.random.default_rng(0), 13
    targets = rng.integers(0, vocab, (2, 6)).astype(np.int32)
    targets[0, :2] = -100

    def plain(logits):
        scores = logits[..., :vocab]
        lse, one_hot = jax.nn.logsumexp(scores, -1), jax.nn.one_hot(targets, vocab, dtype=scores.dtype)
        at_target = 0.9 * jnp.sum(scores * one_hot, -1) + 0.1 * jnp.mean(scores, -1)
        return jnp.sum(jnp.where(targets == -100, 0, lse - at_target + 0.01 * lse**2) ** 2)

    def ours(logits):
        placed = jax.device_put(targets, TOKENS)
        options = {"ignore": -100, "label_smoothing": 0.1, "z_loss": 0.01, "vocab_size": vocab}
        return jnp.sum(fa.nn.softmax_cross_entropy(logits, placed, **options) ** 2)

    def derivatives(loss, logits):
        penalty = jax.value_and_grad(lambda logits: jnp.sum(jnp.sin(jax.grad(loss)(logits))))
        return loss(logits), jax.grad(loss)(logits), *penalty(logits)

    with jax.enable_x64(dtype == "float64"):
        logits = rng.standard_normal((2, 6, 16)).astype(dtype)
        want = jax.jit(lambda logits: derivatives(plain, logits))(logits)
        with jax.set_mesh(mesh_of(1, 4)):
            got = jax.jit(lambda logits: derivatives(ours, logits))(jax.device_put(logits, COLUMNS))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize(("shape", "dtype", "options", "error"), [
    ((2, 6), np.float32, {}, "needs targets of an integer dtype: got float32"),
    ((2, 6), np.int32, {"vocab_size": 9}, r"needs vocab_size to be 1 \.\. 8, or None: got 9"),
    ((2, 3), np.int32, {}, "needs one target a row"),
])  # fmt: skip
def test_targets_that_are_refused(mesh_of, shape, dtype, options, error):
    with jax.set_mesh(mesh_of(1, 4)), pytest.raises(ValueError, match=error):
        fa.nn.softmax_cross_entropy(ones((2, 6, 8), COLUMNS), np.zeros(shape, dtype), **options)


def test_cross_entropy_of_huge_logits_is_finite(mesh_of):
    with jax.set_mesh(mesh_of(1, 4)):
        logits = jax.device_put(np.where(np.arange(8) == 5, 1e30, -1e30).astype(np.float32)[None, None], COLUMNS)
        targets = jax.device_put(np.array([[5]], np.int32), TOKENS)
        assert np.asarray(jax.jit(fa.nn.softmax_cross_entropy)(logits, targets)).item() == 0.0


@pytest.mark.optimized
@pytest.mark.parametrize("backend", ["xla", "none"])
def test_no_device_ever_holds_whole_logits(mesh_of, backend):
    """No array of the compiled loss and its gradient has V = 64 features; some have the 16 of a shard."""
    with jax.set_mesh(mesh_of(1, 4)):
        embed = drawn(lambda: fa.nn.VocabParallelEmbed(64, 8, backend=backend, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(embed)

        def loss(state, x, targets):
            return jnp.sum(fa.nn.softmax_cross_entropy(nnx.merge(graph, state).attend(x), targets))

        x, targets = ones((2, 12, 8), ROWS), jax.device_put(np.zeros((2, 12), np.int32), TOKENS)
        text = jax.jit(jax.value_and_grad(loss)).lower(state, x, targets).compile().as_text()
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    assert "2,12,16" in shapes
    assert not [shape for shape in shapes if "64" in shape.split(",")]


@pytest.mark.parametrize(("ids", "spec", "mesh", "error"), [
    (np.ones((2, 4), np.float32), P(), (1, 4), "looks up integers: got ids of float32"),
    (np.zeros((2, 4), np.int32), P(None, "model"), (1, 4), "needs all ids on every device of 'model'"),
    (np.zeros((2, 6), np.int32), P(), (1, 4), "got 6 rows on 4 devices; pad them to 8"),
    (np.zeros(12, np.int32), P("data"), (2, 4), "over 'data', 'model': got 12 rows on 8 devices; pad them to 16"),
])  # fmt: skip
def test_ids_that_are_refused(mesh_of, ids, spec, mesh, error):
    with jax.set_mesh(mesh_of(*mesh)):
        layer = drawn(lambda: fa.nn.VocabParallelEmbed(8, 8, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=error):
            layer(jax.device_put(ids, spec))


def test_ids_and_logits_inside_a_shard_map(mesh_of):
    with jax.set_mesh(mesh_of(1, 4)):
        graph, state = nnx.split(drawn(lambda: fa.nn.VocabParallelEmbed(8, 8, rngs=nnx.Rngs(0))))
        specs = P("model"), P(None, "model")
        look_up = jax.shard_map(lambda state, ids: nnx.merge(graph, state)(ids), in_specs=specs, out_specs=ROWS)
        with pytest.raises(ValueError, match="got ids that vary over it"):
            jax.eval_shape(look_up, state, jax.device_put(np.zeros((2, 16), np.int32), P(None, "model")))
        loss = jax.shard_map(fa.nn.softmax_cross_entropy, in_specs=(P(), P()), out_specs=P())
        with pytest.raises(ValueError, match="got logits that are the same on all of its devices"):
            jax.eval_shape(loss, np.ones((2, 4, 8), np.float32), np.zeros((2, 4), np.int32))
