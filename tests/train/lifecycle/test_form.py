"""Tests of train/lifecycle/form.py: forms are compared once for a run, which then keeps the answer."""

import dataclasses
import json
import math
import types
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flaxasync import check
from flaxasync.check.compile.program import bytes_by_kind
from flaxasync.hardware import CHIPS
from train.dry_run import meshes
from train.dry_run.forms import MOST_COMPILED, Estimate
from train.lifecycle import form as form_module
from train.lifecycle.form import estimate_step

OPEN = "--model.fsdp_overlap", "xla"  # model.remat is open


@pytest.fixture
def compiled(monkeypatch):
    """The values of `model.remat` that were compiled to be compared, of which the last one is the
    fastest. The devices seem to be chips of which times are predicted.
    """
    compiled = []

    def estimate(config, mesh):
        compiled.append(config.model.remat)
        return Estimate(1 / len(compiled), 2**20)

    described = types.SimpleNamespace(
        chip=lambda: CHIPS["v5e"],
        gpu=lambda: None,
        chip_name=lambda: "v5e",
        platform=lambda: "tpu",
    )
    for module in (meshes, form_module):
        monkeypatch.setattr(module, "ambient_mesh", described)
    monkeypatch.setattr(form_module, "estimate_step", estimate)
    return compiled


def state_of(workdir):
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        everything = ocp.args.Composite(state=ocp.args.StandardRestore())
        return manager.restore(4, args=everything).state


@pytest.mark.slow
def test_a_run_that_continues_keeps_its_form_and_every_bit(run, compiled, tmp_path):
    assert run("--steps", 4, "--workdir", tmp_path / "whole", *OPEN)[0] == 0
    compiled.clear()
    stopped = tmp_path / "stopped"
    _, out, _ = run("--steps", 2, "--workdir", stopped, *OPEN)
    assert len(compiled) == MOST_COMPILED
    chosen = f"chosen     --model.remat {compiled[-1]} --model.fsdp_overlap xla"
    assert f"{chosen} (the fastest of 3 compiled: 333 ms in 1 MiB of " in out

    _, out, _ = run("--steps", 4, "--workdir", stopped, *OPEN)
    assert len(compiled) == MOST_COMPILED
    assert f"{chosen} --model.gathered_mib 0 (that of {stopped}" in out
    assert json.loads((stopped / "config.json").read_text())["model"]["remat"] == compiled[-1]
    jax.tree.map(np.testing.assert_array_equal, state_of(stopped), state_of(tmp_path / "whole"))


@pytest.mark.slow
def test_another_question_or_a_damaged_answer_is_compared_again(run, compiled, tmp_path):
    run("--steps", 1, *OPEN)
    kept = tmp_path / "run" / "form.json"
    answer = json.loads(kept.read_text())
    unknown = json.dumps(answer | {"form": ["all", "xla", 0]})
    other = json.dumps(answer | {"question": answer["question"] | {"chip": "v4"}})
    short = json.dumps(answer | {"form": ["none", "xla"]})
    for step, text in enumerate(("{", "[]", unknown, other, short), start=2):
        kept.write_text(text)
        compiled.clear()
        code, out, _ = run("--steps", step, *OPEN)
        assert (code, len(compiled)) == (0, MOST_COMPILED)
        assert ("form       it is chosen again, because " in out) == (text == "{")
        assert json.loads(kept.read_text()) == answer
    compiled.clear()
    run("--steps", step, *OPEN)  # it is complete
    run("--steps", step + 1, "--model.remat", "layer", *OPEN)
    assert not compiled


def test_the_estimate_of_a_run_is_that_of_its_compiled_step(
    config, mesh, trainer_of, monkeypatch, capsys
):
    form = dataclasses.replace(config.model, remat="layer", fsdp_overlap="xla")
    config = dataclasses.replace(config, model=form)
    monkeypatch.setattr(form_module, "Trainer", trainer_of)
    monkeypatch.setattr(check, "timeline", lambda step: types.SimpleNamespace(seconds=0.25))
    memory = trainer_of(config, mesh).compile_train_step().memory_analysis()
    needed = bytes_by_kind(memory)["total"]
    assert estimate_step(config, mesh) == Estimate(0.25, needed)
    assert needed > memory.argument_size_in_bytes

    unreadable = ValueError("not a program of a TPU")
    monkeypatch.setattr(check, "timeline", mock.Mock(side_effect=unreadable))
    assert estimate_step(config, mesh) == Estimate(math.inf, needed)
    assert "estimate   there is none: not a program of a TPU\n" in capsys.readouterr().out


def test_a_step_that_does_not_fit_or_cannot_be_compiled_has_no_estimate(
    config, mesh, monkeypatch, capsys
):
    with monkeypatch.context() as patched:
        patched.setattr(form_module, "host_memory", lambda: 0)
        memory = types.SimpleNamespace(host_temp_size_in_bytes=2**30)
        step = mock.Mock(**{"memory_analysis.return_value": memory})
        patched.setattr(form_module, "Trainer", mock.Mock())
        form_module.Trainer.return_value.compile_train_step.return_value = step
        assert estimate_step(config, mesh) is None
        assert "refused    it needs 8 GiB of a host with" in capsys.readouterr().out
    trainer = mock.Mock()
    monkeypatch.setattr(form_module, "Trainer", trainer)
    compile_step = trainer.return_value.compile_train_step
    compile_step.side_effect = RuntimeError("RESOURCE_EXHAUSTED: no HBM")
    assert estimate_step(config, mesh) is None
    compile_step.side_effect = RuntimeError("a defect")
    assert estimate_step(config, mesh) is None
    assert "refused    a defect\n" in capsys.readouterr().out
