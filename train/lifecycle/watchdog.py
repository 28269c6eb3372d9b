"""Ends a process that makes no progress, because a supervisor cannot tell a hang from a slow step.

A collective whose partner is gone can wait forever, and so does a read from a file system that has stopped answering.
"""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from train.lifecycle.errors import RESTART

TICK_SECONDS = 1.0


class Watchdog:
    """A context manager whose thread ends the process if `progress` is not called for some time.

    The time is counted in ticks of the thread and not read from a clock, so that a process which was stopped with
    SIGSTOP, or a machine that slept, does not count as hanging.
    """

    def __init__(self, seconds: float, stacks: Path, *, end: Callable[[int], object] = os._exit):
        """Takes the longest time without progress, 0 for ever, and the file that gets the stack of every thread."""
        self._seconds, self._stacks, self._end = seconds, stacks, end
        self._idle, self._last = 0.0, "the start"
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()

    def progress(self, last: str) -> None:
        """Tells that something was finished, which `last` names for the message."""
        self._idle, self._last = 0.0, last

    def _watch(self) -> None:
        tick = min(TICK_SECONDS, self._seconds / 4)
        while self._idle <= self._seconds:
            if self._stopped.wait(tick):
                return
            self._idle += tick
        with contextlib.suppress(OSError), open(self._stacks, "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        print(
            f"error: the run made no progress for {self._seconds:.0f} s after {self._last}, so the process ends; the "
            f"stack of every thread is in {self._stacks}, unless it cannot be written. Starting again continues from "
            "the newest checkpoint; report.hang_seconds sets the time.",
            file=sys.stderr,
            flush=True,
        )
        self._end(RESTART)
