"""When checkpoints are saved, and what happens if one cannot be written.

The write of a checkpoint ends while training continues. The loop asks after every step whether it has ended, so that a
failure is known at once and not when the next checkpoint is due. The state of the present step is then saved instead,
and tried again until `checkpoint.retry_seconds` have passed. If the disk is full, older checkpoints are deleted first;
the newest one never is.
"""

import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from train.checkpoints.manager import Checkpoints, WriteError
from train.checkpoints.record import RunIdentity
from train.config import CheckpointConfig, Config
from train.data.batches import TrainingBatches
from train.lifecycle.errors import StorageError
from train.lifecycle.watchdog import Watchdog
from train.lifecycle.workdir import FULL_DISK
from train.metrics.events import Events
from train.metrics.recorder import Recorder
from train.step.trainer import TrainState

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0  # seconds between attempts


class Saver:
    """Saves a run: on time, and in spite of a disk that is full for a while."""

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        batches: TrainingBatches,
        recorder: Recorder,
        events: Events,
        identity: RunIdentity,
        watchdog: Watchdog,
        *,
        warn: Callable[[str], None],
        before_save: Callable[[], None] = lambda: None,
        after_save: Callable[[], None] = lambda: None,
    ):
        """Makes a saver.

        Args:
          config: The configuration of the run.
          checkpoints: Where checkpoints are saved.
          batches: The training data, whose position is saved.
          recorder: What must be on disk before a checkpoint is.
          events: What gets one event per checkpoint and per failure.
          identity: What checkpoints record of the run.
          watchdog: What must not end the process while it waits for the disk.
          warn: Prints what is wrong.
          before_save: Is called before every save; it may raise to prevent it.
          after_save: Is called when a checkpoint is on disk.
        """
        self._config: CheckpointConfig = config.checkpoint
        self._report_every = config.report.every
        self._checkpoints, self._batches, self._recorder = checkpoints, batches, recorder
        self._events, self._identity, self._watchdog, self._warn = events, identity, watchdog, warn
        self._before_save, self._after_save = before_save, after_save
        self._saved_at = time.monotonic()
        self._saved_instead = -1  # the last step that was saved because an earlier one could not be written

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint of this step is due; every process gets the same answer."""
        config = self._config
        if step % config.every == 0 or (config.permanent_every and step % config.permanent_every == 0):
            return True
        if not config.minutes:
            return False
        is_late = time.monotonic() - self._saved_at >= 60 * config.minutes
        if jax.process_count() == 1:
            return is_late
        # The clock of the first process decides for all. Asking it makes the host wait for the devices, so it is asked
        # only where the host has waited for a report.
        return step % self._report_every == 0 and bool(multihost_utils.broadcast_one_to_all(is_late))

    def save(self, step: int, state: TrainState) -> None:
        """Saves a step, but first checks that every loss up to it is finite and writes every line up to it to disk.

        Raises:
          DivergedError: A loss or a gradient norm up to this step is not finite.
          StorageError: Nothing could be written, in repeated attempts.
        """
        if step == self._saved_instead:  # `poll` has just saved it
            return
        self._recorder.report(step)
        self._before_save()
        try:
            self._write(step, state)
        except (WriteError, OSError) as error:
            self._retry(step, state, error)
        self._saved_at = time.monotonic()

    def poll(self, step: int, state: TrainState) -> None:
        """Notices that the last checkpoint is on disk, or that it could not be written, which saves this step instead.

        Raises:
          StorageError: Nothing could be written, in repeated attempts.
        """
        try:
            self._note(self._checkpoints.poll())
        except WriteError as error:
            self._recorder.report(step)
            self._retry(step, state, error)

    def finish(self, step: int, state: TrainState) -> None:
        """Waits until everything is on disk.

        Raises:
          StorageError: Nothing could be written, in repeated attempts.
        """
        try:
            self._note(self._checkpoints.wait())
        except WriteError as error:
            self._retry(step, state, error)

    def _write(self, step: int, state: TrainState) -> None:
        with self._recorder.pace.saving():
            self._recorder.flush()
            self._note(self._checkpoints.wait())
            self._checkpoints.save(
                step,
                state,
                data=self._batches.get_state(),
                tokens=self._recorder.pace.tokens(step)["tokens"],
                identity=self._identity,
            )

    def _note(self, step: int | None) -> None:
        if step is not None:
            self._watchdog.progress(f"the checkpoint of step {step}")
            self._events.add("checkpoint", step=step)
            self._after_save()

    def _retry(self, step: int, state: TrainState, error: OSError) -> None:
        """Tries to save a step until it is on disk, or until there is no more time."""
        until, pause = time.monotonic() + self._config.retry_seconds, FIRST_PAUSE
        self._events.add("storage_error", step=step, cause=str(error))
        if jax.process_count() > 1:  # the other processes do not know of it, so they cannot save this step, too
            raise StorageError(f"{_cause(error)}; the run ends, and continues from {self._newest()}") from error
        self._warn(f"{_cause(error)}; step {step} is saved instead")
        while True:
            self._before_save()
            if _is_full(error) and (deleted := self._checkpoints.free_space()):
                self._warn(f"deleted the checkpoints of steps {deleted} to make room; {self._newest()} is kept")
                self._events.add("deleted", steps=deleted)
            try:
                self._write(step, state)
                self._note(self._checkpoints.wait())
                self._warn(f"step {step} is saved")
                self._saved_instead = step
                return
            except OSError as again:
                error = again
            if time.monotonic() + pause > until:
                raise StorageError(
                    f"{_cause(error)}, in attempts over {self._config.retry_seconds:g} s, so the run ends; nothing "
                    f"that was complete is lost, and the run continues from {self._newest()} when it is started again "
                    "with a disk that can be written"
                ) from error
            time.sleep(pause)
            self._watchdog.progress("an attempt to save")
            pause = min(2 * pause, LONGEST_PAUSE)

    def _newest(self) -> str:
        steps = self._checkpoints.steps()
        return f"the checkpoint of step {steps[-1]}" if steps else "its beginning, because there is no checkpoint yet"


def _is_full(error: OSError) -> bool:
    """Returns whether the disk has no room, so that deleting older checkpoints helps."""
    return error.is_full if isinstance(error, WriteError) else error.errno in FULL_DISK


def _cause(error: OSError) -> str:
    """Returns one line that says what could not be written."""
    if isinstance(error, StorageError):
        return str(error)
    return f"{error.filename or 'the metrics'} could not be written: {error.strerror}"
