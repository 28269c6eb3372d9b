"""Tests of train/lifecycle/monitor.py: how the end of one training process ends the others. Nothing is trained here."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Joins by way of files, then runs the code of its rank.
PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
from train.lifecycle.errors import RestartError
from train.lifecycle.monitor import supervise
from train.lifecycle.peers import Member

rank, count, folder, code = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

def join(link):
    own = Member(rank, "here", os.getppid(), ["127.0.0.1"], link.port, "token")
    written = folder / f"{rank}.tmp"
    written.write_text(json.dumps(vars(own)))
    written.rename(folder / f"{rank}.json")
    files = [folder / f"{other}.json" for other in range(count)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    link.joined([Member(**json.loads(file.read_text())) for file in files], rank)

def train(link):
    return eval(code)

sys.exit(supervise(train, 10.0))
"""
# Sends SIGINT to the monitor as soon as it has forked, before it can have a handler; the child starts a little later.
INTERRUPTED_FORK = """
import os, signal, time
fork = os.fork

def fork_and_interrupt():
    child = fork()
    if child:
        os.kill(os.getpid(), signal.SIGINT)
    else:
        time.sleep(0.5)
    return child

os.fork = fork_and_interrupt
"""
EARLY = "error: interrupted before the processes had joined; nothing was changed\n"
JOIN = "join(link) or time.sleep(0.5) or "


def start(folder: Path, *codes: str, program: str = PROCESS) -> list[subprocess.Popen]:
    """Starts one process for each expression, which is what its child evaluates and returns."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(len(codes)), str(folder), code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, code in enumerate(codes)
    ]


def end(processes: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    errors = [process.communicate(timeout=60)[1] for process in processes]
    return [process.returncode for process in processes], errors


@pytest.mark.parametrize("code", [0, 75, 130])
def test_processes_that_finish_alike_say_nothing(code, tmp_path):
    assert end(start(tmp_path, JOIN + str(code), JOIN + str(code))) == ([code, code], ["", ""])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_watchdog_in_one_process_ends_all_with_75(victim, tmp_path):
    codes = [JOIN + "time.sleep(60)"] * 2
    codes[victim] = JOIN + "os._exit(75)"
    both = start(tmp_path, *codes)
    ended, errors = end(both)
    assert ended == [75, 75], errors
    for error in errors:
        assert error.startswith(f"error: process {victim} (pid {both[victim].pid} on here) made no progress, so all")
        assert error.count("\n") == 1


def test_ctrl_c_before_the_processes_have_joined(tmp_path):
    """The child blocks SIGINT, as native code that waits for other processes in effect does."""
    waits = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) and 0 or print('waiting', flush=True) or "
    (process,) = start(tmp_path, waits + "time.sleep(60)")
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    assert end([process]) == ([130], [EARLY])


def test_ctrl_c_between_the_fork_and_the_handlers(tmp_path):
    assert end(start(tmp_path, "time.sleep(60)", program=INTERRUPTED_FORK + PROCESS)) == ([130], [EARLY])
