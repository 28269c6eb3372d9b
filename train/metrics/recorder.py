"""The measurements of a run: the loop hands over device arrays, and reports turn them into lines
for the sinks.

The device arrays may not have been computed yet. The host waits for them in `Recorder.report`.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax

from train.lifecycle.errors import DivergedError
from train.metrics.lines import Events, Line, Sink


@dataclasses.dataclass
class Pace:
    """Measures the speed of one interval after the other, each from the report before it to its own
    report.

    The goodput is the share of `productive` in the time since `began`.
    """

    tokens_per_step: int
    steps_before: int = 0  # that were done before this process
    tokens_before: int = 0  # that were consumed before this process
    flops_per_token: float = 0.0  # model FLOPs
    # of all devices together, in FLOP per second; None if it is not known
    peak_flops: float | None = None
    # the first start, seconds since the epoch
    began: float = dataclasses.field(default_factory=lambda: time.time())
    # seconds of steps that still count, without restarts, compilations and checkpoints
    productive: float = 0.0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Starts an interval."""
        self._started_at = time.perf_counter()
        self._seconds = {"wait": 0.0, "load": 0.0, "save": 0.0}

    @contextlib.contextmanager
    def counted(self, kind: Literal["wait", "load", "save"]) -> Iterator[None]:
        """Counts the time inside the context: the host waits for the devices, or for data, or
        copies a checkpoint.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[kind] += time.perf_counter() - began

    def tokens(self, step: int) -> int:
        """Returns the number of tokens that the run has consumed after a step."""
        return self.tokens_before + (step - self.steps_before) * self.tokens_per_step

    def report(self, steps: int) -> dict[str, float]:
        """Returns the speed in the interval, in which `steps` steps were finished, and starts the
        next one.
        """
        seconds = max(time.perf_counter() - self._started_at, 1e-9)
        waited = self._seconds["wait"]
        saved = self._seconds["save"]
        self.productive += max(seconds - saved, 0.0)
        tokens_per_second = self.tokens_per_step * steps / seconds
        speed = {
            "tokens_per_second": round(tokens_per_second, 1),
            "step_seconds": round(seconds / steps, 6),
            "data_wait_share": round(min(self._seconds["load"] / seconds, 1.0), 4),
            "host_wait_share": round(min((waited + saved) / seconds, 1.0), 4),
            # The wall clock may have been set back since the first start, so the share is limited
            # to 1.
            "goodput": round(self.productive / max(time.time() - self.began, self.productive), 4),
        }
        if self.peak_flops:
            speed["mfu"] = round(tokens_per_second * self.flops_per_token / self.peak_flops, 4)
        self.start()
        return speed


class Recorder:
    """Collects the metrics of dispatched steps and writes finished lines to the sinks, and skipped
    updates to `events`.

    `skip_limit` skipped updates in a row end the run.
    """

    def __init__(self, sinks: Iterable[Sink], pace: Pace, events: Events, *, skip_limit: int):
        self.pace = pace
        self._sinks = list(sinks)
        self._events = events
        self._skip_limit = skip_limit
        self._skipped_in_row = 0
        self._reported = 0
        self._pending: dict[int, dict[str, jax.Array]] = {}

    def add(self, step: int, **metrics: jax.Array) -> None:
        """Adds metrics of a step without waiting for them; more metrics of the same step may be
        added later.

        A metric whose name ends in "_loss" also gives a perplexity.
        """
        self._pending.setdefault(step, {}).update(metrics)

    def report(self, until: int) -> None:
        """Waits for the steps up to `until` and writes their lines to the sinks.

        A loss or a gradient norm that is not finite raises a DivergedError once the lines up to its
        step are written.
        """
        steps = [step for step in self._pending if step <= until]
        if not steps:
            return
        with self.pace.counted("wait"):
            fetched = jax.device_get([self._pending.pop(step) for step in steps])
        speed = self.pace.report(len(steps))
        lines = list[Line]()
        diverged = None
        for step, metrics in zip(steps, fetched, strict=True):
            values = {name: float(value) for name, value in metrics.items()}
            lines.append({**_line(step, values), "tokens": self.pace.tokens(step), **speed})
            if values.get("skipped"):
                self._events.add(
                    "skipped", **{name: lines[-1][name] for name in ("step", "loss", "grad_norm")}
                )
            if diverged := self._find_divergence(step, values):
                break
        for sink in self._sinks:
            sink.write(lines)
        self._reported += len(lines)
        if diverged:
            raise diverged

    def computed(self) -> int:
        """Returns how many of the steps that were added are computed; any thread may ask."""
        losses: list[Any] = [metrics["loss"] for metrics in list(self._pending.values())]
        ready = sum(loss.is_ready() for loss in losses)  # which the stub of jax.Array lacks
        return self._reported + ready

    def flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _find_divergence(self, step: int, values: dict[str, float]) -> DivergedError | None:
        skipped = bool(values.get("skipped"))
        self._skipped_in_row = self._skipped_in_row + 1 if skipped else 0
        if skipped and self._skipped_in_row >= self._skip_limit:
            return DivergedError(
                step, f"{self._skipped_in_row} updates in a row were skipped, the last one"
            )
        for name, value in values.items():
            is_required = name.endswith("_loss") or (name in ("loss", "grad_norm") and not skipped)
            if is_required and not math.isfinite(value):
                return DivergedError(step, f"{name} is {value}")
        return None


def _line(step: int, values: dict[str, float]) -> Line:
    perplexities = {
        # e^700 is near the largest float
        f"{name.removesuffix('_loss')}_perplexity": math.exp(min(value, 700.0))
        for name, value in values.items()
        if name.endswith("_loss")
    }
    finite: Line = {
        name: value if math.isfinite(value) else None
        for name, value in (values | perplexities).items()
    }
    if "skipped" in finite:
        finite["skipped"] = int(values["skipped"])
    return {"step": step, "loss": finite.pop("loss", None), **finite}
