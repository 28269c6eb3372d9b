"""The rows of the fault table about processes, signals, memory and the clock. test_table.py says
what a row shows.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.train.lifecycle.conftest import QUIET, STEPS, after_step, ends, error_of, fault
from tests.train.runs import SCRIPT, lines_of


@fault("SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C")
def test_signal(place, expected):
    """One run is stopped by each of them in turn."""
    step = 0
    for number, code in (
        (signal.SIGTERM, 75),
        (signal.SIGHUP, 75),
        (signal.SIGUSR1, 75),
        (signal.SIGINT, 130),
    ):
        process = place.start()
        after_step(process, step + 4)
        process.send_signal(number)
        step = int(
            re.search(rf"stopped by {number.name} after step (\d+), saved in", ends(process, code))[
                1
            ]
        )
        assert max(place.steps_saved()) == step
    place.goes_on(expected)


@fault("a second Ctrl-C")
def test_second_interrupt(place, expected):
    process = place.start(code="def _delay(batch): return 0.3\n")
    after_step(process, 6)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    error_of(process, 130)
    place.goes_on(expected)


@fault("SIGTERM while it compiles")
def test_signal_at_start(place, expected):
    process = place.start()
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    ends(process, 75)
    place.goes_on(expected)


@fault("SIGTERM while one program compiles for long")
def test_signal_during_a_long_compilation(place, expected):
    """The main thread is blocked outside of Python, so that no handler of a signal runs."""
    block = """
from train.step import trainer as _trainer
def _block(self):
    import ctypes
    print("blocked", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)
_trainer.Trainer.compile_train_step = _block
"""
    process = place.start(code=block)
    while process.stdout.readline() != "blocked\n":
        pass
    process.send_signal(signal.SIGTERM)
    assert (
        ends(process, 75)
        == "stopped by SIGTERM before the first step; there was nothing new to save\n"
    )
    place.goes_on(expected)


@fault("standard input, output and error are closed")
def test_closed_streams(place, environment, expected):
    options = ("--steps", STEPS, "--workdir", place.work, "--checkpoint.every", 5, *QUIET)
    run = [
        "bash",
        "-c",
        'exec "$@" <&- >&- 2>&-',
        "bash",
        sys.executable,
        SCRIPT,
        place.preset,
        *options,
    ]
    assert subprocess.run(list(map(str, run)), env=environment, timeout=120).returncode == 0
    assert place.losses() == expected
    assert place.steps_saved()[-1] == STEPS


@fault("a preset that ends the process")
def test_preset_that_exits(place, expected):
    place.fails(2, "SystemExit: 0", code="import sys\nsys.exit(0)\n")
    assert not place.work.exists()
    place.goes_on(expected)


@fault("SIGSTOP, or a machine that sleeps, then SIGCONT")
def test_sleep(place, expected):
    process = place.start("--report.hang_seconds", 4)
    after_step(process, 6)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    ends(process, 0)
    assert place.losses() == expected


@fault("a read that never returns")
def test_hang(place, expected):
    hang = "def _delay(batch): return 0.03 if batch < 12 else 1e6\n"
    place.fails(
        75, "the run made no progress for 3 s after step 12", "--report.hang_seconds", 3, code=hang
    )
    assert "_slowly" in (place.work / "stacks.txt").read_text()
    place.goes_on(expected)


@fault("the reader of its output ends")
def test_closed_output(place, expected):
    process = place.start()
    after_step(process, 3)
    process.stdout.close()
    process.stdout = None
    assert process.wait() == 0
    assert place.losses() == expected


@fault("too little memory")
def test_memory(place, expected):
    allocate = """
from train.step import trainer as _step
def _init(self):
    import jax as _jax, jax.numpy as _jnp
    return _jax.block_until_ready(_jnp.zeros(2**44, _jnp.int8))
_step.Trainer.init = _init
"""
    place.fails(4, "has too little memory", code=allocate)
    place.goes_on(expected)


@fault("another run in the same workdir")
def test_two_runs(place, expected):
    first = place.start()
    after_step(first, 3)
    os.kill(first.pid, signal.SIGSTOP)  # so that it is not complete before the other one looks
    place.fails(2, "is in use by another run (process ")
    os.kill(first.pid, signal.SIGCONT)
    ends(first, 0)
    assert place.losses() == expected


@pytest.mark.parametrize("jump", [-86400, 86400], ids=["back", "forward"])
@fault("a wall clock that jumps by a day")
def test_clock(jump, place, expected):
    code = f"""
_clock = _time.time
def _delay(batch):
    if batch == 3:  # before the first checkpoint is written
        _time.time = lambda: _clock() + {jump}
    return 0.03
"""
    place.goes_on(expected, code=code)
    assert all(0 <= line["goodput"] <= 1 for line in lines_of(place.work))
