"""Small programs as users write them, each compared with the dense model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flaxasync as fa
from tests.nn.conftest import assert_close, assert_model_close, drawn, make_mesh
from tests.user.models import LanguageModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile")]

GPT = {
    "embed": "embed",
    "blocks.*.attention": "attention",
    "blocks.*.mlp.wi": "column",
    "blocks.*.mlp.wo": "row",
}
TOKENS = P("data", None)
IDS = np.random.default_rng(0).integers(0, 61, (4, 8)).astype(np.int32)


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh(2, 4)):
        yield


def pair():
    """Returns a plain model and its parallel copy."""
    with jax.set_mesh(make_mesh(1, 1)):
        plain = drawn(gpt)
    model = drawn(gpt)
    fa.nn.parallelize(model, GPT, verbose=False)
    fa.nn.load(model, plain)
    return plain, model


def gpt():
    return LanguageModel(rngs=nnx.Rngs(0))


def plain_loss(model, ids):
    logits = model(ids)[..., :61]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids))


def parallel_loss(model, ids):
    return jnp.mean(fa.nn.softmax_cross_entropy(model(ids), ids, vocab_size=61))


def train(model, loss, ids, wrt=nnx.Param):
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=wrt)

    @nnx.jit
    def step(model, optimizer, ids):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, ids)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, ids)) for _ in range(4)]


def test_a_tied_gpt_is_trained_by_an_nnx_optimizer():
    """Losses of four steps with weight decay: padding of the vocabulary takes no part."""
    plain, model = pair()
    with jax.set_mesh(make_mesh(1, 1)):
        want = train(plain, plain_loss, IDS)
    np.testing.assert_allclose(
        train(model, parallel_loss, jax.device_put(IDS, TOKENS)), want, rtol=1e-4
    )
    assert model.embed.embedding.shape == (61, 16)


def test_low_rank_factors_are_trained_alone():
    _, model = pair()
    for block in model.blocks:
        block.mlp.wi = fa.nn.ParallelLoRA(block.mlp.wi, 2, rngs=nnx.Rngs(0))
        block.mlp.wo = fa.nn.ParallelLoRA(block.mlp.wo, 2, rngs=nnx.Rngs(1))
    before = np.asarray(model.blocks[0].mlp.wi.base_module.kernel[...])
    losses = train(model, parallel_loss, jax.device_put(IDS, TOKENS), wrt=nnx.LoRAParam)
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(model.blocks[0].mlp.wi.base_module.kernel[...], before)


def test_a_model_and_its_gradient_are_exported(tmp_path):
    """They are written to a file, read, and called."""
    plain, model = pair()
    graph, state = nnx.split(model)
    (leaves, tree), placed = jax.tree.flatten(state), jax.device_put(IDS, TOKENS)

    def call(leaves, ids):
        return nnx.merge(graph, tree.unflatten(leaves))(ids)

    def gradient(leaves, ids):
        return jax.tree.leaves(
            nnx.grad(parallel_loss)(nnx.merge(graph, tree.unflatten(leaves)), ids)
        )

    with jax.set_mesh(make_mesh(1, 1)):
        want, want_grads = plain(IDS), nnx.grad(plain_loss)(plain, IDS)
    results = []
    for fn in (call, gradient):
        exported = jax.export.export(jax.jit(fn))(leaves, placed)
        file = tmp_path / fn.__name__
        file.write_bytes(exported.serialize())
        results.append(jax.export.deserialize(bytearray(file.read_bytes())).call(leaves, placed))
    assert_close(np.asarray(results[0])[..., :61], want, "float32", "logits")
    assert_model_close(
        jax.tree.unflatten(jax.tree.structure(nnx.state(model, nnx.Param)), results[1]), want_grads
    )


def test_checkpoints_go_both_ways(tmp_path):
    """orbax saves the dense shapes, restores them into the parallel model, and the other way
    around.
    """
    plain, model = pair()
    other = drawn(gpt, seed=5)
    fa.nn.parallelize(other, GPT, verbose=False)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", nnx.to_pure_dict(nnx.state(plain)))
        checkpointer.save(tmp_path / "parallel", nnx.to_pure_dict(nnx.state(model)))
        checkpointer.wait_until_finished()
        dense = checkpointer.restore(tmp_path / "plain")
        ours = checkpointer.restore(tmp_path / "parallel")
    fa.nn.load(other, dense)
    assert other.blocks[0].mlp.wi.kernel[...].sharding.spec == P(None, "model")
    np.testing.assert_array_equal(other.embed.embedding[...], plain.embed.embedding[...])
    with jax.set_mesh(make_mesh(1, 1)):
        back = drawn(gpt, seed=6)
        fa.nn.load(back, ours)
    assert_model_close(nnx.state(back, nnx.Param), nnx.state(plain, nnx.Param), tolerance=0)
