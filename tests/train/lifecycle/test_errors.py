"""Tests of train/lifecycle/errors.py: what a command prints and returns when it fails; and the help
of the commands.
"""

import errno
import os
import re
import subprocess
import sys

import pytest

from train import export_checkpoint, import_checkpoint, sample
from train.lifecycle.errors import InputError, cut, exit_code, one_line


def run(error):
    def action():
        raise error

    return exit_code(action, outcome="Nothing was done", memory_advice="Do less")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("a must be b"), 2, "error: a must be b"),
        (
            MemoryError("7 bytes"),
            4,
            "the host has too little memory (7 bytes). Nothing was done. Do less",
        ),
        (
            RuntimeError("RESOURCE_EXHAUSTED: x\nmore"),
            4,
            "a device has too little memory (RESOURCE_EXHAUSTED: x). No",
        ),
        (
            OSError(errno.ENOSPC, "full", "f"),
            74,
            "error: f could not be written or read: full. Nothing was done",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted. Nothing was done"),
    ],
)
def test_an_error_that_a_person_can_act_on_is_one_line(error, code, message, capsys):
    assert run(error) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a defect"),
        FileNotFoundError(errno.ENOENT, "no file"),
        BrokenPipeError(errno.EPIPE, "no reader"),
    ],
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


@pytest.mark.parametrize("closed", [(1,), (0, 1), (2, 1, 0), (2,)], ids=str)
def test_closed_streams_are_replaced_before_a_file_gets_their_number(closed, tmp_path):
    """What a library writes to standard error does not end up in a file, and the exit code is that
    of the error.
    """
    program = """if True:
        import os, sys
        from train.lifecycle.errors import InputError, exit_code

        def action():
            with open(sys.argv[1], "w") as file:
                os.write(1, b"one")
                os.write(2, b"two")
                print("three", sys.stdout.isatty(), sys.stdin.read())
                file.write("content")
            raise InputError("a must be b")

        sys.exit(exit_code(action, outcome="", memory_advice=""))"""
    redirections = " ".join(f"{number}>&-" for number in closed)
    command = [
        "bash",
        "-c",
        f'exec "$@" {redirections}',
        "bash",
        sys.executable,
        "-c",
        program,
        tmp_path / "file",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert done.returncode == 2
    assert (tmp_path / "file").read_text() == "content"
    assert done.stderr == ("" if 2 in closed else "twoerror: a must be b\n")


def test_a_text_that_the_encoding_lacks_or_nobody_reads_ends_nothing():
    program = """if True:
        import sys
        from train.lifecycle.errors import InputError, exit_code
        from train.metrics.output import print_line, warn

        def action():
            print_line("\u2502 caf\u00e9")
            sys.stdin.readline()  # until the reader of standard error is gone
            warn("one")
            raise InputError("two")

        sys.exit(exit_code(action, outcome="", memory_advice=""))"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    child = subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes)
    child.stderr.close()
    child.stderr = None
    out, _ = child.communicate(b"\n", timeout=60)
    assert (child.returncode, out) == (2, b"\\u2502 caf\xe9\n")


def test_a_long_value_in_a_message_is_cut():
    assert cut("a\nb" * 100) == repr("a\nb" * 100)[:200] + "..."
    assert one_line("a\n b") == "a b"
    assert one_line("no " + 300 * "x") == "no " + 197 * "x" + "..."
