"""Tests that a run which is killed at any moment, several times, ends exactly as a run that was not
killed.

`kill -9` gives a process no time to react. It is sent at ten moments of different kinds: while the
process starts, between and inside steps, and while a checkpoint is being written. The same command
is then started again.
"""

import random
import signal
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.train.lifecycle.conftest import fault
from tests.train.runs import checkpoints_of, lines_of, without_progress

STEPS = 60
SEED = 20  # determines the moments
MOMENTS = [  # what is awaited, and the longest time after it (seconds)
    ("start", 3),
    ("start", 5),
    ("step", 0.05),
    ("saving", 0.01),
    ("saved", 0.02),
    ("start", 5),
    ("saving", 0.03),
    ("saved", 0.1),
    ("saving", 0.1),
    ("step", 0.3),
]


def progress_of(workdir: Path) -> tuple[int, int, set[str]]:
    """Returns the number of lines of metrics, the newest checkpoint, and the checkpoints that are
    being written.
    """
    names, path = checkpoints_of(workdir), workdir / "metrics.jsonl"
    lines = path.read_bytes().count(b"\n") if path.exists() else 0
    newest = max((int(name) for name in names if name.isdigit()), default=0)
    return lines, newest, {name for name in names if "tmp" in name}


def reached(awaited: str, workdir: Path, before: tuple[int, int, set[str]]) -> bool:
    lines, newest, writing = progress_of(workdir)
    now = {
        "start": True,
        "step": lines > before[0],
        "saved": newest > before[1],
        "saving": bool(writing - before[2]),
    }
    return now[awaited]


def state_of(workdir: Path) -> dict:
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        return manager.restore(STEPS, args=ocp.args.Composite(state=ocp.args.StandardRestore()))[
            "state"
        ]


@fault(
    "kill -9 while it starts",
    "kill -9 between two checkpoints",
    "kill -9 during the write of a checkpoint",
)
def test_a_run_killed_ten_times_ends_as_one_that_was_not_killed(start, tmp_path):
    """The model is a mixture of experts, whose attention is in 8 bits: it has all that a plain one
    has.
    """
    one, killed = tmp_path / "one", tmp_path / "killed"

    def start_in(workdir):  # with all optimizations, as a real run
        options = (
            "--model.experts",
            4,
            "--model.quantization",
            "int8",
            "--model.quantization_backward",
            "int8",
        )
        return start(
            "--steps", STEPS, "--workdir", workdir, *options, JAX_DISABLE_MOST_OPTIMIZATIONS="0"
        )

    resumed_from, dice = [], random.Random(SEED)
    for awaited, seconds in MOMENTS:
        before = progress_of(killed)
        resumed_from.append(before[1])
        process = start_in(killed)
        while process.poll() is None and not reached(awaited, killed, before):
            time.sleep(0.001)
        time.sleep(dice.uniform(0, seconds))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the process ended before it was killed"
    assert len(set(resumed_from)) >= 3, resumed_from  # two moments wait for a new checkpoint
    for workdir in (killed, one):
        process = start_in(workdir)
        out, err = process.communicate()
        assert (process.returncode, without_progress(err)) == (0, ""), out + err

    expected, lines = lines_of(one), lines_of(killed)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, other in zip(lines, expected, strict=True):
        # These depend on the machine.
        times = dict.fromkeys(
            ("tokens_per_second", "step_seconds", "data_wait_share", "host_wait_share", "goodput")
        )
        assert line | times == other | times
    state, other = state_of(killed), state_of(one)
    assert jax.tree.structure(state) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, state, other)
    assert all(name.isdigit() for name in checkpoints_of(killed)), (
        "a half-written checkpoint is left"
    )
