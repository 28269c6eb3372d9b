"""Tests of train/lifecycle/stopping.py: a signal requests a stop, and a process without progress
ends.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from train.lifecycle.stopping import StopRequest, Watchdog


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)],
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


# A mutex that is locked twice blocks the main thread for ever, as a long compilation does: no
# handler of Python runs.
BLOCKED = """if True:
    import ctypes, sys
    from train.lifecycle.stopping import StopRequest

    with StopRequest(shared=False, grace=float(sys.argv[1])) as stop:
        if sys.argv[2] == "after":
            stop.only_between_steps()
            print("steps", flush=True)
            sys.stdin.readline()
            stop.may_end_at_once("after step 7, which is saved")
        print("blocked", flush=True)
        mutex = ctypes.create_string_buffer(64)
        library = ctypes.CDLL(None)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
"""


def blocked(grace, when="before"):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", BLOCKED, str(grace), when], text=True, **pipes)


@pytest.mark.parametrize(
    ("numbers", "grace", "code"),
    [((signal.SIGTERM,), 0.2, 75), ((signal.SIGUSR1,), 0.2, 75), ((signal.SIGINT,), 0.2, 130),
     ((signal.SIGINT, signal.SIGINT), 1e6, 130)],
)  # fmt: skip
def test_a_signal_ends_a_process_whose_main_thread_is_blocked(numbers, grace, code):
    process = blocked(grace)
    assert process.stdout.readline() == "blocked\n"
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.05)  # two equal signals that wait are one
    out, err = process.communicate(timeout=60)
    name = numbers[0].name
    assert (out, err) == (
        f"stopped by {name} before the first step; there was nothing new to save\n",
        "",
    )
    assert process.returncode == code


def test_a_signal_during_the_steps_ends_the_process_only_when_there_is_nothing_to_save():
    process = blocked(0.2, "after")
    assert process.stdout.readline() == "steps\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out, err) == (
        75,
        "blocked\nstopped by SIGTERM after step 7, which is saved\n",
        "",
    )


def test_without_progress_the_process_ends_with_the_code_for_start_again(tmp_path, capsys):
    ended, code = threading.Event(), []
    with Watchdog(
        0.2, tmp_path / "stacks.txt", end=lambda number: (code.append(number), ended.set())
    ) as watchdog:
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
