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


def test_a_sound_program_passes(dump, capsys):
    assert main([dump(programs.async_form("value").text)]) == 0
    assert "audit of jit_value (v5e): ok" in capsys.readouterr().out


def test_a_hazard_fails(dump, capsys):
    assert main([dump(programs.async_form("staggered_unroll_1").text)]) == 1
    assert "error: in-flight-copied" in capsys.readouterr().out


def test_fail_on_chooses_the_severity(dump):
    path = dump(programs.mesh_matmul().text)
    assert main([path]) == 0
    assert main([path, "--fail-on", "warning"]) == 1


def test_expectation(dump, capsys):
    assert main([dump(programs.async_form("unthreaded").text), "--expect", "permute_start=1"]) == 1
    assert "deleted" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main([dump("x"), "--expect", "permute_start"])
    assert stopped.value.code == 2
    assert "--expect needs NAME=COUNT: got permute_start" in capsys.readouterr().err


def test_json(dump, capsys):
    main([dump(programs.mesh_matmul().text), "--json", "--chip", "v5e"])
    assert json.loads(capsys.readouterr().out)["module"] == "jit_matmul"


def test_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(programs.mesh_matmul().text))
    assert main(["-"]) == 0
    assert "collective-permute" in capsys.readouterr().out


def test_trace_and_picture(dump, tmp_path, capsys):
    trace, picture = tmp_path / "t.json", tmp_path / "t.png"
    path = dump(programs.mesh_matmul().text)
    assert main([path, "--timeline", "--trace", str(trace), "--picture", str(picture)]) == 0
    assert "timeline of jit_matmul on v5e: 12.3" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: the text is empty"),
        ("nonsense", "line 1, column 1: expected HLO text: got 'nonsense'"),
        ("HloModule m\n\nENTRY e {\n", "line 3, column 1: computation 'e' is not closed: the text is cut short"),
    ],
)
def test_bad_text(dump, capsys, text, message):
    assert main([dump(text)]) == 2
    assert message in capsys.readouterr().err


def test_missing_file(capsys):
    assert main(["no/such/file"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_as_a_module(dump):
    command = [sys.executable, "-m", "flaxasync.check", dump(programs.mesh_matmul().text), "--fail-on", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "synchronous-collective" in done.stdout
