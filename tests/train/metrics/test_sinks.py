"""Tests of train/metrics/sinks.py: what a terminal, TensorBoard and the picture of the losses show
of a run.
"""

import json
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from train.metrics.sinks import LossPicture, Progress, TensorBoard, average, describe

LINE = {
    "step": 20,
    "loss": 2.34567,
    "grad_norm": 0.5,
    "tokens_per_second": 81920.4,
    "step_seconds": 6.0,
}


def shown(lines, capsys):
    progress = Progress(steps=40)
    progress.write(lines)
    progress.close()
    return capsys.readouterr().out.splitlines()


def test_a_report_validations_and_skipped_updates_have_lines_of_their_own(capsys):
    (line,) = shown([{**LINE, "step": 19}, LINE], capsys)
    assert line == "step 20/40  loss 2.3457  grad norm 0.500  81,920 tokens/s  eta 0:02:00"
    assert describe({**LINE, "loss": None}).startswith("loss not finite  grad norm 0.500")
    values = {
        "validation_loss": 2.5,
        "validation_perplexity": 12.1825,
        "code_loss": None,
        "code_perplexity": None,
    }
    first, second, _ = shown(
        [{**LINE, "step": 9, "skipped": 1}, {**LINE, "step": 10, "skipped": 0, **values}], capsys
    )
    assert first.startswith("step 9: the update was skipped, loss 2.3457  grad norm 0.500")
    assert second == (
        "step 10: validation loss 2.5000 nats per token, perplexity 12.18; code loss not finite "
        "nats per token, perplexity not finite"
    )


def events_in(folder):
    """Reads all events of a folder. A record is its length, a checksum of that, the event, and a
    checksum of that.
    """
    for path in sorted(folder.iterdir()):
        records = path.read_bytes()
        while records:
            (length,) = struct.unpack("<Q", records[:8])
            yield Event.FromString(records[12 : 12 + length])
            records = records[12 + length + 4 :]


def test_event_files_have_the_metrics_and_discard_later_steps_of_an_earlier_process(tmp_path):
    board = TensorBoard(tmp_path / "board", start=4)
    board.write([{"step": 5, "loss": 1.5, "grad_norm": None}, {"step": 6, "loss": 1.25}])
    board.close()
    events = list(events_in(tmp_path / "board"))
    # TensorBoard drops what other files of the folder have from the step of this event on.
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == [5]
    written = [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]
    assert written == [(5, "loss", 1.5), (6, "loss", 1.25)]


@pytest.mark.parametrize(
    ("count", "validate"), [(0, ()), (1, ()), (1, (1,)), (300, (100, 200, 300))]
)
def test_any_run_can_be_drawn(count, validate, tmp_path):
    lines = [
        {"step": step, "loss": 5 / step if step != 2 else None} for step in range(1, count + 1)
    ]
    for step in validate:
        lines[step - 1]["validation_loss"] = 6 / step
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    LossPicture(tmp_path / "metrics.jsonl", tmp_path / "loss.png").close()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "loss.png"}


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    LossPicture(tmp_path / "metrics.jsonl", tmp_path / "none" / "loss.png").close()
    assert (
        f"{tmp_path}/none/loss.png cannot be written: No such file or directory"
        in capsys.readouterr().err
    )


def test_the_bold_curve_averages_over_a_fiftieth_of_the_run_on_either_side():
    points = np.stack([np.arange(1.0, 301), np.ones(300)], axis=1)
    points[100, 1] = 14.0
    averaged = average(points)
    np.testing.assert_allclose(
        averaged[:, 0], np.arange(7.0, 295), err_msg="the average must not lag behind"
    )
    np.testing.assert_allclose(averaged[:, 1], np.where(abs(averaged[:, 0] - 101) < 6.5, 2.0, 1.0))
