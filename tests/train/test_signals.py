"""train/signals.py: the first signal asks, the second Ctrl-C insists."""

import os
import signal

import pytest

from train.signals import StopRequest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_is_remembered_and_gives_the_exit_code(number, code):
    before = signal.getsignal(number)
    with StopRequest(shared=False) as stop:
        assert not stop.came(1)
        os.kill(os.getpid(), number)
        assert stop.came(2)
        assert stop.signal == number
        assert stop.exit_code == code
    assert signal.getsignal(number) == before


def test_the_first_signal_counts():
    with StopRequest(shared=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == 0


def test_no_signal_is_success():
    with StopRequest(shared=False) as stop:
        assert (stop.signal, stop.exit_code) == (None, 0)
