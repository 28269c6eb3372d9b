"""Tests of gradient accumulation: a batch in parts has the losses and the gradients of the whole
batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import TransformerConfig
from train.step.microbatches import loss_and_gradient, split_batch, sum_of_losses, what_differs
from train.step.trainer import Trainer


@pytest.fixture
def rows():
    """Sixteen rows of eight features and the weight of each row, sharded over all eight devices."""
    mesh = jax.make_mesh((8,), ("fsdp",))
    rng = np.random.default_rng(0)
    x, weights = (
        rng.normal(size=(16, 8)).astype(np.float32),
        (rng.random((16, 1)) < 0.6).astype(np.float32),
    )
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
        np.testing.assert_array_equal(
            np.moveaxis(np.asarray(part.data), 0, 1).reshape(2, 8), whole.data
        )


def test_sums_are_float32_sharded_as_the_parameters_and_weighted_by_targets(rows):
    w = jax.device_put(
        np.linspace(-1, 1, 8, dtype=np.float32).reshape(8, 1).astype(jnp.bfloat16),
        jax.P("fsdp", None),
    )
    whole, parts = (
        jax.jit(lambda w, count=count: loss_and_gradient(_with_half, number, w, rows, count))(w)
        for count in (1, 2)
    )
    assert whole[2].dtype == jnp.bfloat16
    assert parts[2].dtype == jnp.float32
    assert parts[2].sharding.spec == jax.P("fsdp", None)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    np.testing.assert_allclose(parts[1]["half"], whole[0] / 2, rtol=1e-5)
    np.testing.assert_allclose(parts[2], whole[2].astype(np.float32), rtol=2e-2, atol=2e-2)
    both = jax.jit(lambda w: sum_of_losses(_in_float32, number, w, rows, 2))(w)
    np.testing.assert_allclose(
        both, [float(whole[0]) * float(number(*rows)), number(*rows)], rtol=1e-5
    )
    unweighted = np.mean(
        [
            weighted_mean(np.asarray(w, np.float32), *(np.asarray(part)[n::2] for part in rows))
            for n in (0, 1)
        ]
    )
    assert abs(unweighted - whole[0]) > 1e-3, (
        "the micro-batches have as many targets: their weights are not tested"
    )


@pytest.mark.parametrize(("fields", "count", "says"), [
    ({}, 2, []),
    ({"experts": 4}, 1, []),
    ({"experts": 4, "load_balance_weight": 0.0, "router_z_weight": 0.1}, 2, []),
    ({"experts": 4}, 2, ["load-balancing loss"]),
    ({"experts": 4, "load_balance_weight": 0.0, "capacity_factor": 1.0}, 2, ["capacity"]),
    ({"experts": 4, "capacity_factor": 1.0}, 2, ["load-balancing loss", "capacity"]),
])  # fmt: skip
def test_a_mixture_of_experts_says_what_differs(fields, count, says):
    said = what_differs(TransformerConfig(**fields), count)
    assert len(said.split("; ")) == max(1, len(says))
    assert all(part in said for part in says)
    assert bool(said) == bool(says)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [
    {"load_balance_weight": 0.0, "router_z_weight": 0.1},
    {"load_balance_weight": 1.0},
    {"load_balance_weight": 0.0, "capacity_factor": 0.5},
])  # fmt: skip
def test_what_differs_is_all_that_differs(fields, config, mesh, replace):
    """The gradient of a mixture of experts in two micro-batches is that of the batch exactly if
    nothing is said.
    """
    config = replace(config, model={"experts": 4, "expert_width": 16, **fields})
    # what travels is not the subject here, and the plain backend compiles in half the time
    trainer = Trainer(dataclasses.replace(config, backend="none"), mesh)
    spec = jax.NamedSharding(mesh, jax.P("data", None))
    drawn = np.random.default_rng(0).integers(0, 128, (8, 17)).astype(np.int32)
    batch = (jax.device_put(drawn[:, :-1], spec), jax.device_put(drawn[:, 1:], spec))
    params = trainer.init().params

    def gradient(count):
        compute = jax.jit(
            lambda params: loss_and_gradient(trainer._loss, trainer._targets, params, batch, count)
        )
        _, parts, tree = compute(params)
        flat = np.concatenate(
            [np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(tree)]
        )
        return jax.device_get(parts), flat

    (whole_parts, whole), (parts, summed) = gradient(1), gradient(2)
    error = np.linalg.norm(summed - whole) / np.linalg.norm(whole)
    if what_differs(config.model, 2):
        assert error > 1e-3
    else:
        assert error < 1e-5
    if fields["load_balance_weight"]:
        assert parts["load_balance"] != pytest.approx(whole_parts["load_balance"], rel=1e-4)
        compute = jax.jit(lambda params, *micro: trainer._loss(params, *micro)[1]["load_balance"])
        halves = [compute(params, *(part[n] for part in split_batch(batch, 2))) for n in (0, 1)]
        mean = np.mean([float(half) for half in halves])
        assert float(parts["load_balance"]) == pytest.approx(mean, rel=1e-5)


def _with_half(w, x, weights):
    loss = _in_float32(w, x, weights)
    return loss, {"half": loss / 2}


def _in_float32(w, x, weights):
    whole = jax.sharding.reshard(w, jax.P(None, None)).astype(jnp.float32)
    return weighted_mean(whole, x, weights)
