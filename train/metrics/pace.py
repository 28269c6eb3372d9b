"""The speed of a run: time per step, tokens per second, waits, utilization of the chips, and goodput.

Goodput is the share of the time since the first start of the run that was spent on steps which still count. Time that a
restart, a compilation or the saving of a checkpoint took is not such time, and neither are steps that were repeated
after a crash.
"""

import contextlib
import time
from collections.abc import Iterator


class Pace:
    """Measures one interval after the other, each from the report before it to its own report."""

    def __init__(
        self,
        *,
        tokens_per_step: int,
        start: int = 0,
        tokens_before: int = 0,
        flops_per_token: float = 0.0,
        peak_flops: float | None = None,
        began: float | None = None,
        productive_before: float = 0.0,
    ):
        """Starts the first interval.

        Args:
          tokens_per_step: Number of tokens in a batch.
          start: Number of steps that were done before this process.
          tokens_before: Number of tokens that were consumed before this process.
          flops_per_token: Floating-point operations that the model needs for a token.
          peak_flops: Peak rate of all devices together, in FLOP per second; None if it is not known.
          began: Wall-clock time of the first start of the run, in seconds since the epoch; None is now.
          productive_before: Time that earlier processes spent on steps that still count, in seconds.
        """
        self._tokens_per_step = tokens_per_step
        self._start, self._tokens_before = start, tokens_before
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._began = time.time() if began is None else began
        self._productive = productive_before
        self.start()

    def start(self) -> None:
        """Starts an interval."""
        self._started_at, self._waited, self._loaded, self._saved = time.perf_counter(), 0.0, 0.0, 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside the context as time in which the host waited for the devices."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Counts the time inside the context as time in which the host waited for data."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._loaded += time.perf_counter() - began

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the time inside the context as time in which the host copied a checkpoint and trained nothing."""
        began = time.perf_counter()
        try:
            with self.waiting():
                yield
        finally:
            self._saved += time.perf_counter() - began

    def tokens(self, step: int) -> dict[str, int]:
        """Returns the number of tokens that the run has consumed after a step."""
        return {"tokens": self._tokens_before + (step - self._start) * self._tokens_per_step}

    def report(self, steps: int) -> dict[str, float]:
        """Returns the speed in the interval, in which `steps` steps were finished, and starts the next one."""
        seconds = max(time.perf_counter() - self._started_at, 1e-9)
        self._productive += max(seconds - self._saved, 0.0)
        tokens_per_second = self._tokens_per_step * steps / seconds
        speed = {
            "tokens_per_second": round(tokens_per_second, 1),
            "step_seconds": round(seconds / steps, 6),
            "data_wait_share": round(min(self._loaded / seconds, 1.0), 4),
            "host_wait_share": round(min(self._waited / seconds, 1.0), 4),
            # The wall clock may have been set back since the first start, so the share is limited to 1.
            "goodput": round(self._productive / max(time.time() - self._began, self._productive), 4),
        }
        if self._peak_flops:
            speed["mfu"] = round(tokens_per_second * self._flops_per_token / self._peak_flops, 4)
        self.start()
        return speed
