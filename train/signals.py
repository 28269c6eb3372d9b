"""Requests to stop a run: SIGTERM and Ctrl-C, which the loop notices between two steps.

After the first signal the run finishes the current step and saves it. A second Ctrl-C ends the process without saving.
If several processes train together, JAX's runtime receives SIGTERM and informs all of them, so that they stop after
the same step.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from jax.experimental import multihost_utils

EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}


class StopRequest:
    """A context manager that records the first signal instead of letting it end the process.

    Attributes:
      signal: The first signal that arrived, or None.
    """

    def __init__(self, *, shared: bool) -> None:
        """Makes a request that is not watching yet; `shared` says that several processes train together."""
        self.signal: signal.Signals | None = None
        self._shared = shared
        self._watched = () if shared else tuple(EXIT_CODES)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in self._watched}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def should_stop(self, step: int) -> bool:
        """Returns whether to stop after `step`; every process of a run gets the same answer for the same step."""
        if self._shared and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of the process: 0 after SIGTERM, 130 after Ctrl-C."""
        return EXIT_CODES[self.signal] if self.signal else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        self.signal = self.signal or signal.Signals(number)
