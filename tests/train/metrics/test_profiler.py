"""The profile of a run: it has the steps of its window, and `python -m flaxasync.check trace` reads it."""

import gzip

import pytest

from flaxasync.check.__main__ import main
from flaxasync.check.hlo.reader import parse
from flaxasync.check.trace.exposed import measure_exposed
from flaxasync.check.trace.profile import read_profile
from tests.train.launcher import events_of


def test_the_profile_of_a_run_has_its_window_and_is_read(run, tmp_path, capsys):
    options = ("--steps", 7, "--eval.every", 0, "--eval.sample_tokens", 0, "--profile.start", 5, "--profile.steps", 2)
    code, _, err = run(*options)
    assert (code, err) == (0, "")
    work, program = tmp_path / "run", tmp_path / "program.txt"
    assert [event["step"] for event in events_of(work) if event["event"] == "profile"] == [6]
    program.write_bytes(gzip.decompress((work / "program.txt.gz").read_bytes()))
    times = measure_exposed(read_profile(work / "profile"), module=parse(program.read_text()))
    assert len(times) == 8
    for device in times:
        assert "train_step" in device.program
        assert device.runs == 2
        assert 0 < device.exposed <= device.communication <= device.seconds
        assert device.exposed == pytest.approx(sum(op.seconds for op in device.ops), rel=1e-3)
        assert {layer.name for layer in device.layers} - {""}
    assert main(["trace", str(work / "profile"), "--program", str(program), "--chip", "v5e"]) == 0
    out = capsys.readouterr().out
    assert "/device:CPU:7" in out
    assert "estimated" in out
