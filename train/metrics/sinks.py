"""Where the measurements of a run go beside metrics.jsonl: a terminal, TensorBoard, and a picture
of the losses.
"""

import datetime
import struct
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

from flaxasync.hardware import chip_of_device
from train.config import Config
from train.lifecycle.workdir import Workdir
from train.metrics.lines import (
    AppendedFile,
    Events,
    Line,
    MetricsFile,
    Sink,
    read_events,
    read_metrics,
)
from train.metrics.output import print_line, warn
from train.metrics.recorder import Pace, Recorder
from train.step.products import model_flops_per_token

_SMOOTH_OVER = 50  # the bold curve of the losses averages over a fiftieth of the run on either side


def open_recorder(
    config: Config,
    work: Workdir,
    mesh: jax.sharding.Mesh,
    events: Events,
    *,
    start: int,
    tokens_before: int,
) -> Recorder:
    """Opens the recorder of a run that has done `start` steps, and its sinks, which only the first
    process has.
    """
    chip = chip_of_device(mesh.devices.flat[0].device_kind)
    peak = None
    if chip is not None:
        peak = chip.flops * mesh.size
    pace = Pace(
        tokens_per_step=config.data.batch_size * config.data.sequence_length,
        steps_before=start,
        tokens_before=tokens_before,
        flops_per_token=model_flops_per_token(config.model, config.data.sequence_length),
        peak_flops=peak,
    )
    sinks = list[Sink]()
    if jax.process_index() == 0:
        metrics = MetricsFile(work.metrics, start=start)
        starts = [
            event["unix"]
            for event in read_events(work.events)
            if event["event"] == "start" and "unix" in event
        ]
        pace.began, pace.productive = (*starts, pace.began)[0], metrics.seconds
        views = [TensorBoard(work.tensorboard, start=start), LossPicture(work.metrics, work.plot)]
        sinks = [metrics, *views, Progress(steps=config.steps)]
    return Recorder(sinks, pace, events, skip_limit=config.skip.limit)


class Progress(Sink):
    """Prints a line for each report, each validation and each skipped update."""

    def __init__(self, *, steps: int):
        self._steps = steps

    def write(self, lines: Iterable[Line]) -> None:
        for line in lines:
            if line.get("skipped"):
                print_line(f"step {line['step']}: the update was skipped, {describe(line)}")
            if "validation_loss" in line:
                print_line(describe_validation(line))
        # of the newest line
        step = line["step"]
        seconds = (line.get("step_seconds") or 0) * (self._steps - step)
        left = datetime.timedelta(seconds=round(seconds))
        print_line(f"step {step}/{self._steps}  {describe(line)}  eta {left}")


def describe(line: Line) -> str:
    """Formats a line as "loss 2.3101  grad norm 0.512  81,920 tokens/s"."""
    loss = _number(line.get("loss"), ".4f")
    norm = _number(line.get("grad_norm"), ".3f")
    return (
        f"loss {loss}  grad norm {norm}  {_number(line.get('tokens_per_second'), ',.0f')} tokens/s"
    )


def describe_validation(line: Line) -> str:
    """Formats a line as "step 200: validation loss 2.3456 nats per token, perplexity 10.44", one
    part for each set.
    """
    parts = []
    for name in (key.removesuffix("_loss") for key in line if key.endswith("_loss")):
        perplexity = _number(line.get(f"{name}_perplexity"), ".4g")
        parts.append(
            f"{name} loss {_number(line[f'{name}_loss'], '.4f')} nats per token, perplexity "
            f"{perplexity}"
        )
    return f"step {line['step']}: {'; '.join(parts)}"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


class TensorBoard(Sink):
    """Writes an event file that makes TensorBoard discard what earlier files have from the step
    after `start` on.

    The writers of tensorboardX do not survive a full disk: one of them ends with a traceback, the
    other one waits.
    """

    def __init__(self, folder: Path, *, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads them in this order
        name = f"events.out.tfevents.{time.time():.0f}.{time.monotonic_ns()}"
        self._file = AppendedFile(folder / name)
        self._add(file_version="brain.Event:2")
        self._add(
            step=start + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        )

    def write(self, lines: Iterable[Line]) -> None:
        for line in lines:
            values = {
                name: value for name, value in line.items() if name != "step" and value is not None
            }
            parts = [
                summary_pb2.Summary.Value(tag=name, simple_value=value)
                for name, value in values.items()
            ]
            self._add(step=line["step"], summary=summary_pb2.Summary(value=parts))

    def close(self) -> None:
        self._file.close()

    def _add(self, **fields: object) -> None:
        """Writes an event: its length, a checksum of that, the event, and a checksum of it."""
        event = event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("Q", len(event))
        checksums = [struct.pack("I", masked_crc32c(part)) for part in (length, event)]
        self._file.append(length + checksums[0] + event + checksums[1])


class LossPicture(Sink):
    """Draws loss.png when the run stops or ends. It reads metrics.jsonl, so it comes after the sink
    of that file.
    """

    def __init__(self, metrics: Path, picture: Path):
        self._metrics = metrics
        self._picture = picture

    def close(self) -> None:
        temporary = self._picture.with_name(f".{self._picture.name}.tmp")
        try:
            self._draw(temporary)
            temporary.replace(self._picture)
        except OSError as error:  # the picture can be drawn later
            warn(f"{self._picture} cannot be written: {error.strerror}")

    def _draw(self, file: Path) -> None:
        """Draws the training loss, faint as measured and bold as averaged, and the validation loss
        over the steps.
        """
        from matplotlib.figure import Figure  # imported late, because that takes long

        lines = read_metrics(self._metrics)
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step (optimizer updates)", ylabel="loss (nats per token)")
        axes.grid(color="#d9d9d9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for metric, name, colour, style in (
            ("loss", "training", "#2a6f97", {"alpha": 0.3, "linewidth": 0.8}),
            (
                "validation_loss",
                "validation",
                "#d1495b",
                {"linewidth": 1.8, "marker": "o", "markersize": 4},
            ),
        ):
            points = np.array(
                [(line["step"], line[metric]) for line in lines if line.get(metric) is not None],
                float,
            )
            if not len(points):
                continue
            axes.plot(
                *points.T, color=colour, label=f"{name}, {points[-1, 1]:.3f} at the end", **style
            )
            if metric == "loss":
                axes.plot(*average(points).T, color=colour, linewidth=1.8)
            axes.legend(frameon=False)
        figure.savefig(file, dpi=150, format="png")


def average(points: np.ndarray) -> np.ndarray:
    """Returns a centred moving average of points [count, 2], without the ends where the window is
    not full.
    """
    width = 2 * (len(points) // _SMOOTH_OVER) + 1
    window = np.full(width, 1 / width)
    return np.stack([np.convolve(column, window, "valid") for column in points.T], axis=1)
