"""Tests of a run of several processes: each loads its own rows, they stop together, and none
survives another.
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.processes import environments
from tests.train.lifecycle.conftest import after_step, fault
from tests.train.runs import SCRIPT, checkpoints_of, lines_of, without_progress
from train.lifecycle.workdir import open_workdir
from train.run import main

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
LOSSES_ONLY = ("--eval.every", 0)
FOREVER = (*LOSSES_ONLY, "--steps", 100_000, "--checkpoint.every", 100_000)
TOGETHER = ("--mesh.distributed", "True", "--mesh.cpu_devices", 4)
SECONDS = 30  # within which all processes end when one is gone
LOST = {75, -signal.SIGABRT}  # how a process ends when another one is gone


@pytest.fixture
def launch(start):
    """A function that starts two processes of four devices each; `options_of_second` are given to
    the second alone.
    """

    def two(*options: object, options_of_second: tuple[object, ...] = ()):
        return [
            start(*TOGETHER, *options, *own, **variables)
            for own, variables in zip(((), options_of_second), environments(2), strict=True)
        ]

    return two


def losses_of(workdir: Path) -> list[float]:
    return [line["loss"] for line in lines_of(workdir)]


def end(processes) -> tuple[list[int], list[tuple[str, str]]]:
    """Returns the exit codes, and what each process has printed since it was last read, to stdout
    and to stderr.
    """
    printed = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], [
        (out, without_progress(err)) for out, err in printed
    ]


@fault("several processes: SIGTERM to one of them")
def test_two_processes_train_as_one_and_stop_together(
    preset, launch, tmp_path, monkeypatch, trainer_of
):
    monkeypatch.setattr("train.lifecycle.training.Trainer", trainer_of)
    common = tuple(map(str, LOSSES_ONLY))
    assert (
        main([str(preset("auto")), *common, "--steps", "10", "--workdir", str(tmp_path / "one")])
        == 0
    )

    both = launch(*FOREVER, "--workdir", tmp_path / "two")
    after_step(both[0], 10)
    both[1].send_signal(signal.SIGTERM)
    codes, printed = end(both)
    assert codes == [75, 75], printed
    assert "stopped by SIGTERM after step" in printed[0][0]
    assert not any("step" in line for line in printed[1][0].splitlines()), (
        "only the first process prints"
    )
    assert len(checkpoints_of(tmp_path / "two")) == 1
    np.testing.assert_allclose(
        losses_of(tmp_path / "two")[:10], losses_of(tmp_path / "one"), rtol=1e-5
    )


@fault("several processes: other signals, to one or all of them")
@pytest.mark.parametrize(("to", "number", "codes", "after"), [
    ((1,), signal.SIGINT, [75, 130], 0), ((0, 1), signal.SIGHUP, [75, 75], 3)
], ids=["while they compile", "after a step"])  # fmt: skip
def test_a_signal_stops_all_after_the_same_step_which_they_save(
    to, number, codes, after, launch, tmp_path
):
    both = launch(*FOREVER)
    after_step(both[0], after) if after else both[0].stdout.readline()
    for rank in to:
        both[rank].send_signal(number)
    ended, printed = end(both)
    assert ended == codes, printed
    assert re.search(r"stopped by \w+ after step \d+, saved in", printed[0][0])
    assert len(checkpoints_of(tmp_path / "run")) == 1


@fault("several processes: Ctrl-C before they have joined")
def test_ctrl_c_ends_a_process_that_waits_for_another(start):
    variables = environments(2)[0]
    process = start(*TOGETHER, *FOREVER, **variables)
    host, port = variables["JAX_COORDINATOR_ADDRESS"].split(":")
    with socket.socket() as waits:
        # the first process listens, and waits for the second one
        while waits.connect_ex((host, int(port))):
            assert process.poll() is None
            time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")


@fault(
    "several processes: kill -9 of one of them", "several processes: a machine that falls silent"
)
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_end_of_one_process_ends_the_others(victim, number, launch):
    """SIGSTOP stands for a machine that hangs or has lost its network."""
    both = launch(*FOREVER)
    after_step(both[0], 3)
    both[victim].send_signal(number)
    out, err = both[1 - victim].communicate(timeout=SECONDS)
    assert both[1 - victim].returncode in LOST, out + err
    if both[1 - victim].returncode == 75:
        assert "error: another process of the run is gone (" in err


@fault("several processes: bad input in one of them")
@pytest.mark.parametrize(("options", "message"), [
    (("--data.path", "nowhere.txt"), "there is no nowhere.txt"),
    (("--steps", 99), "the command line must be the same in all processes of a run"),
])  # fmt: skip
def test_bad_input_of_one_process_is_printed_by_it_and_ends_the_other(options, message, launch):
    both = launch(*FOREVER, options_of_second=options)
    codes, printed = end(both)
    assert codes[1] == 2, printed
    assert codes[0] in {2, *LOST}, printed  # 2 if the processes noticed it together
    assert re.fullmatch(f"error: .*{message}.*\n", printed[1][1])


@fault("several processes: a locked workdir")
def test_a_locked_workdir_ends_all(launch, tmp_path):
    with open_workdir(tmp_path / "run"):
        codes, printed = end(launch(*FOREVER))
    assert codes[0] == 2, printed
    assert codes[1] in LOST, printed
    assert "is in use by another run" in printed[0][1]


def check_alive(supervisors):
    """Asserts that all supervisors run; if one has ended, says what it and its runs said."""
    ended = [supervisor for supervisor in supervisors if supervisor.poll() is not None]
    assert not ended, [(one.returncode, one.stderr.read()) for one in ended]


@pytest.mark.slow
def test_kills_under_the_supervisor_of_the_document_change_no_loss(
    launch, preset, environment, tmp_path
):
    work, script = tmp_path / "run", tmp_path / "supervise.sh"
    script.write_text(re.search(r"```bash\n(#!.*?)```", DOCUMENT.read_text(), re.DOTALL)[1])
    forever = tuple(
        map(
            str,
            (
                *TOGETHER,
                *LOSSES_ONLY,
                "--steps",
                100_000,
                "--checkpoint.every",
                5,
                "--workdir",
                work,
            ),
        )
    )
    supervisors = [
        subprocess.Popen(
            ["bash", script, sys.executable, SCRIPT, preset(), *forever],
            env=environment | {"PAUSE": "0.5"} | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in environments(2)
    ]
    dice, killed = random.Random(7), 0
    while killed < 6:
        time.sleep(dice.uniform(2.0, 9.0))
        check_alive(supervisors)
        with contextlib.suppress(OSError, IndexError):  # it is between two starts
            os.kill(child_of(dice.choice(supervisors).pid), signal.SIGKILL)
            killed += 1
    done = len(losses_of(work))
    while len(losses_of(work)) < done + 10:  # it goes on after the last kill
        check_alive(supervisors)
        time.sleep(0.5)
    first = child_of(supervisors[0].pid)
    for supervisor in supervisors:
        supervisor.kill()
    os.kill(first, signal.SIGTERM)
    # waits for the runs, too
    errors = [supervisor.communicate(timeout=60)[1] for supervisor in supervisors]
    assert not any("Traceback" in error for error in errors), errors

    losses = losses_of(work)
    assert max(map(int, checkpoints_of(work))) == len(losses)
    codes, printed = end(
        launch(*LOSSES_ONLY, "--steps", len(losses), "--workdir", tmp_path / "undisturbed")
    )
    assert codes == [0, 0], printed
    assert losses == losses_of(tmp_path / "undisturbed")


def child_of(pid: int) -> int:
    """Returns the run that a supervisor has started."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
