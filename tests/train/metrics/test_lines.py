"""Tests of train/metrics/lines.py: each step has one line whatever happened, and no line takes others with it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.metrics.lines import MetricsFile, read_metrics, repair


def fill(path, steps):
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in steps))


def steps_in(path):
    return [line["step"] for line in read_metrics(path)]


@given(done=st.integers(0, 30), restored=st.integers(0, 30), cut=st.integers(0, 25))
def test_each_step_has_one_line_after_a_restart(done, restored, cut, tmp_path_factory):
    """One process is killed while it writes the file, then another one continues from a checkpoint."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    fill(path, range(1, done + 1))
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    restored = min(restored, len(read_metrics(path)))
    file = MetricsFile(path, start=restored)
    file.write([{"step": step, "loss": 1.0 / step} for step in range(restored + 1, 41)])
    file.close()
    assert read_metrics(path) == [{"step": step, "loss": 1.0 / step} for step in range(1, 41)]


@pytest.mark.parametrize("broken", [b"garbage\n", b"[1]\n", b'{"loss": 1}\n', b"\0\0\0\n", b'{"step": 3, "loss\n'])
@pytest.mark.parametrize("where", [0, 2, 4])
def test_an_invalid_line_is_moved_aside_and_takes_no_other_with_it(broken, where, tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    fill(path, [1, 2, 4, 5])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:where], broken, *lines[where:]]))
    repair(path, start=100, say=said.append)
    assert steps_in(path) == [1, 2, 4, 5]
    assert (tmp_path / "metrics.invalid.jsonl").exists()
    assert f"{path} had 1 invalid lines, which were moved to {tmp_path / 'metrics.invalid.jsonl'}" in said[0]


def test_an_incomplete_last_line_is_dropped_silently_because_its_step_is_repeated(tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    fill(path, [1, 2])
    with open(path, "a") as file:
        file.write('{"step": 3, "loss')
    repair(path, start=2, say=said.append)
    assert (steps_in(path), said) == ([1, 2], [])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_steps_without_a_line_are_counted(tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    fill(path, [1, 2, 5])
    repair(path, start=7, say=said.append)
    assert said == [f"{path} lacks 4 of the 7 steps that were done before; they may still be in tensorboard/"]


def test_the_last_line_of_a_step_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 1}\n{"step": 1, "loss": 1}\n{"step": 2, "loss": 3}\n')
    assert read_metrics(path) == [{"step": 1, "loss": 1}, {"step": 2, "loss": 3}]
