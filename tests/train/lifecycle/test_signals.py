"""Tests of train/lifecycle/signals.py: the first signal requests a stop, and a second Ctrl-C ends the process."""

import os
import signal

import pytest

from train.lifecycle.stopping import StopRequest


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_is_recorded_and_determines_the_exit_code(number, code):
    before = signal.getsignal(number)
    with StopRequest(shared=False) as stop:
        assert not stop.should_stop(1)
        os.kill(os.getpid(), number)
        assert stop.should_stop(2)
        assert stop.signal == number
        assert stop.exit_code == code
    assert signal.getsignal(number) == before


def test_the_first_signal_determines_the_exit_code():
    with StopRequest(shared=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == 75


def test_without_a_signal_the_exit_code_is_0():
    with StopRequest(shared=False) as stop:
        assert (stop.signal, stop.exit_code) == (None, 0)
