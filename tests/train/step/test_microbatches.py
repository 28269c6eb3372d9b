"""Tests of gradient accumulation: a batch in parts has the losses and the gradients of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.step.steps import STEPS, batches, place, train
from train.step.mesh import make_mesh
from train.step.microbatches import loss_and_gradient, split_batch, sum_of_losses

FULLY_SHARDED = {"data": 2, "fsdp": 2, "model": 2}


@pytest.fixture
def rows():
    """Sixteen rows of eight features and the weight of each row, sharded over all eight devices."""
    mesh = jax.make_mesh((8,), ("fsdp",))
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(16, 8)).astype(np.float32), (rng.random((16, 1)) < 0.6).astype(np.float32)
    with jax.set_mesh(mesh):
        yield tuple(jax.device_put(part, jax.P("fsdp", None)) for part in (x, weights))


def weighted_mean(w, x, weights):
    return jnp.sum(jnp.square(x @ w) * weights) / jnp.maximum(jnp.sum(weights), 1)


def number(x, weights):
    return jnp.sum(weights)


def test_rows_of_a_micro_batch_stay_on_their_devices(rows):
    (parts,) = jax.jit(lambda x: split_batch((x,), 2))(rows[0])
    assert parts.sharding.spec == jax.P(None, "fsdp", None)
    np.testing.assert_array_equal(parts[1], np.asarray(rows[0])[1::2])
    for whole, part in zip(rows[0].addressable_shards, parts.addressable_shards, strict=True):
        np.testing.assert_array_equal(np.moveaxis(np.asarray(part.data), 0, 1).reshape(2, 8), whole.data)


def test_sums_are_float32_sharded_as_the_parameters_and_weighted_by_targets(rows):
    w = jax.device_put(np.linspace(-1, 1, 8, dtype=np.float32).reshape(8, 1).astype(jnp.bfloat16), jax.P("fsdp", None))
    whole, parts = (
        jax.jit(lambda w, count=count: loss_and_gradient(_in_float32, number, w, rows, count))(w) for count in (1, 2)
    )
    assert whole[1].dtype == jnp.bfloat16
    assert parts[1].dtype == jnp.float32
    assert parts[1].sharding.spec == jax.P("fsdp", None)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    np.testing.assert_allclose(parts[1], whole[1].astype(np.float32), rtol=2e-2, atol=2e-2)
    both = jax.jit(lambda w: sum_of_losses(_in_float32, number, w, rows, 2))(w)
    np.testing.assert_allclose(both, [float(whole[0]) * float(number(*rows)), number(*rows)], rtol=1e-5)
    unweighted = np.mean(
        [weighted_mean(np.asarray(w, np.float32), *(np.asarray(part)[n::2] for part in rows)) for n in (0, 1)]
    )
    assert abs(unweighted - whole[0]) > 1e-3, "the micro-batches have as many targets: their weights are not tested"


def _in_float32(w, x, weights):
    whole = jax.sharding.reshard(w, jax.P(None, None)).astype(jnp.float32)
    return weighted_mean(whole, x, weights)


@pytest.mark.slow
@pytest.mark.parametrize("separator", [None, 2], ids=["", "documents"])
@pytest.mark.parametrize(
    "mesh_config", [{"data": 2, "model": 4}, FULLY_SHARDED, {"data": 1, "fsdp": 2, "context": 2, "model": 2}], ids=str
)
def test_twenty_steps_have_the_losses_of_the_whole_batch(config, replace, trainer_of, mesh_config, separator):
    # A token of these rows is 2 now and then, but not equally often in each micro-batch.
    config = replace(config, mesh=mesh_config, data={"batch_size": 16, "separator": separator})
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        began, histories, totals = None, [], []
        for count in (1, 2, 4):
            changed = replace(config, data={"microbatches": count})
            trainer = trainer_of(changed, mesh)
            if began is None:
                began = jax.tree.map(np.array, trainer.init())
            expected, state = trainer.abstract_state(), place(began, trainer)
            nothing = jax.device_put(np.zeros(2, np.float32), jax.NamedSharding(mesh, jax.P()))
            totals.append(trainer.eval_step(state.params, nothing, *next(batches(changed, mesh, 0, 1))))
            state, history = train(trainer, changed, mesh, state, 0, STEPS)
            histories.append(history)
            for leaf, to in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
                assert leaf.sharding.is_equivalent_to(to.sharding, leaf.ndim)
    for history, total in zip(histories[1:], totals[1:], strict=True):
        (losses, norms), (whole_losses, whole_norms) = np.transpose(history), np.transpose(histories[0])
        np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
        np.testing.assert_allclose(norms[0], whole_norms[0], rtol=1e-5)
        np.testing.assert_allclose(norms, whole_norms, rtol=1e-4)  # rounding in twenty updates moves them apart
        np.testing.assert_allclose(total, totals[0], rtol=1e-5)
    assert histories[0][-1][0] < 0.8 * histories[0][0][0]
