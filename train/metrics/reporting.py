"""Opens everything that the measurements of a run are written to."""

import jax

from flaxasync.hardware import chip_of_device
from train.config import Config
from train.lifecycle.workdir import Workdir
from train.metrics.events import Events, read_events
from train.metrics.lines import MetricsFile
from train.metrics.model_flops import model_flops_per_token
from train.metrics.output import warn
from train.metrics.pace import Pace
from train.metrics.plot import LossPicture
from train.metrics.progress import Progress
from train.metrics.recorder import Line, Recorder, Sink
from train.metrics.tensorboard import TensorBoard


def open_recorder(
    config: Config, work: Workdir, mesh: jax.sharding.Mesh, events: Events, *, start: int, tokens_before: int
) -> Recorder:
    """Opens the recorder of a run that has done `start` steps, and its sinks, which only the first process has."""
    peak, chip = config.report.peak_tflops, chip_of_device(mesh.devices.flat[0].device_kind)
    pace = Pace(
        tokens_per_step=config.data.batch_size * config.data.sequence_length,
        steps_before=start,
        tokens_before=tokens_before,
        flops_per_token=model_flops_per_token(config.model, config.data.sequence_length),
        peak_flops=peak * 1e12 * mesh.size if peak is not None else chip.flops * mesh.size if chip else None,
    )
    sinks = list[Sink]()
    if jax.process_index() == 0:
        metrics = MetricsFile(work.metrics, start=start, say=warn)
        starts = [event["unix"] for event in read_events(work.events) if event["event"] == "start" and "unix" in event]
        pace.began, pace.productive = (*starts, pace.began)[0], metrics.seconds
        sinks = [
            metrics,
            TensorBoard(work.tensorboard, start=start, say=warn),
            LossPicture(work.metrics, work.plot, say=warn),
            Progress(start=start, steps=config.steps),
        ]

    def note_skip(line: Line) -> None:
        events.add("skipped", step=line["step"], loss=line["loss"], grad_norm=line["grad_norm"])

    return Recorder(sinks, pace, skip_limit=config.skip.limit, on_skip=note_skip)
