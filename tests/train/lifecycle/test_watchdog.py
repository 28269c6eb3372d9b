"""Tests of train/lifecycle/watchdog.py: a process without progress ends, with its stacks on disk."""

import threading
import time

import pytest

from train.lifecycle.stopping import Watchdog


def test_without_progress_the_process_ends_with_the_code_for_start_again(tmp_path, capsys):
    ended, code = threading.Event(), []
    with Watchdog(0.2, tmp_path / "stacks.txt", end=lambda number: (code.append(number), ended.set())) as watchdog:
        watchdog.progress("step 7")
        assert ended.wait(10)
    assert code == [75]
    assert "test_without_progress" in (tmp_path / "stacks.txt").read_text()
    assert "the run made no progress for 0 s after step 7" in capsys.readouterr().err


def test_with_progress_the_process_goes_on(tmp_path):
    with Watchdog(0.5, tmp_path / "stacks.txt", end=pytest.fail) as watchdog:
        for _ in range(20):
            time.sleep(0.05)
            watchdog.progress("a step")


def test_0_seconds_wait_for_ever(tmp_path):
    with Watchdog(0, tmp_path / "stacks.txt", end=pytest.fail):
        time.sleep(0.1)
