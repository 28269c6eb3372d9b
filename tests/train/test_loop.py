"""train/loop.py: the host runs ahead, and saves only what is good."""

import contextlib
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.tiny import tiny
from train import metrics as metrics_module
from train.checkpoint import Checkpoints
from train.corpus import open_corpus
from train.data import TrainingBatches, ValidationBatches, split
from train.loop import Loop
from train.metrics import DivergedError, Recorder
from train.signals import StopRequest


@pytest.fixture
def make_loop(mesh, trainer_of, tmp_path):
    with contextlib.ExitStack() as stack:

        def make(config, sink=None):
            training, validation = split(open_corpus(config.data, vocab_size=128), config)
            trainer = trainer_of(config, mesh)
            return Loop(
                config,
                trainer,
                trainer.compile_train_step(),
                TrainingBatches(training, config, mesh),
                ValidationBatches(validation, config, mesh),
                stack.enter_context(Checkpoints(tmp_path / "checkpoints", keep=9)),
                Recorder([sink] if sink else [], tokens_per_step=64),
                stack.enter_context(StopRequest(shared=False)),
            )

        yield make


class Sink:
    """Notes lines, and calls `on_write`."""

    def __init__(self, on_write=None):
        self.lines, self.on_write = [], on_write

    def write(self, lines):
        self.lines += lines
        if self.on_write:
            self.on_write(lines)

    def flush(self):
        pass

    def close(self):
        pass


def test_every_step_has_a_line_and_checkpoints_and_validations_come_on_time(config, make_loop):
    sink = Sink()
    loop = make_loop(dataclasses.replace(config, steps=12), sink)
    state, step = loop.run(loop.trainer.init(), start=0)
    assert step == int(state.step) == 12
    assert [line["step"] for line in sink.lines] == list(range(1, 13))
    assert [line["step"] for line in sink.lines if "validation_loss" in line] == [10, 12]
    assert loop.checkpoints.steps() == [5, 10, 12]


def test_the_host_waits_only_where_it_reports(config, make_loop, monkeypatch, replace):
    """A report fetches the interval before the last one, so that the devices have work while the host waits."""
    fetched, dispatched = [], []
    device_get = jax.device_get
    monkeypatch.setattr(
        metrics_module.jax, "device_get", lambda tree: fetched.append((len(dispatched), len(tree))) or device_get(tree)
    )
    config = replace(config, report={"every": 4}, checkpoint={"every": 100}, eval={"every": 0})
    loop = make_loop(config)
    step = loop.train_step
    loop = dataclasses.replace(loop, train_step=lambda *arguments: dispatched.append(1) or step(*arguments))
    loop.run(loop.trainer.init(), start=0)
    reports = [(at, count) for at, count in fetched if isinstance(count, int)][:5]
    assert reports[:4] == [(8, 4), (12, 4), (16, 4), (20, 4)]
    assert reports[4] == (20, 4), "the last step is saved, and fetches the rest"


def share_of_dispatch(loop, state, step, start):
    """Runs the loop with `step` as its step; returns (state, time within calls of it as a share of all)."""
    held = 0.0

    def timed(*arguments):
        nonlocal held
        began = time.perf_counter()
        outputs = step(*arguments)
        held += time.perf_counter() - began
        return outputs

    began = time.perf_counter()
    state, _ = dataclasses.replace(loop, train_step=timed).run(state, start=start)
    return state, held / (time.perf_counter() - began)


def test_a_call_of_the_step_holds_the_host_for_less_than_a_tenth_of_it(config, make_loop, replace):
    """Eight steps of configs/tiny.py, of a quarter of its batch, then two of a twin that waits within the call.

    benchmarks/dispatch.py measures the whole batch, where steps are four times as long. What the parameters are makes
    no difference: they are zeros, which no program need be compiled for.
    """
    data = {"path": config.data.path, "batch_size": 4}
    config = replace(tiny(), data=data, eval={"every": 0}, checkpoint={"every": 100}, report={"every": 2})
    loop = make_loop(dataclasses.replace(config, steps=8), sink := Sink())
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract := loop.trainer.abstract_state())
    state = jax.device_put(zeros, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    state, share = share_of_dispatch(loop, jax.block_until_ready(state), loop.train_step, 0)
    assert share < 0.1, f"the host was held for {share:.1%}"
    waits = [line["host_wait_share"] for line in sink.lines]
    assert len(waits) == 8
    assert waits[0] > 0.5, "the host is ahead: it has nothing to do but wait until the first report can be made"

    loop = dataclasses.replace(loop, config=dataclasses.replace(config, steps=10))
    _, share = share_of_dispatch(loop, state, lambda *args: jax.block_until_ready(loop.train_step(*args)), 8)
    assert share > 0.5, f"a step that waits held the host for {share:.1%}"
    assert sink.lines[-1]["host_wait_share"] < 0.5, "what held it was not the report"


def test_a_stop_saves_the_step_in_hand(config, make_loop):
    loop = make_loop(config, Sink(on_write=lambda lines: loop.stop._note(15, None)))
    _, step = loop.run(loop.trainer.init(), start=0)
    assert step == 4, "the first report, of the steps up to 2, comes in step 4"
    assert loop.checkpoints.steps() == [4]


def test_a_run_continues_from_a_step(config, make_loop):
    whole, second = Sink(), Sink()
    loop = make_loop(dataclasses.replace(config, steps=10), whole)
    loop.run(loop.trainer.init(), start=0)
    loop.checkpoints.set_aside(5, loop.checkpoints.folder.parent / "aside")
    again = make_loop(dataclasses.replace(config, steps=10), second)
    from train.workdir import architecture

    state, position = again.checkpoints.restore(5, again.trainer.abstract_state(), architecture=architecture(config))
    again.batches.set_state(position)
    again.run(state, start=5)
    assert [(line["step"], line["loss"]) for line in second.lines] == [
        (line["step"], line["loss"]) for line in whole.lines[5:]
    ]


def test_a_loss_that_is_not_finite_is_never_saved(config, make_loop, replace):
    loop = make_loop(replace(config, checkpoint={"every": 1}), sink := Sink())
    done = []

    def spoil(state, *batch):
        """The step, of parameters that are not finite from the fourth on."""
        done.append(state.step)
        if len(done) == 4:
            state = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))
        return loop.train_step(state, *batch)

    with pytest.raises(DivergedError) as error:
        dataclasses.replace(loop, train_step=spoil).run(loop.trainer.init(), start=0)
    assert error.value.step == 4
    assert loop.checkpoints.choose(None) == 3
    assert [line["step"] for line in sink.lines] == [1, 2, 3, 4]
