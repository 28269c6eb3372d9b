"""train/plot.py: the picture of the losses."""

import json

import pytest

from train import plot
from train.plot import LossPicture, draw_losses

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


def test_a_loss_that_is_not_finite_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n')
    draw_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_it_is_drawn_at_the_end_and_after_validations_at_most_once_a_minute(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "draw_losses", lambda *paths: drawn.append(paths))
    picture = LossPicture(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    picture.write([{"step": 1, "validation_loss": 1.0}])
    assert not drawn, "less than a minute has gone by"
    monkeypatch.setattr(plot, "_REST_SECONDS", 0.0)
    picture.write([{"step": 2}])
    assert not drawn
    picture.write([{"step": 3, "validation_loss": 1.0}])
    assert len(drawn) == 1
    picture.write([{"step": 4}])
    picture.close()
    assert len(drawn) == 2
