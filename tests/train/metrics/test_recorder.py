"""Tests of train/metrics/recorder.py: what a line has, for which steps a report waits, and that
lines are JSON.
"""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from train.lifecycle.errors import DivergedError
from train.metrics import recorder as module
from train.metrics.lines import Events, MetricsFile, Sink
from train.metrics.recorder import Pace, Recorder


class Lines(Sink):
    """Keeps what it is given, and calls `on_write` for each report."""

    def __init__(self, on_write=lambda: None):
        self.lines, self.closed, self.on_write = [], False, on_write

    def write(self, lines):
        self.lines += lines
        self.on_write()

    def close(self):
        self.closed = True


def test_a_line_has_all_metrics_of_its_step():
    sink = Lines()
    recorder = Recorder([sink], Pace(tokens_per_step=64), Events(None), skip_limit=1)
    recorder.add(
        3, loss=jnp.float32(2.5), grad_norm=jnp.float32(0.1), learning_rate=jnp.float32(1e-3)
    )
    recorder.add(3, validation_loss=jnp.float32(2.75))
    recorder.report(3)
    (line,) = sink.lines
    assert line.pop("tokens_per_second") > 0
    assert line.pop("step_seconds") > 0
    assert line.pop("data_wait_share") == 0
    assert 0 <= line.pop("goodput") <= 1
    assert 0 <= line.pop("host_wait_share") <= 1
    assert line == {
        "step": 3,
        "loss": 2.5,
        "grad_norm": float(jnp.float32(0.1)),
        "learning_rate": float(jnp.float32(1e-3)),
        "validation_loss": 2.75,
        "validation_perplexity": math.exp(2.75),
        "tokens": 192,
    }
    assert jnp.float32(json.loads(json.dumps(line))["grad_norm"]) == jnp.float32(0.1), (
        "a float32 must survive JSON"
    )


class Clock:
    """Stands for the module `time`."""

    now = 0.0

    def perf_counter(self):
        return self.now

    time = perf_counter


class Late:
    """A loss that the devices need three seconds for."""

    def __init__(self, clock):
        self.clock = clock

    def __array__(self, dtype=None, copy=None):
        self.clock.now += 3
        return np.float32(1)


def test_every_report_has_the_speed_and_the_wait_of_its_own_interval(monkeypatch):
    clock, sink = Clock(), Lines()
    monkeypatch.setattr(module, "time", clock)
    recorder = Recorder([sink], Pace(tokens_per_step=60), Events(None), skip_limit=1)
    clock.now += 1
    recorder.add(1, loss=Late(clock))
    recorder.report(1)
    clock.now += 2
    recorder.add(2, loss=jnp.float32(1))
    recorder.report(2)
    clock.now += 1
    with recorder.pace.counted("save"):
        clock.now += 1
    recorder.add(3, loss=jnp.float32(1))
    recorder.add(4, loss=jnp.float32(1))
    recorder.add(5, loss=Late(clock))  # a report waits for no later step
    recorder.report(4)
    assert [line["host_wait_share"] for line in sink.lines] == [0.75, 0, 0.5, 0.5]
    assert [line["tokens_per_second"] for line in sink.lines] == [15, 30, 60, 60]
    recorder.report(4)
    assert [line["step"] for line in sink.lines] == [1, 2, 3, 4], "each step is written once"


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stops_with_its_step_and_stays_valid_json(name, value, tmp_path):
    file, sink = MetricsFile(tmp_path / "metrics.jsonl", start=0), Lines()
    recorder = Recorder([file, sink], Pace(tokens_per_step=1), Events(None), skip_limit=1)
    for step in range(1, 6):
        metrics = {"loss": jnp.float32(1), "grad_norm": jnp.float32(1)}
        recorder.add(step, **(metrics | {name: jnp.float32(value)} if step == 3 else metrics))
    with pytest.raises(DivergedError, match=f"{name} is {value} at step 3"):
        recorder.report(5)
    recorder.close()
    assert sink.closed
    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(raw, parse_constant=pytest.fail) for raw in text.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2][name] is None
