"""python -m flaxasync.check gate, and the files that it reads and writes."""

import json

import pytest

from flaxasync.check import read_baseline, summarize, write_baseline
from flaxasync.check.__main__ import main
from tests.check.hlo_texts import AXES, STEP, changed


@pytest.fixture
def files(tmp_path):
    program, baseline = tmp_path / "step.txt", tmp_path / "baselines" / "step.json"
    program.write_text(STEP)
    return program, baseline


def gate(files, *options):
    return main(["gate", str(files[1]), str(files[0]), "--mesh", "data=2,model=4", *options])


def test_update_then_pass_then_fail(files, capsys):
    assert gate(files) == 2
    assert "there is no such baseline: --update makes it" in capsys.readouterr().err
    assert gate(files, "--update") == 0
    assert gate(files) == 0
    assert "jit_step on 8 devices of v5e: as in the baseline" in capsys.readouterr().out
    files[0].write_text(changed(STEP, ("copy(%sum)", "negate(%sum)"), ("constant(4)", "constant(8)")))
    assert gate(files) == 1
    printed = capsys.readouterr()
    assert "1 difference for the worse\n  worse: runs: 1 collective-permute of 2 MiB over model" in printed.out
    assert "  better: removed copy in a loop: 1 fewer copy of 2 MiB in the forward loop" in printed.out
    assert "--update" in printed.err
    assert gate(files, "--json") == 1
    assert [c["worse"] for c in json.loads(capsys.readouterr().out)] == [True, False]
    assert gate(files, "--update") == 0
    assert gate(files) == 0


def test_a_baseline_survives_its_file(files):
    summary = summarize(STEP, axes=AXES)
    write_baseline(summary, files[1])
    read, written = read_baseline(files[1]), files[1].read_text()
    assert read.transfers.keys() == summary.transfers.keys()
    assert read.exposed == pytest.approx(summary.exposed, rel=1e-3)
    write_baseline(read, files[1])
    assert files[1].read_text() == written


@pytest.mark.parametrize(("text", "message"), [
    ("", "is not a baseline of format 1 (JSONDecodeError"),
    ("{}", "is not a baseline of format 1 (KeyError: 'format')"),
    ("[]", "is not a baseline of format 1 (TypeError"),
    ('{"format": 2}', "(ValueError: it is of another format); write it again with --update"),
    ('{"format": 1, "module": "m"}', "(KeyError: 'transfers')"),
    ('{"format": 1, "transfers": [{"what": "m", "times": 1}]}', "unexpected keyword argument 'times'"),
])  # fmt: skip
def test_bad_baselines(files, capsys, text, message):
    files[1].parent.mkdir()
    files[1].write_text(text)
    assert gate(files) == 2
    assert message in capsys.readouterr().err
    assert gate(files, "--update") == 0
    assert gate(files) == 0


def test_a_baseline_that_cannot_be_written(files, capsys, tmp_path):
    for baseline, message in ((tmp_path, ": [Errno 21] Is a directory"), (files[0] / "step.json", ": ")):
        assert gate((files[0], baseline), "--update") == 2
        assert f"{baseline}{message}" in capsys.readouterr().err


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
