"""Tests that a run which is killed at any moment, several times, ends exactly as a run that was not killed.

`kill -9` gives a process no time to react. It is sent at ten moments of different kinds: while the process starts,
between and inside steps, and while a checkpoint is being written. The same command is then started again.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.train.launcher import SCRIPT, Run, checkpoints_of, lines_of
from tests.train.lifecycle.faults.workplace import fault

STEPS = 60
SEED = 20  # determines the moments


def newest(workdir: Path) -> int:
    return max((int(name) for name in checkpoints_of(workdir) if name.isdigit()), default=0)


def state_of(workdir: Path) -> dict:
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        return manager.restore(STEPS, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]


def later(begins: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Returns a function that is true from `seconds` after the first call at which `begins()` is true."""
    began: list[float] = []

    def moment() -> bool:
        if not began and begins():
            began.append(time.monotonic())
        return bool(began) and time.monotonic() >= began[0] + seconds

    return moment


def started() -> bool:
    return True


def when_done(workdir: Path, steps: int) -> Callable[[], bool]:
    """Returns whether this start has done so many steps more than the file has lines now."""
    wanted = len(lines_of(workdir)) + steps
    path = workdir / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= wanted


def when_saved(workdir: Path) -> Callable[[], bool]:
    before = newest(workdir)
    return lambda: newest(workdir) > before


def while_saving(workdir: Path) -> Callable[[], bool]:
    before = checkpoints_of(workdir)
    return lambda: any("tmp" in name for name in checkpoints_of(workdir) - before)


def kill_at(process: Run, moment: Callable[[], bool]) -> None:
    """Kills the process when `moment` is true; the process must not end before that."""
    while not moment():
        assert process.poll() is None, f"the process ended before it was killed: {process.communicate()}"
        time.sleep(0.001)
    process.kill()
    process.communicate()


@fault("kill -9 while it starts", "kill -9 between two checkpoints", "kill -9 during the write of a checkpoint")
def test_a_run_killed_ten_times_ends_as_one_that_was_not_killed(start, preset, compile_little, tmp_path):
    """The program has all optimizations, as that of a real run."""
    one, killed = tmp_path / "one", tmp_path / "killed"
    little = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    command = [str(preset()), "--steps", str(STEPS), "--workdir"]

    # The first run is started as a user starts it, the others are forked; they must give the same results.
    environment = os.environ | compile_little | little
    process = subprocess.run([sys.executable, SCRIPT, *command, one], env=environment, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, ""), process.stdout + process.stderr

    dice = random.Random(SEED)
    moments = [  # what is awaited, and the longest time after it (seconds)
        (lambda: started, 1.0),
        (lambda: started, 3.0),
        (lambda: when_done(killed, 1), 0.05),
        (lambda: while_saving(killed), 0.01),
        (lambda: when_saved(killed), 0.02),
        (lambda: started, 3.0),
        (lambda: while_saving(killed), 0.03),
        (lambda: when_saved(killed), 0.1),
        (lambda: while_saving(killed), 0.1),
        (lambda: when_done(killed, dice.randint(1, 7)), 0.0),
    ]
    resumed_from = []
    for await_what, seconds in moments:
        resumed_from.append(newest(killed))
        kill_at(start(*command[1:], killed, **little), later(await_what(), dice.uniform(0.0, seconds)))
    process = start(*command[1:], killed, **little)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, ""), out + err

    assert len(set(resumed_from)) >= 3, resumed_from  # two moments wait for a new checkpoint
    expected, lines = lines_of(one), lines_of(killed)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, other in zip(lines, expected, strict=True):
        # These depend on the machine.
        times = dict.fromkeys(("tokens_per_second", "step_seconds", "data_wait_share", "host_wait_share", "goodput"))
        assert line | times == other | times
    state, other = state_of(killed), state_of(one)
    assert jax.tree.structure(state) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, state, other)
    assert all(name.isdigit() for name in checkpoints_of(killed)), "a half-written checkpoint is left"
    assert (killed / "sample.txt").read_text() == (one / "sample.txt").read_text()
