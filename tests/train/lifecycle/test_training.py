"""Tests of train/lifecycle/training.py: the host runs ahead of the devices, and only finite states
are saved.
"""

import contextlib
import dataclasses
import re
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from flaxasync.check import progress
from tests.train.metrics.test_recorder import Lines
from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import identify_run
from train.checkpoints.saver import Saver
from train.config import Config, DataConfig, MeshConfig
from train.data.batches import TrainingBatches, split
from train.data.corpus import open_corpora
from train.lifecycle.errors import DivergedError
from train.lifecycle.stopping import StopRequest, Watchdog
from train.lifecycle.training import Loop, Profiler, changed_fields
from train.metrics.lines import Events
from train.metrics.recorder import Pace, Recorder
from train.step.evaluation import Evaluation


@pytest.fixture
def opened():
    """What the loops of a test have opened; closing it waits until every checkpoint is on disk."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def make_loop(mesh, trainer_of, opened, tmp_path):
    def make(config, sink=None):
        training, validation = split(open_corpora(config.data, vocab_size=128), config)
        trainer, identity = trainer_of(config, mesh), identify_run(config, {})
        batches = TrainingBatches(training, config, mesh)
        checkpoints = opened.enter_context(Checkpoints(tmp_path / "checkpoints", keep=9))
        recorder = Recorder(
            [sink] if sink else [], Pace(tokens_per_step=64), Events(None), skip_limit=1
        )
        events, watchdog = Events(None), Watchdog(0, tmp_path / "stacks.txt")
        return Loop(
            trainer.compile_train_step(),
            trainer.compile_eval_step() if config.eval.every else None,
            Evaluation(validation, config, mesh),
            Saver(config, checkpoints, batches, recorder, events, identity, watchdog, lambda: None),
            opened.enter_context(StopRequest(shared=False)),
            Profiler(config.profile, tmp_path / "profile", events),
        )

    return make


@pytest.fixture
def steps(opened, tmp_path):
    """A function that ends the loops of a test, and returns the steps of their checkpoints."""

    def steps():
        opened.close()
        with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
            return checkpoints.steps()

    return steps


def test_every_step_has_a_line_and_checkpoints_and_validations_follow_their_intervals(
    config, make_loop, trainer, steps
):
    loop = make_loop(dataclasses.replace(config, steps=12), sink := Lines())
    assert loop.run(trainer.init(), start=0) == 12
    assert [line["step"] for line in sink.lines] == list(range(1, 13))
    assert [line["step"] for line in sink.lines if "validation_loss" in line] == [10, 12]
    assert steps() == [5, 10, 12]


def test_slow_first_steps_say_how_many_are_done_until_the_first_report(
    config, make_loop, trainer, monkeypatch, capsys
):
    """Of steps 4, 5 and 6, the report at step 6 has the first ones, because a report is an interval
    late.
    """
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.1)
    loop = make_loop(dataclasses.replace(config, steps=12))

    def slow_step(state, *batch):
        time.sleep(0.3 if state.step < 6 else 0)
        return loop.train_step(state, *batch)

    state = dataclasses.replace(trainer.init(), step=jnp.int32(3))
    dataclasses.replace(loop, train_step=slow_step).run(state, start=3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "training" in line]
    said = r"flaxasync: training, \d of the 3 steps before the first report are done, \d s so far"
    assert lines
    assert all(re.fullmatch(said, line) for line in lines)


def test_a_start_prints_what_differs_from_the_defaults():
    config = Config(
        "runs/here", 3, mesh=MeshConfig(data=1, model=8), data=DataConfig(batch_size=32)
    )
    assert changed_fields(config) == {
        "run": {"workdir": "runs/here", "steps": 3},
        "mesh": {"data": 1, "model": 8},
        "data": {"batch_size": 32},
    }


def runs_ahead(loop, state, train_step, *, until: int, seconds: float) -> bool:
    """Says whether the host dispatches step `until` before the devices have finished the first
    step.

    The first step needs a value that the devices get only when the host has dispatched step
    `until`. If the host waits for the devices before that, it gets there only because the devices
    go on without it after `seconds`.
    """
    calls, dispatched, in_time = [], threading.Event(), []

    def wait_for_the_host(step):
        in_time.append(dispatched.wait(seconds))
        return step

    def count_and_dispatch(state, *batch):
        outputs = train_step(state, *batch)
        calls.append(1)
        if len(calls) == until:
            dispatched.set()
        return outputs

    delay = jax.shard_map(
        lambda step: jax.pure_callback(wait_for_the_host, step, step),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    state = dataclasses.replace(state, step=jax.jit(delay)(state.step))
    dataclasses.replace(loop, train_step=count_and_dispatch).run(state, start=0)
    assert len(in_time) == jax.device_count(), "every device waits for the host once"
    return all(in_time)


@pytest.mark.parametrize(("waits", "until", "ahead"), [
    pytest.param(False, 8, True, id="two intervals"),
    pytest.param(False, 9, False, id="negative: the report of step 8 waits"),
    pytest.param(
        True, 2, False, id="negative: every call of the step waits", marks=pytest.mark.slow
    ),
])  # fmt: skip
def test_the_host_dispatches_two_intervals_before_it_waits(
    waits, until, ahead, config, make_loop, trainer, replace
):
    """Neither a call of the compiled step nor the loading of a batch waits for the devices."""
    loop = make_loop(
        replace(config, report={"every": 4}, checkpoint={"every": 100}, eval={"every": 0})
    )

    def waiting_step(*arguments):
        return jax.block_until_ready(loop.train_step(*arguments))

    step = waiting_step if waits else loop.train_step
    seconds = 60 if ahead else 0.5
    assert runs_ahead(loop, trainer.init(), step, until=until, seconds=seconds) == ahead


def test_a_stop_saves_the_current_step(config, make_loop, trainer, steps):
    loop = make_loop(config, Lines(on_write=lambda: loop.stop._note(15, None)))
    step = loop.run(trainer.init(), start=0)
    assert step == 4, "the first report, which has the steps up to 2, comes in step 4"
    assert steps() == [4]


def test_a_loss_that_is_not_finite_is_never_saved(config, make_loop, trainer, replace, steps):
    loop = make_loop(replace(config, checkpoint={"every": 1}), sink := Lines())
    done = []

    def spoil(state, *batch):
        """Runs the step, with parameters that are not finite from the fourth step on."""
        done.append(state.step)
        if len(done) == 4:
            state = dataclasses.replace(
                state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
            )
        return loop.train_step(state, *batch)

    with pytest.raises(DivergedError) as error:
        dataclasses.replace(loop, train_step=spoil).run(trainer.init(), start=0)
    assert error.value.step == 4
    assert steps() == [1, 2, 3]
    assert [line["step"] for line in sink.lines] == [1, 2, 3, 4]
