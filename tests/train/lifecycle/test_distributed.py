"""Tests of a run of several processes: each loads its own rows, they stop together, and none survives another."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from train.lifecycle.local_processes import SCRIPT, environments
from train.lifecycle.workdir import Workdir
from train.run import main

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
LOSSES_ONLY = ("--eval.every", 0, "--eval.sample_tokens", 0)
FOREVER = (*LOSSES_ONLY, "--steps", 100_000, "--checkpoint.every", 100_000)
FAULTS = (  # the rows of the fault table that are tested here
    "several processes: SIGTERM to one of them",
    "several processes: Ctrl-C to one or to all of them",
    "several processes: a signal to one of them while they compile",
    "several processes: Ctrl-C before they have joined",
    "several processes: kill -9 of a training process",
    "several processes: kill -9 of a monitor",
    "several processes: a machine that falls silent",
    "several processes: bad input in one of them",
    "several processes: a locked workdir",
)


@pytest.fixture
def launch(start):
    """A function that starts two processes of four devices each; `options_of_each` differ between them."""

    def two(*options: object, options_of_each: tuple[tuple[object, ...], ...] = ((), ())):
        join = ("--mesh.distributed", "True", "--mesh.cpu_devices", 4)
        return [
            start(*join, *options, *own, **variables)
            for own, variables in zip(options_of_each, environments(2), strict=True)
        ]

    return two


def losses_of(workdir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(process, step: int) -> None:
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(process.communicate())


def end(processes) -> tuple[list[int], list[tuple[str, str]]]:
    printed = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], printed


def child_of(pid: int) -> int:
    """Returns the training process of a monitor."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_together(preset, launch, tmp_path, monkeypatch, trainer_of):
    monkeypatch.setattr("train.lifecycle.training.Trainer", trainer_of)
    common = tuple(map(str, LOSSES_ONLY))
    assert main([str(preset("auto")), *common, "--steps", "10", "--workdir", str(tmp_path / "one")]) == 0

    both = launch(*FOREVER, "--workdir", tmp_path / "two")
    wait_for_step(both[0], 10)
    both[1].send_signal(signal.SIGTERM)
    codes, printed = end(both)
    assert codes == [75, 75], printed
    assert "stopped by SIGTERM after step" in printed[0][0]
    assert not any("step" in line for line in printed[1][0].splitlines()), "only the first process prints"
    assert len(list((tmp_path / "two" / "checkpoints").iterdir())) == 1
    np.testing.assert_allclose(losses_of(tmp_path / "two")[:10], losses_of(tmp_path / "one"), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("to", [(0,), (1,), (0, 1)], ids=str)
def test_ctrl_c_to_any_process_stops_and_saves_all(to, launch, tmp_path):
    both = launch(*FOREVER)
    wait_for_step(both[0], 3)
    for rank in to:
        both[rank].send_signal(signal.SIGINT)
    codes, printed = end(both)
    assert codes == [130 if rank in to else 75 for rank in range(2)], printed
    assert [err for _, err in printed] == ["", ""]
    assert re.search(r"stopped by (SIGINT|SIGTERM) after step \d+, saved in", printed[0][0])
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_a_signal_during_compilation_stops_all_after_the_same_step(number, code, launch, tmp_path):
    both = launch(*FOREVER)
    both[0].stdout.readline()
    both[1].send_signal(number)
    codes, printed = end(both)
    assert codes == [75, code], printed
    assert [err for _, err in printed] == ["", ""]
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


@pytest.mark.slow
def test_ctrl_c_to_a_process_that_waits_for_another(start):
    process = start("--mesh.distributed", "True", "--mesh.cpu_devices", 4, *FOREVER, **environments(2)[0])
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch("error: interrupted .*\n", err), err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("which", ["the monitor", "the training process"])
def test_the_death_of_one_process_ends_the_others_within_10_seconds(which, victim, launch):
    both = launch(*FOREVER)
    wait_for_step(both[0], 3)
    pid = both[victim].pid
    os.kill(pid if which == "the monitor" else child_of(pid), signal.SIGKILL)
    began = time.monotonic()
    codes, printed = end(both)
    assert time.monotonic() - began < 10
    assert codes[1 - victim] == 75, printed
    assert codes[victim] == (-9 if which == "the monitor" else 75)
    err = printed[1 - victim][1]
    assert err.count("\n") == 1, err
    assert re.match(rf"error: process {victim} \(pid {pid} on .*\) (is gone|was killed by SIGKILL), so all", err), err


@pytest.mark.slow
def test_a_stopped_process_counts_as_dead(launch):
    """SIGSTOP stands for a machine that hangs or has lost its network."""
    both = launch(*FOREVER, "--mesh.heartbeat_seconds", 4)
    wait_for_step(both[0], 3)
    os.kill(child_of(both[1].pid), signal.SIGSTOP)
    os.kill(both[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    _, err = both[0].communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert both[0].returncode == 75
    assert re.match(r"error: process 1 \(.*\) has been silent for \d+ s, so all processes of the run end", err), err


@pytest.mark.slow
def test_bad_input_of_one_process_is_printed_by_it_alone(launch):
    both = launch(*FOREVER, options_of_each=((), ("--data.path", "nowhere.txt")))
    codes, printed = end(both)
    assert codes == [2, 2], printed
    errors = [err for _, err in printed]
    assert "".join(errors).count("\n") == 1, printed
    assert "the command line must be the same in all processes of a run: process 1 differs" in "".join(errors)


@pytest.mark.slow
def test_a_locked_workdir_is_one_paragraph(launch, tmp_path):
    with Workdir(tmp_path / "run").locked():
        codes, printed = end(launch(*FOREVER))
    assert codes == [2, 2], printed
    assert "is in use by another run" in printed[0][1]
    assert [err.count("\n") for _, err in printed] == [1, 0]


@pytest.mark.slow
def test_ten_kills_under_the_supervisor_of_the_document_change_no_loss(launch, preset, compile_little, tmp_path):
    """A kill can hit either process, its monitor or its training, while it starts or while it trains."""
    work = tmp_path / "run"
    script = tmp_path / "supervise.sh"
    script.write_text(re.search(r"```bash\n(#!.*?)```", DOCUMENT.read_text(), re.DOTALL)[1])
    join = ("--mesh.distributed", "True", "--mesh.cpu_devices", "4", "--workdir", work)
    forever = tuple(map(str, (*LOSSES_ONLY, "--steps", 100_000, "--checkpoint.every", 5)))
    supervisors = [
        subprocess.Popen(
            ["bash", script, sys.executable, SCRIPT, preset(), *join, *forever],
            env=os.environ | compile_little | {"PAUSE": "0.5"} | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in environments(2)
    ]
    dice, killed = random.Random(7), 0
    while killed < 10:
        time.sleep(dice.uniform(2.0, 9.0))
        assert [supervisor.poll() for supervisor in supervisors] == [None, None], killed
        with contextlib.suppress(OSError, IndexError):  # it is between two starts
            victim = child_of(supervisors[dice.randrange(2)].pid)
            os.kill(victim if dice.random() < 0.5 else child_of(victim), signal.SIGKILL)
            killed += 1
    done = number_of_lines(work)
    while number_of_lines(work) < done + 10:  # it goes on after the last kill
        assert [supervisor.poll() for supervisor in supervisors] == [None, None]
        time.sleep(0.1)
    monitor = child_of(supervisors[0].pid)
    for supervisor in supervisors:
        supervisor.kill()
    os.kill(monitor, signal.SIGTERM)
    errors = [supervisor.communicate(timeout=60)[1] for supervisor in supervisors]  # waits for the monitors, too
    assert not any("Traceback" in error for error in errors), errors

    losses = losses_of(work)
    assert max(int(path.name) for path in (work / "checkpoints").iterdir()) == len(losses)
    codes, printed = end(launch(*LOSSES_ONLY, "--steps", len(losses), "--workdir", tmp_path / "undisturbed"))
    assert codes == [0, 0], printed
    assert losses == losses_of(tmp_path / "undisturbed")


def number_of_lines(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
