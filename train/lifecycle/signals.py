"""Requests to stop a run: signals, which the loop notices between two steps.

After the first signal the run finishes the current step and saves it. A second Ctrl-C ends the process without saving.
If several processes train together, a signal to any of them stops all of them after the same step: JAX's runtime
receives SIGTERM, informs every process, and agrees on the step, so all other signals are turned into SIGTERM there.
"""

import os
import signal
from types import FrameType
from typing import Any, Self

from train.lifecycle.errors import COMPLETE, INTERRUPTED, RESTART

EXIT_CODES = {
    signal.SIGTERM: RESTART,  # a cluster that takes the machine away
    signal.SIGHUP: RESTART,  # a terminal or an ssh connection that ends
    signal.SIGUSR1: RESTART,  # the notice that Slurm can be told to send before the time limit
    signal.SIGINT: INTERRUPTED,
}


class StopRequest:
    """A context manager that records the first signal instead of letting it end the process.

    Attributes:
      signal: The first signal that arrived, or None.
    """

    def __init__(self, *, shared: bool) -> None:
        """Takes whether several processes train together."""
        self.signal: signal.Signals | None = None
        self._shared = shared
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        watched = [number for number in EXIT_CODES if not (self._shared and number == signal.SIGTERM)]
        self._before = {number: signal.signal(number, self._note) for number in watched}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def should_stop(self, step: int) -> bool:
        """Returns whether to stop after `step`; every process of a run gets the same answer for the same step."""
        if not self._shared:
            return self.signal is not None
        from jax.experimental import multihost_utils  # JAX is imported after the command line has been checked

        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.signal = self.signal or signal.SIGTERM
        return True

    @property
    def exit_code(self) -> int:
        """The exit code of the process: that of the first signal, or 0 if there was none."""
        return EXIT_CODES[self.signal] if self.signal else COMPLETE

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if self.signal is None and self._shared:
            os.kill(os.getpid(), signal.SIGTERM)
        self.signal = self.signal or signal.Signals(number)
