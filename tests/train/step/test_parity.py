"""Tests that twenty training steps give the same losses on every mesh, with every backend and way
to move weights.

The batches are easy to learn, and gradients may be those of micro-batches.
"""

import dataclasses
import types

import jax
import numpy as np
import pytest

import flaxasync as fa
from flaxasync.transport import direct
from tests.simulator.split_pairs import session
from train.step.mesh import CONTEXT, make_mesh, token_spec

STEPS = 20
ALONE = (1, 1, 1, 1)  # (data, fsdp, context, model), the reference
SLOW = pytest.mark.slow


@pytest.fixture
def on(config, replace, monkeypatch):
    """A function from the sizes of the four axes to the configuration and the mesh of a run on as
    many devices.
    """

    def on(sizes, **sections):
        devices = jax.devices()[: int(np.prod(sizes))]
        names = ("data", "fsdp", "context", "model")
        changed = replace(config, mesh=dict(zip(names, sizes, strict=True)), **sections)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "devices", lambda: devices)
            return changed, make_mesh(changed.mesh)

    return on


@pytest.fixture
def losses(on, trainer_of):
    """A function (sizes, state, sections, backend) -> (losses of twenty steps, the state at the
    beginning).
    """

    def run(sizes, began=None, backend="none", **sections):
        config, mesh = on(sizes, **sections)
        config = dataclasses.replace(config, backend=backend)
        with jax.set_mesh(mesh):
            trainer = trainer_of(config, mesh)
            state = trainer.init() if began is None else place(began, trainer)
            began = jax.tree.map(np.array, state)
            state, history = train(trainer, config, mesh, state, 0, STEPS)
            check_shards(state, mesh)
        return [loss for loss, _ in history], began

    return run


@pytest.fixture(scope="module")
def computed():
    """The references that were computed."""
    return {}


@pytest.fixture
def alone(computed, losses):
    """The losses of one device, and the state at the beginning: computed once for the compiler
    options of the test.

    Optimized programs round differently, which twenty steps of Adam make 0.002 of.
    """
    options = jax.config.values["jax_disable_most_optimizations"]
    if options not in computed:
        computed[options] = losses(ALONE)
    return computed[options]


def batches(config, mesh, start, steps):
    """Yields batches in which each token is half of the one before it, which twenty steps can begin
    to learn.
    """
    order = fa.sequence_order(
        config.mesh.context_layout, config.data.sequence_length, mesh.shape.get(CONTEXT, 1)
    )
    sharding = jax.NamedSharding(mesh, token_spec(mesh))
    for step in range(start, start + steps):
        tokens = np.random.default_rng(step).integers(0, 64, (config.data.batch_size, 1))
        tokens = (tokens >> np.arange(config.data.sequence_length + 1) % 6).astype(np.int32)
        parts = [tokens[:, :-1], tokens[:, 1:]]
        if config.data.separator is not None:
            ends = parts[0] == config.data.separator
            parts.append((np.cumsum(ends, axis=1) - ends).astype(np.int32))
        yield tuple(jax.device_put(part[:, order], sharding) for part in parts)


def train(trainer, config, mesh, state, start, steps):
    """Returns the state after some steps, and the loss and the gradient norm of each of them."""
    history = []
    for batch in batches(config, mesh, start, steps):
        state, metrics = trainer.train_step(state, *batch)
        history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return state, history


def place(state, trainer):
    """Puts the arrays of a state on the devices of a trainer."""
    return jax.tree.map(
        lambda leaf, to: jax.device_put(leaf, to.sharding), state, trainer.abstract_state()
    )


def check_shards(state, mesh):
    """Asserts that each device holds state / (fsdp x model) bytes, of all that is not the scale of
    a norm or a number.

    The scales are a thousandth of a model of any use, and are the same on all devices.
    """
    shards = mesh.shape.get("fsdp", 1) * mesh.shape["model"]
    for part in (state.params, state.opt_state):
        whole = held = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if leaf.ndim and "scale" not in jax.tree_util.keystr(path):
                whole += leaf.nbytes
                held += leaf.addressable_shards[0].data.nbytes
        assert whole > 0
        assert held == whole // shards, f"{held} bytes on a device, {whole} in all, {shards} shards"


@pytest.mark.parametrize(
    ("sizes", "backend", "overlap", "remat"),
    [
        ((2, 1, 1, 4), "xla", "xla", "none"),
        # the only ring here whose loop has a body
        pytest.param((1, 1, 1, 8), "xla", "xla", "none", marks=SLOW),
        # the program of a real run
        pytest.param((2, 1, 1, 4), "xla", "xla", "none", marks=[pytest.mark.optimized, SLOW]),
        pytest.param((1, 1, 4, 2), "xla", "xla", "none", marks=SLOW),
        pytest.param((2, 2, 1, 2), "auto", "xla", "none", marks=SLOW),
        pytest.param((1, 4, 1, 2), "auto", "prefetch", "layer", marks=SLOW),
        pytest.param((1, 2, 2, 2), "auto", "prefetch", "none", marks=SLOW),
        pytest.param((2, 2, 1, 2), "auto", "prefetch", "cheap", marks=SLOW),
        pytest.param((2, 1, 1, 4), "auto", "prefetch", "none", marks=SLOW),
    ],
    ids=str,
)
def test_losses_match_those_of_one_device_and_the_state_stays_sharded(
    losses, alone, sizes, backend, overlap, remat
):
    expected, began = alone
    history, _ = losses(sizes, began, backend, model={"fsdp_overlap": overlap, "remat": remat})
    np.testing.assert_allclose(history, expected, atol=1e-4)
    assert history[-1] < 0.8 * history[0]


@pytest.mark.parametrize(
    ("sizes", "backend", "quantized"),
    [
        pytest.param(
            (1, 2, 1, 4),
            "xla",
            {"quantization": "int8", "quantization_backward": "int8"},
            marks=SLOW,
        ),
        pytest.param((2, 1, 1, 4), "none", {"quantization": "fp8"}, marks=SLOW),
    ],
)
def test_steps_in_8_bits_learn_as_those_of_one_device_do(losses, alone, sizes, backend, quantized):
    expected, began = np.array(alone[0]), alone[1]
    history = np.array(losses(sizes, began, backend, model=quantized)[0])
    np.testing.assert_allclose(history, expected, rtol=2e-2)
    assert np.abs(history / expected - 1).max() > 1e-5, "nothing was quantised"


@pytest.mark.slow
def test_micro_batches_have_the_losses_of_the_whole_batch(on, replace, trainer_of):
    # A token of these rows is 2 now and then, but not equally often in each micro-batch.
    config, mesh = on((1, 2, 2, 2), data={"batch_size": 16, "separator": 2})
    with jax.set_mesh(mesh):
        began, histories, totals = None, [], []
        for count in (1, 4):
            changed = replace(config, data={"microbatches": count})
            trainer = trainer_of(changed, mesh)
            if began is None:
                began = jax.tree.map(np.array, trainer.init())
            expected, state = trainer.abstract_state(), place(began, trainer)
            nothing = jax.device_put(np.zeros(2, np.float32), jax.NamedSharding(mesh, jax.P()))
            totals.append(
                trainer.eval_step(state.params, nothing, *next(batches(changed, mesh, 0, 1)))
            )
            state, history = train(trainer, changed, mesh, state, 0, STEPS)
            histories.append(history)
            for leaf, to in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
                assert leaf.sharding.is_equivalent_to(to.sharding, leaf.ndim)
    for history, total in zip(histories[1:], totals[1:], strict=True):
        (losses, norms), (whole_losses, whole_norms) = (
            np.transpose(history),
            np.transpose(histories[0]),
        )
        np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
        np.testing.assert_allclose(norms[0], whole_norms[0], rtol=1e-5)
        # rounding in twenty updates moves them apart
        np.testing.assert_allclose(norms, whole_norms, rtol=1e-4)
        np.testing.assert_allclose(total, totals[0], rtol=1e-5)
    assert histories[0][-1][0] < 0.8 * histories[0][0][0]


def test_parameters_drawn_on_several_devices_are_those_of_one(losses):
    jax.tree.map(
        lambda here, there: np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6),
        losses((2, 1, 1, 4), backend="xla")[1].params,
        losses(ALONE)[1].params,
    )


@pytest.mark.slow
def test_twenty_steps_with_direct_copies_have_the_losses_of_one_device(losses):
    """On four devices of the simulator with race detection: the kernels of the form need TPUs."""
    # Blocks of 128 columns, on four devices, are whole tiles. So wide a model needs smaller steps
    # to learn steadily.
    options = {"model": {"width": 512, "head_dim": 2}, "optimizer": {"learning_rate": 30.0}}
    expected, began = losses(ALONE, **options)
    kinds = direct.all_gather, direct.all_to_all
    for kind in kinds:
        kind.cache_clear()
    with session(mode="eager", delayed={2: 0.01}) as report:
        options["model"] |= {"fsdp_overlap": "prefetch_pallas", "remat": "cheap"}
        history, _ = losses((1, 4, 1, 1), began, "auto", **options)
    assert all(kind.cache_info().currsize for kind in kinds), (
        "no array of this model travels by direct copies"
    )
    assert report.problems() == set()
    np.testing.assert_allclose(history, expected, atol=1e-4)
    assert history[-1] < 0.8 * history[0]


def test_a_state_that_is_not_sharded_over_fsdp_is_noticed(on):
    """The negative test of `check_shards`."""
    _, mesh = on((1, 2, 1, 2))

    def state(*spec):
        kernel = {
            "kernel": jax.device_put(
                np.ones((8, 8), np.float32), jax.NamedSharding(mesh, jax.P(*spec))
            )
        }
        return types.SimpleNamespace(params=kernel, opt_state=kernel)

    check_shards(state("fsdp", "model"), mesh)
    with pytest.raises(AssertionError, match="128 bytes on a device, 256 in all, 4 shards"):
        check_shards(state(None, "model"), mesh)
