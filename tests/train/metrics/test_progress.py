"""Tests of train/metrics/progress.py: plain lines for a file, a live line for a terminal."""

import sys

import pytest

from train.metrics.sinks import Progress, describe

LINE = {"step": 20, "loss": 2.34567, "grad_norm": 0.5, "tokens_per_second": 81920.4, "step_seconds": 6.0}


def shown(lines, capsys):
    progress = Progress(start=10, steps=40)
    progress.write(lines)
    progress.close()
    return capsys.readouterr().out.splitlines()


def test_a_report_is_one_line(capsys):
    (line,) = shown([{**LINE, "step": 19}, LINE], capsys)
    assert line == "step 20/40  loss 2.3457  grad norm 0.500  81,920 tokens/s  eta 0:02:00"
    assert describe({**LINE, "loss": None}).startswith("loss not finite  grad norm 0.500")


def test_validations_and_skipped_updates_have_lines_of_their_own(capsys):
    values = {"validation_loss": 2.5, "validation_perplexity": 12.1825, "code_loss": None, "code_perplexity": None}
    first, second, _ = shown([{**LINE, "step": 9, "skipped": 1}, {**LINE, "step": 10, "skipped": 0, **values}], capsys)
    assert first.startswith("step 9: the update was skipped, loss 2.3457  grad norm 0.500")
    assert second == (
        "step 10: validation loss 2.5000 nats per token, perplexity 12.18; "
        "code loss not finite nats per token, perplexity not finite"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_the_live_line(terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    text = "\n".join(shown([{**LINE, "validation_loss": 2.5}], capsys))
    assert "step 20: validation loss 2.5000" in text
    assert ("\x1b[" in text) == terminal, "only a terminal is drawn on"
