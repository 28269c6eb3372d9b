"""python -m flaxasync.check: its output, its exit status, and what it says about bad input."""

import io
import json
import subprocess
import sys

import pytest

from flaxasync.check.__main__ import main
from tests.check import programs


@pytest.fixture
def dump(tmp_path):
    def write(text):
        path = tmp_path / "module.txt"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(("form", "options", "status", "words"), [
    ("value", [], 0, "audit of jit_value (v5e): ok"),
    ("staggered_unroll_1", [], 1, "error: in-flight-copied"),
    ("unthreaded", ["--expect", "permute_start=1"], 1, "deleted"),
])  # fmt: skip
def test_a_hazard_and_a_missing_operation_fail(dump, capsys, form, options, status, words):
    assert main([dump(programs.async_form(form).text), *options]) == status
    assert words in capsys.readouterr().out


def test_fail_on_chooses_the_severity(dump, monkeypatch, capsys):
    text = programs.mesh_matmul().text
    assert main([dump(text)]) == 0
    assert main([dump(text), "--fail-on", "warning"]) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    capsys.readouterr()
    assert main(["-", "--json", "--chip", "v5e"]) == 0
    assert json.loads(capsys.readouterr().out)["module"] == "jit_matmul"


def test_trace_and_picture(dump, tmp_path, capsys):
    trace, picture = tmp_path / "t.json", tmp_path / "t.png"
    path = dump(programs.mesh_matmul().text)
    assert main([path, "--timeline", "--trace", str(trace), "--picture", str(picture)]) == 0
    assert "timeline of jit_matmul on v5e: 12.3" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_read(dump, capsys):
    """tests/check/hlo/test_files.py has a message for each kind of file."""
    assert main([dump("nonsense")]) == 2
    assert "line 1, column 1: expected HLO text: got 'nonsense'" in capsys.readouterr().err
    assert main(["no/such/file"]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    ("gate", "usage: python -m flaxasync.check gate"),
    ("capture", "usage: python -m flaxasync.check capture"),
    ("capture FOLDER", "which program? put -- script.py, or -- -m module, after the folder"),
    ("capture FOLDER -- -m", "which program? put -- script.py, or -- -m module, after the folder"),
    ("trace", "usage: python -m flaxasync.check trace"),
    ("gate b p --mesh data", "--mesh needs NAME=SIZE,...: got data"),
    ("gate b p --exposed -1", "the tolerance exposed must be"),
    ("no_file --expect permute_start", "--expect needs NAME=COUNT: got permute_start"),
    (
        "FOLDER --json --fail-on error --expect permute_start=1",
        "--chip is the only option: got --json, --expect, --fail-on",
    ),
])  # fmt: skip
def test_arguments_that_are_refused(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.replace("FOLDER", str(tmp_path)).split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_as_a_module(dump):
    command = [sys.executable, "-m", "flaxasync.check", dump(programs.mesh_matmul().text), "--fail-on", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "synchronous-collective" in done.stdout
