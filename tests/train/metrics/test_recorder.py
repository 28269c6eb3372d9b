"""Tests of train/metrics/recorder.py: each step has one line whatever happened, and every line is valid JSON."""

import json
import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from train.lifecycle.errors import DivergedError
from train.metrics import recorder as pace_module
from train.metrics.lines import MetricsFile
from train.metrics.recorder import Pace
from train.metrics.recorder import Recorder, Sink
from train.metrics.sinks import TensorBoard


class Lines(Sink):
    """Keeps what it is given."""

    def __init__(self):
        self.lines, self.closed = [], False

    def write(self, lines):
        self.lines += lines

    def close(self):
        self.closed = True


def test_a_line_has_all_metrics_of_its_step():
    sink = Lines()
    recorder = Recorder([sink], Pace(tokens_per_step=64))
    recorder.add(3, loss=jnp.float32(2.5), grad_norm=jnp.float32(0.1), learning_rate=jnp.float32(1e-3))
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
        "a float32 must survive the round trip through JSON"
    )


def test_every_report_has_the_speed_and_the_wait_of_its_own_interval(monkeypatch):
    class Clock:
        """Stands for the module `time`."""

        now = 0.0

        def perf_counter(self):
            return self.now

        time = perf_counter

    class Late:
        """A loss that the devices need three seconds for."""

        def __array__(self, dtype=None, copy=None):
            clock.now += 3
            return np.float32(1)

    clock, sink = Clock(), Lines()
    monkeypatch.setattr(pace_module, "time", clock)
    recorder = Recorder([sink], Pace(tokens_per_step=60))
    clock.now += 1
    recorder.add(1, loss=Late())
    recorder.report(1)
    clock.now += 2
    recorder.add(2, loss=jnp.float32(1))
    recorder.report(2)
    clock.now += 1
    with recorder.pace.counted("save"):  # as when a checkpoint is copied
        clock.now += 1
    recorder.add(3, loss=jnp.float32(1))
    recorder.add(4, loss=jnp.float32(1))
    recorder.report(4)
    assert [line["host_wait_share"] for line in sink.lines] == [0.75, 0, 0.5, 0.5]
    assert [line["tokens_per_second"] for line in sink.lines] == [15, 30, 60, 60]


def test_a_report_does_not_wait_for_later_steps():
    class Unfinished:
        def __array__(self):
            raise AssertionError("waited for a later step")

    sink = Lines()
    recorder = Recorder([sink], Pace(tokens_per_step=1))
    recorder.add(1, loss=jnp.float32(1))
    recorder.add(2, loss=Unfinished())
    recorder.report(1)
    recorder.report(1)
    assert [line["step"] for line in sink.lines] == [1]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stops_with_its_step_and_stays_valid_json(name, value, tmp_path):
    file, sink = MetricsFile(tmp_path / "metrics.jsonl", start=0), Lines()
    recorder = Recorder([file, sink], Pace(tokens_per_step=1))
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


def events_in(folder):
    """Reads all events of a folder. A record is its length, a checksum of that, the event, and a checksum of that."""
    for path in sorted(folder.iterdir()):
        records = path.read_bytes()
        while records:
            (length,) = struct.unpack("<Q", records[:8])
            yield Event.FromString(records[12 : 12 + length])
            records = records[12 + length + 4 :]


def test_event_files_have_the_metrics_and_discard_later_steps_of_an_earlier_process(tmp_path):
    said = []
    board = TensorBoard(tmp_path / "board", start=4, say=said.append)
    (tmp_path / "board").touch()  # in the place of the folder, so that nothing can be written yet
    board.write([{"step": 5, "loss": 1.5, "grad_norm": None}])
    board.write([{"step": 6, "loss": 1.25}])
    assert said == [f"{tmp_path}/board cannot be written: File exists; its events wait in memory"]
    (tmp_path / "board").unlink()
    board.close()
    events = list(events_in(tmp_path / "board"))
    # TensorBoard drops what other files of the folder have from the step of this event on.
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == [5]
    written = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert written == [(5, "loss", 1.5), (6, "loss", 1.25)]
