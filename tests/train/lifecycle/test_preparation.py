"""Tests of train/lifecycle/preparation.py: what in a training step holds the host is reported
before the first one.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import pytest

from models.transformer import Losses, Transformer
from train.lifecycle.preparation import describe_dispatch
from train.run import main
from train.step.trainer import Trainer


@pytest.fixture
def print_in_the_loss(monkeypatch):
    """Replaces the loss by a small one that prints; returns "file:line" of the print."""

    def printing_losses(self, tokens, targets, *, routed):
        value = jnp.mean(self.embed(tokens) ** 2)
        jax.debug.print("loss {}", value)
        return Losses(value)

    monkeypatch.setattr(Transformer, "losses", printing_losses)
    lines, first = inspect.getsourcelines(printing_losses)
    return (
        f"{__file__}:{first + next(n for n, line in enumerate(lines) if 'jax.debug.print' in line)}"
    )


@pytest.mark.slow
def test_a_run_reports_the_line_of_a_print_in_the_model(preset, capsys, print_in_the_loss):
    code = main([str(preset("auto")), "--steps", "1", "--eval.every", "0"])
    assert code == 0
    (line,) = re.findall("^dispatch.*", capsys.readouterr().out, re.MULTILINE)
    assert f"jax.debug.print at {print_in_the_loss} calls Python on the host" in line


@pytest.mark.parametrize("printing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_on_one_device_a_print_makes_every_step_wait(config, printing, request):
    if printing:
        location = request.getfixturevalue("print_in_the_loss")
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        lines = describe_dispatch(Trainer(config, mesh).compile_train_step())
    if not printing:
        assert lines == []
        return
    finding, remedy = lines
    assert finding.startswith(
        f"the host waits in every training step: jax.debug.print at {location} calls Python"
    )
    assert remedy.startswith("do: take it out of the function")


def test_a_platform_without_program_text_is_reported_as_unknown(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: None)
    finding, remedy = describe_dispatch(jax.jit(lambda x: x + 1).lower(1.0).compile())
    assert finding.startswith(
        "it cannot be told whether the host waits in every training step: this platform gives no"
    )
    assert "measure_dispatch" in remedy
