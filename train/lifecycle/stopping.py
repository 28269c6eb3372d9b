"""What stops a run before its end: signals, which the loop notices between two steps, and a
watchdog.

After the first signal the run finishes the current step and saves it. A second Ctrl-C ends the
process without saving. Before the first step, and after the last one is saved, there is nothing to
save. A thread then ends the process if its main thread does not stop by itself: Python tells the
main thread of a signal only between two of its instructions, and one of them may compile a program
for an hour. If several processes train together, a signal to any of them stops all of them after
the same step: JAX's runtime receives SIGTERM, informs every process, and agrees on the step, so all
other signals are turned into SIGTERM there.
"""

import contextlib
import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

from train.lifecycle.errors import COMPLETE, INTERRUPTED, RESTART
from train.metrics.output import print_error, print_line

EXIT_CODES = {
    signal.SIGTERM: RESTART,  # a cluster that takes the machine away
    signal.SIGHUP: RESTART,  # a terminal or an ssh connection that ends
    signal.SIGUSR1: RESTART,  # the notice that Slurm can be told to send before the time limit
    signal.SIGINT: INTERRUPTED,
}
TICK_SECONDS = 1.0
GRACE_SECONDS = 10.0  # for the main thread to stop by itself
URGENT_SECONDS = 2.0  # the same after a second Ctrl-C
SIGNAL_TICK_SECONDS = 0.1


class StopRequest:
    """A context manager that records the first signal instead of letting it end the process.

    `shared` says whether several processes train together. `end` ends the process with an exit
    code, without waiting for anything, `grace` seconds after a signal that the main thread has not
    obeyed; see `may_end_at_once`.
    """

    def __init__(
        self, *, shared: bool, grace: float = GRACE_SECONDS, end: Callable[[int], object] = os._exit
    ) -> None:
        self.signal: signal.Signals | None = None  # the first one that arrived
        self._shared = shared
        self._grace = grace
        self._end = end
        self._before: dict[signal.Signals, Any] = {}
        self._outcome: str | None = "before the first step; there was nothing new to save"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        watched = [
            number for number in EXIT_CODES if not (self._shared and number == signal.SIGTERM)
        ]
        self._before = {number: signal.signal(number, self._note) for number in watched}
        # other processes would wait for this one, so all of them stop after the same step
        if not self._shared:
            self._watch_signals()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def may_end_at_once(self, outcome: str) -> None:
        """Lets a signal end the process at any time from now on, which is said with `outcome`."""
        self._outcome = outcome

    def only_between_steps(self) -> None:
        """Lets only the main thread stop the run from now on."""
        self._outcome = None

    def _watch_signals(self) -> None:
        """Starts a thread that is told of each signal when it arrives, whatever the main thread
        does.
        """
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        thread = threading.Thread(
            target=self._end_in_time, args=(reads,), name="signals", daemon=True
        )
        thread.start()

        def stop() -> None:
            signal.set_wakeup_fd(before)
            os.close(writes)  # the thread then reads the end of the pipe
            thread.join()
            os.close(reads)

        self._stack.callback(stop)

    def _end_in_time(self, pipe: int) -> None:
        """Ends the process some time after a signal, sooner after a second Ctrl-C, while there is
        nothing to save.
        """
        arrived = list[signal.Signals]()
        grace = self._grace
        is_urgent = False
        waited = 0.0
        while True:
            timeout = SIGNAL_TICK_SECONDS if arrived else None
            if select.select([pipe], [], [], timeout)[0]:
                content = os.read(pipe, 64)
                if not content:
                    return
                arrived += [signal.Signals(number) for number in content if number in EXIT_CODES]
                if not is_urgent and arrived.count(signal.SIGINT) > 1:
                    is_urgent = True
                    grace = min(grace, URGENT_SECONDS)
                    waited = 0.0
            elif self._outcome is not None:  # ticks with a step to save do not count
                waited += SIGNAL_TICK_SECONDS
            outcome = self._outcome
            if arrived and outcome is not None and waited >= grace:
                print_line(f"stopped by {arrived[0].name} {outcome}")
                self._end(EXIT_CODES[arrived[0]])
                return

    def should_stop(self, step: int) -> bool:
        """Returns whether to stop after `step`; every process of a run gets the same answer for the
        same step.
        """
        if not self._shared:
            return self.signal is not None
        # JAX is imported after the command line has been checked
        from jax.experimental import multihost_utils

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


class Watchdog:
    """A context manager whose thread ends the process if `progress` is not called for some time.

    `seconds` is the longest time without progress, 0 for ever. The time is counted in ticks of the
    thread and not read from a clock, so that a process which was stopped with SIGSTOP, or a machine
    that slept, does not count as hanging.
    """

    def __init__(self, seconds: float, stacks: Path, *, end: Callable[[int], object] = os._exit):
        self._seconds = seconds
        self._stacks = stacks
        self._end = end
        self._idle = 0.0
        self._last = "the start"
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()

    def progress(self, last: str) -> None:
        """Tells that something was finished, which `last` names for the message."""
        self._idle = 0.0
        self._last = last

    def _watch(self) -> None:
        tick = min(TICK_SECONDS, self._seconds / 4)
        while self._idle <= self._seconds:
            if self._stopped.wait(tick):
                return
            self._idle += tick
        with contextlib.suppress(OSError), open(self._stacks, "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        print_error(
            f"error: the run made no progress for {self._seconds:.0f} s after {self._last}, so the "
            f"process ends; its stacks are in {self._stacks}. Started again, it continues from the "
            "newest checkpoint; report.hang_seconds sets the time."
        )
        self._end(RESTART)
