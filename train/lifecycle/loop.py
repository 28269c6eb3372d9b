"""The training loop. The host dispatches steps ahead of the devices and waits for them only to report or to save."""

import contextlib
import dataclasses
import threading
import time

import jax

from train import BEGAN
from train.checkpoints.saver import Saver
from train.config import Config
from train.data.batches import TrainingBatches
from train.lifecycle.signals import StopRequest
from train.lifecycle.watchdog import Watchdog
from train.metrics.events import Events
from train.metrics.profiler import Profiler
from train.metrics.recorder import Recorder
from train.metrics.show import say
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
    profiler: Profiler
    events: Events

    def run(self, state: TrainState, *, start: int) -> tuple[TrainState, int]:
        """Trains from step `start`, whose state is donated, to the last step or a stop, and saves the final state.

        Reports are one interval late: when the host waits for a report, one more interval of steps has already been
        dispatched, so the devices never run out of work.

        Returns:
          The state and its step.

        Raises:
          DivergedError: The loss or the gradient norm is not finite; nothing is saved from that step on.
          StorageError: A checkpoint could not be written.
        """
        config, step = self.config, start
        self.recorder.pace.start()
        for step in range(start + 1, config.steps + 1):
            with self.recorder.pace.loading():
                batch = next(self.batches)
            self.profiler.before(step, state)
            state, metrics = self.train_step(state, *batch)
            self.recorder.add(step, **metrics)
            if step == start + 1:
                _show_first_step(metrics)
            last = step == config.steps
            if self.eval_step is not None and (last or step % config.eval.every == 0):
                self.recorder.add(step, **self.evaluation.run(self.eval_step, self.trainer.evaluated(state)))
            if step % config.report.every == 0:
                self.recorder.report(step - config.report.every)
            self.watchdog.progress(f"step {step}")
            if profile := self.profiler.after(step, state):
                say(profile)
                self.events.add("profile", step=step)
            self.saver.poll(step, state)
            stopping = self.stop.should_stop(step)
            if last or stopping or self.saver.is_due(step):
                self.saver.save(step, state)
            if stopping:
                break
        self.saver.finish(step, state)
        return state, step


def _show_first_step(metrics: dict[str, jax.Array]) -> None:
    """Prints when the first step was done; the loop does not wait for it."""

    def wait_and_say() -> None:
        with contextlib.suppress(Exception):  # the loop reports the failure of a step
            jax.block_until_ready(metrics)
            say(f"started    the first step was done {time.monotonic() - BEGAN:.1f} s after the start of the process")

    threading.Thread(target=wait_and_say, name="first step", daemon=True).start()
