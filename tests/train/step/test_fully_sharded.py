"""Tests of training with parameters that are stored sharded over the fsdp axis: parity, memory and checkpoints."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from flaxasync.transport import direct
from tests.simulator.split_pairs import session
from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import identify_run
from train.step.mesh import make_mesh, sequence_order, token_spec

ROOT = pathlib.Path(__file__).parents[3]
STEPS = 20
# (data, fsdp, context, model); the first one is the reference.
MESHES = [(1, 1, 1, 1), (1, 8, 1, 1), (2, 2, 1, 2), (1, 2, 2, 2), (1, 4, 1, 2)]


@pytest.fixture
def on(config, replace, monkeypatch):
    """A function from the sizes of the four axes to the configuration and the mesh of a run on as many devices."""

    def on(sizes, **sections):
        devices = jax.devices()[: int(np.prod(sizes))]
        names = ("data", "fsdp", "context", "model")
        changed = replace(config, mesh=dict(zip(names, sizes, strict=True)), **sections)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "devices", lambda: devices)
            return changed, make_mesh(changed.mesh)

    return on


def batches(config, mesh, steps, start=0):
    """Yields batches in which each token is half of the one before it, which twenty steps can begin to learn."""
    order = sequence_order(mesh, config.mesh, config.data.sequence_length)
    sharding = jax.NamedSharding(mesh, token_spec(mesh))
    for step in range(start, start + steps):
        first = np.random.default_rng(step).integers(0, 64, (config.data.batch_size, 1))
        tokens = (first >> np.arange(config.data.sequence_length + 1) % 6).astype(np.int32)
        yield tuple(jax.device_put(part[:, order], sharding) for part in (tokens[:, :-1], tokens[:, 1:]))


def train(trainer, config, mesh, state, steps, start=0):
    """Returns the state after some steps, and their losses."""
    losses = []
    for batch in batches(config, mesh, steps, start):
        state, metrics = trainer.train_step(state, *batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.fixture
def losses(on, trainer_of):
    """A function (sizes, state, overlap, remat, sections) -> (losses of twenty steps, the state at the beginning)."""

    def run(sizes, began=None, overlap="xla", remat="none", **sections):
        model = sections.pop("model", {}) | {"fsdp_overlap": overlap, "remat": remat}
        config, mesh = on(sizes, model=model, **sections)
        with jax.set_mesh(mesh):
            trainer = trainer_of(config, mesh)
            if began is None:
                state = trainer.init()
            else:
                state = jax.tree.map(
                    lambda leaf, to: jax.device_put(leaf, to.sharding), began, trainer.abstract_state()
                )
            began = jax.tree.map(np.array, state)
            state, history = train(trainer, config, mesh, state, STEPS)
            check_shards(state, mesh)
        return history, began

    return run


def check_shards(state, mesh):
    """Asserts that each device holds state / (fsdp x model) bytes, of all that is not the scale of a norm or a number.

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "overlap", "remat"),
    [(sizes, overlap, remat) for overlap, remat in (("xla", "none"), ("prefetch", "layer")) for sizes in MESHES[1:]]
    + [(MESHES[2], "prefetch", "cheap"), (MESHES[3], "prefetch", "none")],
    ids=str,
)
def test_twenty_steps_have_the_losses_of_one_device_and_the_state_stays_sharded(losses, sizes, overlap, remat):
    expected, began = losses(MESHES[0])
    history, _ = losses(sizes, began, overlap, remat)
    np.testing.assert_allclose(history, expected, atol=1e-4)
    assert history[-1] < 0.8 * history[0]


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layer", "cheap"])
def test_twenty_steps_with_direct_copies_have_the_losses_of_one_device(losses, remat):
    """On four devices of the simulator with race detection: the kernels of the form need TPUs."""
    # Blocks of 128 columns, on four devices, are whole tiles. So wide a model needs smaller steps to learn steadily.
    options = {"model": {"width": 512, "head_dim": 2}, "optimizer": {"learning_rate": 30.0}}
    expected, began = losses(MESHES[0], **options)
    kinds = direct.all_gather, direct.all_to_all
    for kind in kinds:
        kind.cache_clear()
    with session(mode="eager", delayed={2: 0.01}) as report:
        history, _ = losses((1, 4, 1, 1), began, "prefetch_pallas", remat, **options)
    assert all(kind.cache_info().currsize for kind in kinds), "no array of this model travels by direct copies"
    assert report.problems() == set()
    np.testing.assert_allclose(history, expected, atol=1e-4)
    assert history[-1] < 0.8 * history[0]


def test_a_state_that_is_not_sharded_over_fsdp_is_noticed(on):
    """The negative test of `check_shards`."""
    _, mesh = on((1, 2, 1, 2))

    def state(*spec):
        kernel = {"kernel": jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(mesh, jax.P(*spec)))}
        return types.SimpleNamespace(params=kernel, opt_state=kernel)

    check_shards(state("fsdp", "model"), mesh)
    with pytest.raises(AssertionError, match="128 bytes on a device, 256 in all, 4 shards"):
        check_shards(state(None, "model"), mesh)


@pytest.mark.slow
def test_runs_resume_exactly_and_checkpoints_move_between_tensor_parallel_and_fully_sharded_meshes(
    on, trainer_of, tmp_path
):
    tensor_parallel, fully_sharded = (2, 1, 1, 4), (2, 2, 1, 2)

    def continue_on(sizes, folder, start, steps):
        config, mesh = on(sizes)
        identity = identify_run(config, {})
        with jax.set_mesh(mesh), Checkpoints(tmp_path / folder, keep=9) as checkpoints:
            trainer = trainer_of(config, mesh)
            state = checkpoints.restore(start, trainer.abstract_state(), identity)[0] if start else trainer.init()
            check_shards(state, mesh)
            state, losses = train(trainer, config, mesh, state, steps, start)
            checkpoints.save(start + steps, state, data={}, tokens=0, identity=identity)
            checkpoints.wait()
        return losses

    straight = continue_on(fully_sharded, "straight", 0, 4)
    again = continue_on(fully_sharded, "again", 0, 2)
    assert again + continue_on(fully_sharded, "again", 2, 2) == straight  # exactly
    moved = continue_on(tensor_parallel, "moved", 0, 2)
    moved += continue_on(fully_sharded, "moved", 2, 1)
    moved += continue_on(tensor_parallel, "moved", 3, 1)
    np.testing.assert_allclose(moved, straight, atol=1e-4)


@pytest.mark.slow
def test_the_run_of_make_train_has_the_same_losses_with_fully_sharded_parameters(compile_little, tmp_path):
    """`make train` is the tensor-parallel run; two options make its data axis an fsdp axis."""

    def train(*options: str) -> tuple[list[tuple[float, float]], float, str]:
        workdir = tmp_path / "-".join(("run", *options))
        command = [sys.executable, "train/run.py", "configs/tiny.py", "--steps", str(STEPS), "--workdir", str(workdir)]
        command += ["--eval.every", str(STEPS), "--eval.batches", "1", "--eval.sample_tokens", "0", *options]
        environment = os.environ | compile_little | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return [(line["loss"], line["grad_norm"]) for line in lines], lines[-1]["validation_loss"], done.stdout

    expected, expected_validation, printed = train()
    assert "8 cpu, as data 2 x model 4" in printed
    history, validation, printed = train("--mesh.fsdp", "2", "--mesh.data", "1")
    assert "8 cpu, as data 1 x fsdp 2 x model 4" in printed
    # Sums over the batch are added in another order, which twenty float32 steps amplify to less than this.
    assert len(history) == STEPS
    np.testing.assert_allclose(history, expected, rtol=1e-4)
    np.testing.assert_allclose(validation, expected_validation, rtol=1e-4)
    assert expected[-1][0] < 0.8 * expected[0][0], "nothing was learnt that could differ"
