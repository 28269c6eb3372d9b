"""python -m flaxasync.check, also with `gate`: output, exit status, the files of baselines, and bad
input.
"""

import io
import json
import subprocess
import sys

import pytest

from flaxasync.check import read_baseline, summarize, write_baseline
from flaxasync.check.__main__ import main
from tests.check import programs
from tests.check.hlo_texts import AXES, STEP, changed


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
    """tests/check/hlo/test_reader.py has a message for each kind of file."""
    assert main([dump("nonsense")]) == 2
    assert "line 1, column 1: expected HLO text: got 'nonsense'" in capsys.readouterr().err
    assert main(["no/such/file"]) == 2
    assert capsys.readouterr().err == "[Errno 2] No such file or directory: 'no/such/file'\n"


@pytest.mark.parametrize(("arguments", "message"), [
    ("gate", "usage: python -m flaxasync.check gate"),
    ("trace", "usage: python -m flaxasync.check trace"),
    ("gate b p --mesh data", "argument --mesh: needs NAME=SIZE,...: got data"),
    ("no_file --expect permute_start", "--expect needs NAME=COUNT: got permute_start"),
    (
        "FOLDER --json --expect permute_start=1",
        "--chip and --fail-on are the only options: got --json, --expect",
    ),
])  # fmt: skip
def test_arguments_that_are_refused(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.replace("FOLDER", str(tmp_path)).split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_as_a_module(dump):
    command = [
        sys.executable,
        "-m",
        "flaxasync.check",
        dump(programs.mesh_matmul().text),
        "--fail-on",
        "warning",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "synchronous-collective" in done.stdout


@pytest.fixture
def files(tmp_path):
    program, baseline = tmp_path / "step.txt", tmp_path / "baselines" / "step.json"
    program.write_text(STEP)
    return program, baseline


def gate(files, *options):
    return main(["gate", str(files[1]), str(files[0]), "--mesh", "data=2,model=4", *options])


def test_the_gate_updates_then_passes_then_fails(files, capsys):
    assert gate(files) == 2
    assert "step.json': --update makes it" in capsys.readouterr().err
    assert gate(files, "--update") == 0
    assert gate(files) == 0
    assert (
        "jit_step on 8 devices of v5e: 0 differences, nothing is worse" in capsys.readouterr().out
    )
    files[0].write_text(
        changed(STEP, ("copy(%sum)", "negate(%sum)"), ("constant(4)", "constant(8)"))
    )
    assert gate(files) == 1
    printed = capsys.readouterr()
    assert (
        "2 differences, 1 for the worse\n  worse: more transfers: collective-permute over model"
        in printed.out
    )
    assert "  better: fewer loop-copies: a loop copies a buffer that it carries" in printed.out
    assert "--update" in printed.err
    assert gate(files, "--update") == 0
    assert gate(files) == 0


def test_a_baseline_survives_its_file(files):
    summary = summarize(STEP, axes=AXES)
    write_baseline(summary, files[1])
    read, written = read_baseline(files[1]), files[1].read_text()
    assert read.rows.keys() == summary.rows.keys()
    assert read == summary
    write_baseline(read, files[1])
    assert files[1].read_text() == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "(JSONDecodeError"),
        ("{}", "(KeyError: 'format')"),
        ("[]", "(TypeError"),
        ('{"format": 1}', "(ValueError: it is of another format); write it again with --update"),
        ('{"format": 3, "module": "m"}', "(KeyError: 'rows')"),
        (
            '{"format": 3, "rows": {"all-gather": {"amount": 1, "times": 1}}}',
            "unexpected keyword argument 'times'",
        ),
    ],
)
def test_bad_baselines(files, capsys, text, message):
    files[1].parent.mkdir()
    files[1].write_text(text)
    assert gate(files) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"{files[1]}: it is not a baseline of format 3 (")
    assert message in printed
    assert printed.count(str(files[1])) == 1
    assert gate(files, "--update") == 0
    assert gate(files) == 0


def test_a_baseline_that_cannot_be_written(files, capsys, tmp_path):
    for baseline, message in (
        (tmp_path, f"[Errno 21] Is a directory: '{tmp_path}'"),
        (files[0] / "step.json", f"[Errno 17] File exists: '{files[0]}'"),
    ):
        assert gate((files[0], baseline), "--update") == 2
        assert capsys.readouterr().err == f"{message}\n"


def test_a_byte_order_mark(files):
    """Some editors put one before the text."""
    gate(files, "--update")
    for file in files:
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert gate(files) == 0


def test_other_programs_are_refused(files, capsys):
    gate(files, "--update")
    files[0].write_text(STEP.replace("jit_step", "jit_eval"))
    assert gate(files) == 2
    assert "its module is jit_step, and that of this program is jit_eval" in capsys.readouterr().err
    files[0].write_text("nonsense")
    assert gate(files, "--update") == 2
    assert "step.txt: line 1, column 1: expected HLO text" in capsys.readouterr().err
