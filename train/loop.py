"""The training loop. The host runs ahead of the devices, and waits for them only where it reports or saves."""

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
    """The parts of a run, opened and checked."""

    config: Config
    trainer: Trainer
    train_step: jax.stages.Compiled
    batches: TrainingBatches
    held_out: ValidationBatches
    checkpoints: Checkpoints
    recorder: Recorder
    stop: StopRequest

    def run(self, state: TrainState, *, start: int) -> tuple[TrainState, int]:
        """Trains from step `start` to the last one, or to the one in hand when a stop is asked for; then it is saved.

        Reports are one interval late: at a report the devices still have an interval of steps to do, so that they
        never wait for the host.

        Returns:
          (the state, its step).

        Raises:
          DivergedError: the loss is not finite; nothing is saved from that step on.
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
            stopping = self.stop.came(step)
            if last or stopping or step % config.checkpoint.every == 0:
                self.save(step, state)
            if stopping:
                break
        self.checkpoints.wait()
        return state, step

    def validate(self, state: TrainState) -> jax.Array:
        """Returns the mean loss over the validation batches, nats per token; does not wait for it."""
        total = jnp.float32(0)
        for tokens, targets in self.held_out:
            total = self.trainer.eval_step(state.params, tokens, targets, total)
        return total / len(self.held_out)

    def save(self, step: int, state: TrainState) -> None:
        """Saves a step, after every line up to it is on disk and every loss up to it is known to be finite."""
        self.recorder.report(step)
        self.recorder.flush()
        with self.recorder.waiting():
            self.checkpoints.save(step, state, data=self.batches.get_state(), architecture=architecture(self.config))
