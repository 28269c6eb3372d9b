"""The speed of a run: time per step, tokens per second, waits, utilization of the chips, and goodput.

Goodput is the share of the time since the first start of the run that was spent on steps which still count. Time that a
restart, a compilation or the saving of a checkpoint took is not such time, and neither are steps that were repeated
after a crash.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass
class Pace:
    """Measures one interval after the other, each from the report before it to its own report."""

    tokens_per_step: int
    steps_before: int = 0
    """Number of steps that were done before this process."""
    tokens_before: int = 0
    """Number of tokens that were consumed before this process."""
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """Peak rate of all devices together, in FLOP per second; None if it is not known."""
    began: float = dataclasses.field(default_factory=lambda: time.time())
    """Wall-clock time of the first start of the run, in seconds since the epoch."""
    productive: float = 0.0
    """Time that was spent on steps that still count, in seconds."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Starts an interval."""
        self._started_at = time.perf_counter()
        self._seconds = dict.fromkeys(("wait", "load", "save"), 0.0)

    @contextlib.contextmanager
    def _counted(self, *kinds: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            for kind in kinds:
                self._seconds[kind] += time.perf_counter() - began

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Counts the time inside the context as time in which the host waited for the devices."""
        return self._counted("wait")

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Counts the time inside the context as time in which the host waited for data."""
        return self._counted("load")

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Counts the time inside the context as time in which the host copied a checkpoint and trained nothing."""
        return self._counted("wait", "save")

    def tokens(self, step: int) -> dict[str, int]:
        """Returns the number of tokens that the run has consumed after a step."""
        return {"tokens": self.tokens_before + (step - self.steps_before) * self.tokens_per_step}

    def report(self, steps: int) -> dict[str, float]:
        """Returns the speed in the interval, in which `steps` steps were finished, and starts the next one."""
        seconds = max(time.perf_counter() - self._started_at, 1e-9)
        self.productive += max(seconds - self._seconds["save"], 0.0)
        tokens_per_second = self.tokens_per_step * steps / seconds
        speed = {
            "tokens_per_second": round(tokens_per_second, 1),
            "step_seconds": round(seconds / steps, 6),
            "data_wait_share": round(min(self._seconds["load"] / seconds, 1.0), 4),
            "host_wait_share": round(min(self._seconds["wait"] / seconds, 1.0), 4),
            # The wall clock may have been set back since the first start, so the share is limited to 1.
            "goodput": round(self.productive / max(time.time() - self.began, self.productive), 4),
        }
        if self.peak_flops:
            speed["mfu"] = round(tokens_per_second * self.flops_per_token / self.peak_flops, 4)
        self.start()
        return speed
