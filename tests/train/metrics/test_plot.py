"""Tests of train/metrics/plot.py: the plot of the losses."""

import json

import numpy as np
import pytest

from train.metrics.sinks import LossPicture, average


@pytest.mark.parametrize(("count", "validate"), [(0, ()), (1, ()), (1, (1,)), (300, (100, 200, 300))])
def test_any_run_can_be_drawn(count, validate, tmp_path):
    lines = [{"step": step, "loss": 5 / step if step != 2 else None} for step in range(1, count + 1)]
    for line in lines:
        if line["step"] in validate:
            line["validation_loss"] = 6 / line["step"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    LossPicture(tmp_path / "metrics.jsonl", tmp_path / "loss.png").close()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "loss.png"}


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path):
    said = []
    LossPicture(tmp_path / "metrics.jsonl", tmp_path / "none" / "loss.png", say=said.append).close()
    assert said == [f"{tmp_path}/none/loss.png cannot be written: No such file or directory"]


def test_the_bold_curve_averages_over_a_fiftieth_of_the_run_on_either_side():
    points = np.stack([np.arange(1.0, 301), np.ones(300)], axis=1)
    points[100, 1] = 14.0
    averaged = average(points)
    np.testing.assert_allclose(averaged[:, 0], np.arange(7.0, 295), err_msg="the average must not lag behind")
    np.testing.assert_allclose(averaged[:, 1], np.where(abs(averaged[:, 0] - 101) < 6.5, 2.0, 1.0))
