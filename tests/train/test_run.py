"""Tests of train/run.py: whole runs, in this process and in separate processes."""

import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from flaxasync.check.__main__ import main as check_main
from flaxasync.check.hlo.reader import parse
from flaxasync.check.trace.exposed import measure_exposed
from flaxasync.check.trace.profile import read_profile
from tests.train.runs import checkpoints_of, contents, events_of, lines_of

QUIET = ("--eval.every", 0)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def finished(run, kept, tmp_path) -> Path:
    """The workdir of a complete run of 12 steps, with checkpoints of steps 7 and 12."""
    if not kept.exists():
        code, out, err = run("--steps", 12, "--workdir", kept)
        assert (code, err) == (0, "")
        (kept / "printed.txt").write_text(out)
    return shutil.copytree(kept, tmp_path / "run")


def test_a_run_completes_and_continues_with_more_steps(run, finished):
    out = (finished / "printed.txt").read_text()
    (finished / "printed.txt").unlink()
    assert "8 cpu, as data 2 x model 4" in out
    assert re.search(r"size +[\d,]+ parameters", out)
    assert "model      vocab_size=128  layers=2  width=16" in out
    assert "heartbeat_seconds" not in out, "a default was printed"
    assert "step 12/12  loss " in out
    assert "step 12: validation loss " in out
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "events.jsonl",
        "tensorboard",
        "loss.png",
        "checkpoints",
        ".lock",
        "program.txt.gz",
    }
    assert [line["step"] for line in lines_of(finished)] == list(range(1, 13))
    saved = json.loads((finished / "config.json").read_text())
    # chosen
    assert (saved["steps"], saved["model"]["remat"], saved["model"]["fsdp_overlap"]) == (
        12,
        "none",
        "xla",
    )
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["12", "7"]
    assert any(path.stat().st_size for path in (finished / "tensorboard").iterdir())

    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != ".lock"}
    code, out, err = run("--steps", 12)
    assert (code, err) == (0, "")
    assert f"the run is complete: step 12 of 12, in {finished / 'checkpoints' / '12'}" in out
    assert {
        path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != ".lock"
    } == before

    code, out, _ = run("--steps", 14)
    assert code == 0
    assert "changed    steps was 12 and is 14" in out
    assert f"resumed    {finished / 'checkpoints' / '12'}" in out
    assert [line["step"] for line in lines_of(finished)] == list(range(1, 15))


@pytest.mark.slow
def test_checkpoints_are_kept_in_another_folder(run, tmp_path):
    work, elsewhere = tmp_path / "run", tmp_path / "elsewhere" / "checkpoints"
    few = (*QUIET, "--checkpoint.folder", elsewhere)
    third = ("--workdir", tmp_path / "other", "--checkpoint.folder", tmp_path / "third")
    other = ("--steps", 1, *third, "--init_from", work)
    for options, said in (
        (("--steps", 8), ""),
        (("--steps", 9), f"resumed    {elsewhere / '8'}"),
        (("--steps", 9, "--resume", 7), f"moved [8, 9] to {tmp_path / 'elsewhere' / 'set_aside'}"),
        (other, f"parameters from {elsewhere / '9'}"),
    ):
        code, out, err = run("--workdir", work, *few, *options)
        assert (code, err) == (0, "")
        assert said in out
    assert not (work / "checkpoints").exists()


@pytest.fixture
def trained(run, tmp_path):
    """A function that trains 14 steps in this process, unless options say otherwise, and returns
    the workdir.
    """

    def trained(name: str, *options: object) -> Path:
        code, _, err = run("--steps", 14, "--workdir", tmp_path / name, *options)
        assert (code, err) == (0, "")
        return tmp_path / name

    return trained


@pytest.mark.slow
def test_several_sources_and_evaluation_sets_have_losses_of_their_own(trained, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("another language altogether, over and over again\n" * 200)
    sources = ("--data.path", "None", "--data.sources", "code", text, 3.0, "prose", other, 1.0)
    work = trained("mixed", *sources, "--eval.sets", "held_out", other)
    last = lines_of(work)[-1]
    for name in ("code", "prose", "held_out", "validation"):
        assert last[f"{name}_perplexity"] == pytest.approx(np.exp(last[f"{name}_loss"]))
    assert last["validation_loss"] == pytest.approx(
        0.75 * last["code_loss"] + 0.25 * last["prose_loss"], rel=1e-5
    )


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another_one(trained):
    first = trained("first", *QUIET)
    again = trained("again", *QUIET, "--init_from", first, "--steps", 1)
    drawn = lines_of(first)[0]["loss"]
    assert lines_of(again)[0]["loss"] < drawn


@pytest.mark.slow
def test_permanent_checkpoints_stay_beside_the_newest_ones(trained):
    work = trained(
        "permanent",
        *QUIET,
        "--checkpoint.every",
        2,
        "--checkpoint.keep",
        2,
        "--checkpoint.permanent_every",
        5,
    )
    assert checkpoints_of(work) == {"5", "10", "12", "14"}


@pytest.mark.parametrize(("options", "message"), [
    (("--steps", 0), "steps must be at least 1"),
    (
        ("--model.mlp_width", 130),
        "mlp_width must be divisible by the 'model' axis: got .*mlp_width=130 on 4 devices",
    ),
    (("--mesh.model", 3), "must multiply to the number of devices: there are 8"),
    (("--model.vocab_size", 64), "token ids must be below model.vocab_size=64"),
    (("--resume", 5), "the step must be one that is in .*: got 5, there are none"),
    (("--backend", "pallas"), "backend=pallas cannot serve this run: "),
], ids=lambda value: value[0] if isinstance(value, tuple) else "")  # fmt: skip
def test_bad_input_is_one_paragraph_and_exit_code_2(options, message, run, tmp_path):
    code, _, err = run(*options)
    assert code == 2
    assert re.match(f"error: .*{message}", err), err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "a run was started"


def test_a_workdir_with_another_architecture_is_not_changed(run, finished):
    before = contents(finished)
    code, _, err = run("--steps", 15, "--model.layers", 3)
    assert code == 2
    assert (
        "checkpoints/12 holds a run with another architecture: model.layers was 2 and is 3" in err
    )
    assert contents(finished) == before


@pytest.mark.slow
def test_divergence_before_the_first_checkpoint_is_explained(run):
    code, _, err = run("--steps", 60, "--optimizer.learning_rate", 1e30)
    assert code == 3
    assert (
        "there is no good checkpoint, because none was due before that step. Starting again "
        "repeats it" in err
    )


@pytest.mark.slow
def test_the_profile_of_a_run_has_its_window_and_is_read(run, tmp_path, capsys):
    code, _, err = run("--steps", 7, *QUIET, "--profile.start", 5, "--profile.steps", 2)
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
    assert (
        check_main(["trace", str(work / "profile"), "--program", str(program), "--chip", "v5e"])
        == 0
    )
    out = capsys.readouterr().out
    assert "/device:CPU:7" in out
    assert "estimated" in out
