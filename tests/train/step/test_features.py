"""Tests of what a run can be asked for besides the default: whole runs in this process, and single steps."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.launcher import checkpoints_of, events_of, lines_of
from train.step.trainer import Trainer

pytestmark = pytest.mark.slow
QUIET = ("--eval.every", 0, "--eval.sample_tokens", 0)


@pytest.fixture
def trained(run, tmp_path):
    """A function that trains 14 steps in this process, unless options say otherwise, and returns the workdir."""

    def trained(name: str, *options: object) -> Path:
        code, _, err = run("--steps", 14, "--workdir", tmp_path / name, *options)
        assert (code, err) == (0, "")
        return tmp_path / name

    return trained


@pytest.fixture
def batch(config, mesh, trainer_of):
    abstract = trainer_of(config, mesh).abstract_batch()[0]
    tokens = np.random.default_rng(0).integers(1, 128, abstract.shape).astype(np.int32)
    return jax.device_put(tokens, abstract.sharding)


def test_several_sources_and_evaluation_sets_have_losses_of_their_own(trained, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("another language altogether, over and over again\n" * 200)
    sources = ("--data.path", "None", "--data.sources", "code", text, 3.0, "prose", other, 1.0)
    work = trained("mixed", *sources, "--eval.sets", "held_out", other, "--eval.sample_tokens", 0)
    last = lines_of(work)[-1]
    for name in ("code", "prose", "held_out", "validation"):
        assert last[f"{name}_perplexity"] == pytest.approx(np.exp(last[f"{name}_loss"]))
    assert last["validation_loss"] == pytest.approx(0.75 * last["code_loss"] + 0.25 * last["prose_loss"], rel=1e-5)


def test_a_run_begins_with_the_parameters_of_another_one(trained):
    first = trained("first", *QUIET)
    again = trained("again", *QUIET, "--init_from", first, "--steps", 1)
    drawn = lines_of(first)[0]["loss"]
    assert lines_of(again)[0]["loss"] < drawn


def test_permanent_checkpoints_stay_beside_the_newest_ones(trained):
    work = trained(
        "permanent", *QUIET, "--checkpoint.every", 2, "--checkpoint.keep", 2, "--checkpoint.permanent_every", 5
    )
    assert checkpoints_of(work) == {"5", "10", "12", "14"}


def test_the_profiler_records_the_window(trained):
    work = trained("profiled", *QUIET, "--profile.start", 5, "--profile.steps", 2)
    assert list((work / "profile").rglob("*.xplane.pb"))
    events = events_of(work)
    assert [event["step"] for event in events if event["event"] == "profile"] == [6]


def test_the_running_mean_follows_the_parameters(config, mesh, replace, batch):
    trainer = Trainer(replace(config, optimizer={"ema_decay": 0.75}), mesh)
    state = trainer.init()
    expected = jax.tree.map(lambda leaf: np.array(leaf, np.float32), state.params)
    for _ in range(3):
        state, _ = trainer.train_step(state, batch, batch)
        expected = jax.tree.map(lambda mean, leaf: 0.75 * mean + 0.25 * np.asarray(leaf), expected, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.ema, expected)
    assert trainer.evaluated(state) is state.ema


def test_master_copies_keep_updates_that_bfloat16_rounds_away(config, mesh, replace, batch):
    """At 1 a bfloat16 cannot hold an update of 1e-4, so the scales of the norms move only with float32 copies."""
    few = {"learning_rate": 1e-4, "warmup_steps": 0, "schedule": "constant"}
    moved = {}
    for copies in (False, True):
        settings = few | {"master_copies": copies}
        trainer = Trainer(replace(config, model={"param_dtype": "bfloat16"}, optimizer=settings), mesh)
        state = trainer.init()
        for _ in range(4):
            state, _ = trainer.train_step(state, batch, batch)
        scale = state.params["final_norm"]["scale"]
        assert scale.dtype == (jnp.float32 if copies else jnp.bfloat16)
        assert trainer.model(state.params).final_norm.scale.dtype == jnp.bfloat16
        moved[copies] = float(jnp.max(jnp.abs(scale.astype(jnp.float32) - jnp.float32(1))))
    assert moved[True] == pytest.approx(4e-4, rel=0.2)
    assert moved[False] < 1e-6 or moved[False] > 3e-3


def test_documents_do_not_see_each_other(config, mesh, trainer_of):
    """The logits of a document do not depend on the one before it, with segment ids; without them they do."""
    trainer = trainer_of(config, mesh)
    params = trainer.init().params
    spec = jax.NamedSharding(mesh, jax.P("data", None))
    dice = np.random.default_rng(1)
    tokens = dice.integers(1, 128, (2, 16)).astype(np.int32)
    other = np.concatenate([dice.integers(1, 128, (2, 8)), tokens[:, 8:]], axis=1).astype(np.int32)
    segments = jax.device_put(np.repeat([[0, 1]], 8, axis=1).repeat(2, axis=0).astype(np.int32), spec)

    @jax.jit
    def logits(params, *batch):
        return jax.sharding.reshard(trainer.model(params)(*batch), jax.P("data", None, None))

    apart = [np.asarray(logits(params, jax.device_put(x, spec), segments))[:, 8:] for x in (tokens, other)]
    together = [np.asarray(logits(params, jax.device_put(x, spec)))[:, 8:] for x in (tokens, other)]
    np.testing.assert_allclose(apart[0], apart[1], rtol=1e-4, atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 1e-3
