"""The training loop. The host dispatches steps ahead of the devices and waits for them only to report or to save."""

import dataclasses

import jax
import jax.numpy as jnp

from train.checkpoint import Checkpoints
from train.config import Config
from train.data import TrainingBatches, ValidationBatches
from train.metrics import Recorder
from train.signals import StopRequest
from train.step import Trainer, TrainState
from train.workdir import architecture


@dataclasses.dataclass(frozen=True)
class Loop:
    """The parts of a run, each of them opened and checked by the caller."""

    config: Config
    trainer: Trainer
    train_step: jax.stages.Compiled
    batches: TrainingBatches
    validation_batches: ValidationBatches
    checkpoints: Checkpoints
    recorder: Recorder
    stop: StopRequest

    def run(self, state: TrainState, *, start: int) -> tuple[TrainState, int]:
        """Trains from step `start` to the last step, or until a stop is requested, and saves the final state.

        Reports are one interval late: when the host waits for a report, one more interval of steps has already been
        dispatched, so the devices never run out of work.

        Args:
          state: The train state of step `start`; its buffers are donated to the first step.
          start: The number of steps that are done.

        Returns:
          The state and its step.

        Raises:
          DivergedError: The loss or the gradient norm is not finite; nothing is saved from that step on.
        """
        config, step = self.config, start
        self.recorder.start_clock()
        for step in range(start + 1, config.steps + 1):
            tokens, targets = next(self.batches)
            state, metrics = self.train_step(state, tokens, targets)
            self.recorder.add(step, **metrics)
            last = step == config.steps
            if config.eval.every and (last or step % config.eval.every == 0):
                self.recorder.add(step, validation_loss=self.validate(state))
            if step % config.report.every == 0:
                self.recorder.report(step - config.report.every)
            stopping = self.stop.should_stop(step)
            if last or stopping or step % config.checkpoint.every == 0:
                self.save(step, state)
            if stopping:
                break
        self.checkpoints.wait()
        return state, step

    def validate(self, state: TrainState) -> jax.Array:
        """Computes the mean loss over the validation batches, in nats per token, without waiting for the devices."""
        total = jnp.float32(0)
        for tokens, targets in self.validation_batches:
            total = self.trainer.eval_step(state.params, tokens, targets, total)
        return total / len(self.validation_batches)

    def save(self, step: int, state: TrainState) -> None:
        """Saves a step, but first checks that every loss up to it is finite and writes every line up to it to disk."""
        self.recorder.report(step)
        self.recorder.flush()
        with self.recorder.waiting():
            self.checkpoints.save(step, state, data=self.batches.get_state(), architecture=architecture(self.config))
