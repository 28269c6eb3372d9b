"""Tests of train/lifecycle/stopping.py: a signal requests a stop, and a process without progress ends."""

import os
import signal
import threading
import time

import pytest

from train.lifecycle.stopping import StopRequest, Watchdog


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_the_first_signal_is_recorded_and_determines_the_exit_code(number, code):
    before = signal.getsignal(number)
    with StopRequest(shared=False) as stop:
        assert not stop.should_stop(1)
        assert (stop.signal, stop.exit_code) == (None, 0)
        os.kill(os.getpid(), number)
        assert stop.should_stop(2)
        with pytest.raises(KeyboardInterrupt):  # a second Ctrl-C
            os.kill(os.getpid(), signal.SIGINT)
        assert (stop.signal, stop.exit_code) == (number, code)
    assert signal.getsignal(number) == before


def test_without_progress_the_process_ends_with_the_code_for_start_again(tmp_path, capsys):
    ended, code = threading.Event(), []
    with Watchdog(0.2, tmp_path / "stacks.txt", end=lambda number: (code.append(number), ended.set())) as watchdog:
        watchdog.progress("step 7")
        assert ended.wait(10)
    assert code == [75]
    assert "test_without_progress" in (tmp_path / "stacks.txt").read_text()
    said = capsys.readouterr().err
    assert "the run made no progress for 0 s after step 7" in said
    assert "report.hang_seconds sets the time" in said


@pytest.mark.parametrize("seconds", [0.5, 0], ids=["with progress", "waiting for ever"])
def test_the_process_goes_on(seconds, tmp_path):
    with Watchdog(seconds, tmp_path / "stacks.txt", end=pytest.fail) as watchdog:
        for _ in range(20):
            time.sleep(0.05)
            watchdog.progress("a step")
