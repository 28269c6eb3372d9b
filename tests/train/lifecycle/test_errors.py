"""Tests of train/lifecycle/errors.py: what a command prints and returns when it fails; and the help of the commands."""

import errno
import re
import subprocess
import sys

import pytest

from train import export_checkpoint, import_checkpoint, sample
from train.lifecycle.errors import InputError, exit_code


def run(error):
    def action():
        raise error

    return exit_code(action, outcome="Nothing was done", memory_advice="Do less")


@pytest.mark.parametrize(("error", "code", "message"), [
    (InputError("a must be b"), 2, "error: a must be b"),
    (MemoryError("7 bytes"), 4, "the host has too little memory (7 bytes). Nothing was done. Do less"),
    (RuntimeError("RESOURCE_EXHAUSTED: x\nmore"), 4, "a device has too little memory (RESOURCE_EXHAUSTED: x). No"),
    (OSError(errno.ENOSPC, "full", "f"), 74, "error: f could not be written or read: full. Nothing was done"),
    (KeyboardInterrupt(), 130, "error: interrupted. Nothing was done"),
])  # fmt: skip
def test_an_error_that_a_person_can_act_on_is_one_line(error, code, message, capsys):
    assert run(error) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a defect"), FileNotFoundError(errno.ENOENT, "no file"), BrokenPipeError(errno.EPIPE, "no reader")],
)
def test_any_other_error_keeps_its_traceback(error):
    with pytest.raises(type(error)) as raised:
        run(error)
    assert raised.value is error


def test_output_that_nobody_reads_any_more_is_no_error():
    program = """if True:
        import sys
        from train.lifecycle.errors import exit_code

        def action():
            sys.stdin.readline()  # until the reader of the output is gone
            print("text" * 100_000, flush=True)

        sys.exit(exit_code(action, outcome="", memory_advice="", reader_may_leave=True))"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)
    child.stdout.close()
    child.stdout = None
    _, error = child.communicate("\n", timeout=60)
    assert (child.returncode, error) == (0, "")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(import_checkpoint, "FOLDER"), (export_checkpoint, "WORKDIR FOLDER"), (sample, "WORKDIR")],
)
def test_help_calls_the_arguments_as_the_errors_do(command, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert re.search(rf"usage: train/\w+\.py \[-h\] \[OPTIONS\] {arguments}\n", shown)
    assert "default: --help" not in shown
