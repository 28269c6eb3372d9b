"""When checkpoints are saved, and what happens if one cannot be written.

The write of a checkpoint ends while training continues, and the loop asks after every step whether
it has failed. The state of the present step is then saved instead, and tried again until
`checkpoint.retry_seconds` have passed. If the disk is full, older checkpoints are deleted first;
the newest never is.
"""

import dataclasses
import re
import time
from collections.abc import Callable

import jax

from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import RunIdentity
from train.config import Config
from train.data.batches import TrainingBatches
from train.lifecycle.errors import StorageError
from train.lifecycle.stopping import Watchdog
from train.metrics.lines import Events
from train.metrics.output import warn
from train.metrics.recorder import Recorder
from train.step.trainer import TrainState

# seconds between attempts
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 15.0
_FULL = re.compile("No space left|Disk quota exceeded|File too large", re.IGNORECASE)


@dataclasses.dataclass
class Saver:
    """Saves a run: on time, and in spite of a disk that is full for a while."""

    config: Config
    checkpoints: Checkpoints
    batches: TrainingBatches
    recorder: Recorder  # whose lines must be on disk before a checkpoint is
    events: Events
    identity: RunIdentity
    watchdog: Watchdog
    before_save: Callable[[], None]  # called before every save; it may raise to prevent it
    # the last step that `poll` has saved
    _saved_instead: int = dataclasses.field(default=-1, init=False)

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint of this step is due."""
        config = self.config.checkpoint
        intervals = filter(None, (config.every, config.permanent_every))
        return any(step % interval == 0 for interval in intervals)

    def save(self, step: int, state: TrainState) -> None:
        """Saves a step, but first checks that every loss up to it is finite and writes every line
        up to it to disk.

        Raises a DivergedError if one is not finite. Like `poll` and `finish`, raises a StorageError
        if all attempts to write fail.
        """
        if step == self._saved_instead:
            return
        self.recorder.report(step)
        self.before_save()
        try:
            self._write(step, state)
        except OSError as error:
            self._retry(step, state, error)

    def poll(self, step: int, state: TrainState) -> None:
        """Notices that the last checkpoint is complete, or that it could not be written and this
        one is saved.
        """
        try:
            self._note(self.checkpoints.poll())
        except StorageError as error:
            self.recorder.report(step)
            self._retry(step, state, error)

    def finish(self, step: int, state: TrainState) -> None:
        """Waits until everything is written."""
        try:
            self._note(self.checkpoints.wait())
        except StorageError as error:
            self._retry(step, state, error)

    def _write(self, step: int, state: TrainState) -> None:
        with self.recorder.pace.counted("save"):
            self.recorder.flush()
            self._note(self.checkpoints.wait())
            tokens = self.recorder.pace.tokens(step)
            data = self.batches.get_state()
            self.checkpoints.save(step, state, data=data, tokens=tokens, identity=self.identity)

    def _note(self, step: int | None) -> None:
        if step is not None:
            self.watchdog.progress(f"the checkpoint of step {step}")
            self.events.add("checkpoint", step=step)

    def _retry(self, step: int, state: TrainState, error: OSError) -> None:
        """Tries to save a step until it is complete, or until there is no more time."""
        seconds = self.config.checkpoint.retry_seconds
        until = time.monotonic() + seconds
        pause = FIRST_PAUSE
        self.events.add("storage_error", step=step, cause=str(error))
        # the other processes do not know of it, so they cannot save this step, too
        if jax.process_count() > 1:
            raise StorageError(
                f"{error}; the run ends, and continues from {self._newest()}"
            ) from error
        warn(f"{error}; step {step} is saved instead")
        while True:
            self.before_save()
            if _FULL.search(str(error)) and (deleted := self.checkpoints.free_space()):
                warn(
                    f"deleted the checkpoints of steps {deleted} to make room; {self._newest()} is "
                    "kept"
                )
                self.events.add("deleted", steps=deleted)
            try:
                self._write(step, state)
                self._note(self.checkpoints.wait())
                warn(f"step {step} is saved")
                self._saved_instead = step
                return
            except OSError as again:
                error = again
            if time.monotonic() + pause > until:
                raise StorageError(
                    f"{error}, in attempts over {seconds:g} s, so the run ends; nothing that was "
                    f"complete is lost, and the run continues from {self._newest()} when it is "
                    "started again with a disk that can be written"
                ) from error
            time.sleep(pause)
            self.watchdog.progress("an attempt to save")
            pause = min(2 * pause, LONGEST_PAUSE)

    def _newest(self) -> str:
        steps = self.checkpoints.steps()
        return (
            f"the checkpoint of step {steps[-1]}"
            if steps
            else "its beginning, because there is no checkpoint yet"
        )
