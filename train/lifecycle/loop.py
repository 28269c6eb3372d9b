"""The training loop. The host dispatches steps ahead of the devices and waits for them only to report or to save."""

import dataclasses
from pathlib import Path

import jax

from train.checkpoints.saver import Saver
from train.config import Config, ProfileConfig
from train.data.batches import TrainingBatches
from train.lifecycle.stopping import StopRequest, Watchdog
from train.metrics.lines import Events
from train.metrics.output import say
from train.metrics.recorder import Recorder
from train.step.evaluation import Evaluation
from train.step.trainer import Trainer, TrainState


@dataclasses.dataclass(frozen=True)
class Loop:
    """The parts of a run, each of them opened and checked by the caller."""

    config: Config
    trainer: Trainer
    train_step: jax.stages.Compiled
    eval_step: jax.stages.Compiled | None
    batches: TrainingBatches
    evaluation: Evaluation
    saver: Saver
    recorder: Recorder
    stop: StopRequest
    watchdog: Watchdog
    profiler: "Profiler"

    def run(self, state: TrainState, *, start: int) -> tuple[TrainState, int]:
        """Trains from step `start`, whose state is donated, to the last step or a stop, and saves the final state.

        Reports are one interval late: when the host waits for a report, one more interval of steps has already been
        dispatched, so the devices never run out of work. After a DivergedError nothing was saved from that step on.
        """
        config, step = self.config, start
        self.recorder.pace.start()
        for step in range(start + 1, config.steps + 1):
            with self.recorder.pace.counted("load"):
                batch = next(self.batches)
            self.profiler.before(step, state)
            state, metrics = self.train_step(state, *batch)
            self.recorder.add(step, **metrics)
            last = step == config.steps
            if self.eval_step is not None and (last or step % config.eval.every == 0):
                self.recorder.add(step, **self.evaluation.run(self.eval_step, self.trainer.evaluated(state)))
            if step % config.report.every == 0:
                self.recorder.report(step - config.report.every)
            self.watchdog.progress(f"step {step}")
            self.profiler.after(step, state)
            self.saver.poll(step, state)
            stopping = self.stop.should_stop(step)
            if last or stopping or self.saver.is_due(step):
                self.saver.save(step, state)
            if stopping:
                break
        self.saver.finish(step, state)
        return state, step


class Profiler:
    """A window of steps that JAX's profiler records. The host waits for the devices at both ends of the window."""

    def __init__(self, config: ProfileConfig, folder: Path, events: Events):
        self._first, self._last = config.start, config.start + config.steps - 1
        self._folder, self._events, self._is_on = folder, events, False

    def before(self, step: int, state: TrainState) -> None:
        """Starts the profile if the window begins with this step."""
        if step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._is_on = True

    def after(self, step: int, state: TrainState) -> None:
        """Ends the profile if the window ends with this step, and says where it is."""
        if self._is_on and step >= self._last:
            jax.block_until_ready(state)
            self.close()
            say(f"profile    steps {self._first} to {step}, in {self._folder}")
            self._events.add("profile", step=step)

    def close(self) -> None:
        """Ends the profile of a run that stops within the window."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
