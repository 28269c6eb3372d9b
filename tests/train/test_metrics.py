"""train/metrics.py: each step once, whatever happened, and nothing that is no JSON."""

import json
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.metrics import DivergedError, MetricsFile, Recorder, TensorBoard, keep_until, read_lines


class Sink:
    def __init__(self):
        self.lines, self.flushed, self.closed = [], 0, False

    def write(self, lines):
        self.lines += lines

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed = True


def fill(path, steps):
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in steps))


@given(done=st.integers(0, 30), restored=st.integers(0, 30), cut=st.integers(0, 25))
def test_a_restart_leaves_each_step_once(done, restored, cut, tmp_path_factory):
    """The file of a process that was killed while it wrote, then a process that continues from a checkpoint."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    fill(path, range(1, done + 1))
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    whole = len(list(read_lines(path)))
    restored = min(restored, whole)
    file = MetricsFile(path, start=restored)
    file.write([{"step": step, "loss": 1.0 / step} for step in range(restored + 1, 41)])
    file.close()
    assert list(read_lines(path)) == [{"step": step, "loss": 1.0 / step} for step in range(1, 41)]


def test_a_line_that_is_not_whole_ends_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for broken in ('{"step": 3, "loss', '{"step": 3}', "garbage\n", "[1]\n", '{"loss": 1}\n', "\0\0\0\n"):
        fill(path, [1, 2])
        with open(path, "a") as file:
            file.write(broken)
        keep_until(path, 100)
        assert [line["step"] for line in read_lines(path)] == [1, 2], broken
        assert path.read_text().endswith("\n")


def test_dropping_lines_leaves_no_other_file_behind(tmp_path):
    fill(tmp_path / "metrics.jsonl", [1, 2, 3])
    keep_until(tmp_path / "metrics.jsonl", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_has_what_was_measured():
    sink = Sink()
    recorder = Recorder([sink], tokens_per_step=64)
    recorder.add(3, loss=jnp.float32(2.5), grad_norm=jnp.float32(0.1), learning_rate=jnp.float32(1e-3))
    recorder.add(3, validation_loss=jnp.float32(2.75))
    recorder.report(3)
    (line,) = sink.lines
    assert line.pop("tokens_per_second") > 0
    assert 0 <= line.pop("host_wait_share") <= 1
    assert line == {
        "step": 3,
        "loss": 2.5,
        "grad_norm": float(jnp.float32(0.1)),
        "learning_rate": float(jnp.float32(1e-3)),
        "validation_loss": 2.75,
        "tokens": 192,
    }
    assert jnp.float32(json.loads(json.dumps(line))["grad_norm"]) == jnp.float32(0.1), "the line holds every bit"


def test_the_share_of_waiting_is_of_the_report_and_begins_anew_with_each():
    class Late:
        """A loss that is there after a while."""

        def __array__(self, dtype=None, copy=None):
            time.sleep(0.2)
            return np.float32(1)

    sink = Sink()
    recorder = Recorder([sink], tokens_per_step=1)
    recorder.start_clock()
    recorder.add(1, loss=Late())
    recorder.report(1)
    time.sleep(0.2)
    recorder.add(2, loss=jnp.float32(1))
    recorder.report(2)
    with recorder.waiting():  # as when a checkpoint is copied
        time.sleep(0.2)
    recorder.add(3, loss=jnp.float32(1))
    recorder.report(3)
    shares = [line["host_wait_share"] for line in sink.lines]
    assert shares[0] > 0.5, shares
    assert shares[1] < 0.5, shares
    assert shares[2] > 0.5, shares


def test_a_report_fetches_no_further_than_it_is_told():
    class Unfinished:
        def __array__(self):
            raise AssertionError("waited for a step that was not asked for")

    sink = Sink()
    recorder = Recorder([sink], tokens_per_step=1)
    recorder.add(1, loss=jnp.float32(1))
    recorder.add(2, loss=Unfinished())
    recorder.report(1)
    recorder.report(1)
    assert [line["step"] for line in sink.lines] == [1]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stops_with_its_step_and_stays_json(name, value, tmp_path):
    file, sink = MetricsFile(tmp_path / "metrics.jsonl", start=0), Sink()
    recorder = Recorder([file, sink], tokens_per_step=1)
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


def test_event_files_are_written_and_an_undone_part_is_marked(tmp_path):
    for start in (0, 1):
        board = TensorBoard(tmp_path, start=start)
        board.write([{"step": start + 1, "loss": 1.0, "grad_norm": None}])
        board.flush()
        board.close()
    written = sorted(tmp_path.iterdir())
    assert 1 <= len(written) <= 2  # two in one second share a name
    assert b"loss" in b"".join(path.read_bytes() for path in written)
