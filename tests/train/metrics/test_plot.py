"""Tests of train/metrics/plot.py: the plot of the losses."""

import json
import types

import numpy as np
import pytest

from train.metrics import plot
from train.metrics.plot import LossPicture, draw_losses, loss_figure

PNG = b"\x89PNG\r\n"


def write(path, count, validate=()):
    lines = [{"step": step, "loss": 5 / step} for step in range(1, count + 1)]
    for line in lines:
        if line["step"] in validate:
            line["validation_loss"] = 6 / line["step"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


@pytest.mark.parametrize(("count", "validate"), [(0, ()), (1, ()), (1, (1,)), (300, (100, 200, 300))])
def test_any_run_can_be_drawn(count, validate, tmp_path):
    write(tmp_path / "metrics.jsonl", count, validate)
    draw_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "loss.png"}


def curves(lines):
    """Returns the (x, y) data of the training loss, of its average, and of the validation loss if there is one."""
    return [line.get_xydata() for line in loss_figure(lines).axes[0].lines]


def test_the_curves_are_the_losses(tmp_path):
    lines = write(tmp_path / "metrics.jsonl", 300, (100, 200))
    training, _, validation = curves(lines)
    np.testing.assert_allclose(training, [(line["step"], line["loss"]) for line in lines])
    np.testing.assert_allclose(validation, [(100, 6 / 100), (200, 6 / 200)])


def test_the_bold_curve_averages_over_a_fiftieth_of_the_run_on_either_side():
    losses = np.ones(300)
    losses[100] = 14.0
    _, averaged = curves([{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)])
    np.testing.assert_allclose(averaged[94:107, 1], 2.0)
    np.testing.assert_allclose(np.delete(averaged[:, 1], range(94, 107)), 1.0)
    straight = np.arange(300.0)
    _, averaged = curves([{"step": step, "loss": loss} for step, loss in enumerate(straight, start=1)])
    np.testing.assert_allclose(averaged[:-6, 1], straight[:-6], err_msg="the average must not lag behind the losses")


def test_a_loss_that_is_not_finite_is_left_out():
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0}]
    np.testing.assert_array_equal(curves(lines)[0], [(1, 2), (3, 1)])


def test_the_plot_is_drawn_at_the_end_and_after_validations_at_most_once_per_minute(tmp_path, monkeypatch):
    drawn, now = [], [0.0]
    monkeypatch.setattr(plot, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(plot, "draw_losses", lambda *paths: drawn.append(paths))
    picture = LossPicture(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    now[0] = 59.0
    picture.write([{"step": 1, "validation_loss": 1.0}])
    assert not drawn, "less than a minute has passed"
    now[0] = 61.0
    picture.write([{"step": 2}])
    assert not drawn, "there was no validation"
    picture.write([{"step": 3, "validation_loss": 1.0}])
    assert len(drawn) == 1
    picture.write([{"step": 4, "validation_loss": 1.0}])
    assert len(drawn) == 1, "less than a minute has passed since the last plot"
    picture.close()
    assert len(drawn) == 2
