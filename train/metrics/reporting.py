"""Opens everything that the measurements of a run are written to."""

import sys

import jax

from flaxasync.hardware import chip_of_device
from train.config import Config
from train.lifecycle.workdir import Workdir
from train.metrics.events import Events, first_start
from train.metrics.lines import MetricsFile
from train.metrics.model_flops import model_flops_per_token
from train.metrics.pace import Pace
from train.metrics.plot import LossPicture
from train.metrics.progress import make_progress
from train.metrics.recorder import Line, Recorder, Sink
from train.metrics.tensorboard import TensorBoard
from train.step.guard import is_on


def open_recorder(
    config: Config, work: Workdir, mesh: jax.sharding.Mesh, events: Events, *, start: int, tokens_before: int
) -> Recorder:
    """Opens the recorder and its sinks; only the first of several processes has sinks.

    Args:
      config: The configuration of the run.
      work: Its workdir.
      mesh: Its devices.
      events: What gets an event for each skipped update.
      start: The number of steps that are done.
      tokens_before: The number of tokens that they consumed.
    """
    sinks, productive = list[Sink](), 0.0
    if jax.process_index() == 0:
        metrics = MetricsFile(work.metrics, start=start, say=warn)
        productive = metrics.seconds
        sinks = [
            metrics,
            TensorBoard(work.tensorboard, start=start, say=warn),
            LossPicture(work.metrics, work.plot, say=warn),
            make_progress(start=start, steps=config.steps),
        ]
    pace = Pace(
        tokens_per_step=config.data.batch_size * config.data.sequence_length,
        start=start,
        tokens_before=tokens_before,
        flops_per_token=model_flops_per_token(config.model, config.data.sequence_length),
        peak_flops=peak_flops(config, mesh),
        began=first_start(work.events),
        productive_before=productive,
    )

    def note_skip(line: Line) -> None:
        events.add("skipped", step=line["step"], loss=line["loss"], grad_norm=line["grad_norm"])

    return Recorder(sinks, pace, skip_limit=config.skip.limit if is_on(config.skip) else 0, on_skip=note_skip)


def peak_flops(config: Config, mesh: jax.sharding.Mesh) -> float | None:
    """Returns the peak rate of all devices of a mesh in FLOP per second, or None if it is not known."""
    if config.report.peak_tflops is not None:
        return config.report.peak_tflops * 1e12 * mesh.size
    chip = chip_of_device(mesh.devices.flat[0].device_kind)
    return chip.flops * mesh.size if chip else None


def warn(text: str) -> None:
    """Prints a line on standard error, for what is wrong and does not end the run."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
