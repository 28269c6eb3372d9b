"""Tests of train/metrics/progress.py: plain lines for a file, a live line for a terminal."""

import sys
import types

import pytest

from train.metrics import progress as progress_module
from train.metrics.progress import LiveProgress, PlainProgress, describe, make_progress

LINE = {"step": 20, "loss": 2.34567, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens_per_second": 81920.4}


def test_a_report_is_one_line(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    progress = PlainProgress(start=10, steps=40)
    now[0] = 60.0
    progress.write([{**LINE, "step": 19}, LINE])
    progress.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "step 20/40  loss 2.3457  grad norm 0.500  81,920 tokens/s  eta 0:02:00"


def test_a_validation_has_its_own_line(capsys):
    values = {"validation_loss": 2.5, "validation_perplexity": 12.1825, "code_loss": None, "code_perplexity": None}
    PlainProgress(start=0, steps=40).write([{**LINE, "step": 10, **values}, LINE])
    assert capsys.readouterr().out.splitlines()[0] == (
        "step 10: validation loss 2.5000 nats per token, perplexity 12.18; "
        "code loss not finite nats per token, perplexity not finite"
    )


def test_a_skipped_update_has_its_own_line(capsys):
    PlainProgress(start=0, steps=40).write([{**LINE, "step": 10, "skipped": 1}, {**LINE, "skipped": 0}])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 10: the update was skipped, loss 2.3457  grad norm 0.500")
    assert second.startswith("step 20/40")


def test_a_number_that_is_not_finite_is_named_so():
    assert describe({**LINE, "loss": None}).startswith("loss not finite  grad norm 0.500")


@pytest.mark.parametrize(("terminal", "expected"), [(True, LiveProgress), (False, PlainProgress)])
def test_a_terminal_gets_the_live_line(terminal, expected, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    progress = make_progress(start=5, steps=40)
    progress.write([{**LINE, "validation_loss": 2.5}])
    progress.close()
    assert isinstance(progress, expected)
