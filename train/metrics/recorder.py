"""The measurements of a run: the loop hands over device arrays, and reports turn them into lines for the sinks.

The device arrays may not have been computed yet, and `Recorder.report` fetches those up to a given step. The host waits
for the devices there and where a checkpoint is copied; the share of its time that it waits is a metric, too.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from train.lifecycle.errors import DivergedError
from train.metrics.pace import Pace

Line = dict[str, Any]
"""The values of one step by name, as docs/train.md lists them; a number that is not finite is None."""


class Sink:
    """A destination of finished lines, such as a file, TensorBoard or a terminal. A sink overrides what it needs."""

    def write(self, lines: list[Line]) -> None:
        """Takes the lines of a report."""

    def flush(self) -> None:
        """Waits until all lines are on disk, because a checkpoint must not be newer than its lines."""

    def close(self) -> None:
        """Writes what is left."""


class Recorder:
    """Collects the metrics of dispatched steps and writes finished lines to the sinks.

    `skip_limit` skipped updates in a row end the run, and `on_skip` is called with the line of each of them.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        pace: Pace,
        *,
        skip_limit: int = 1,
        on_skip: Callable[[Line], None] = lambda _: None,
    ):
        self.pace = pace
        self._sinks = list(sinks)
        self._skip_limit, self._on_skip = skip_limit, on_skip
        self._skipped_in_row = 0
        self._pending: dict[int, dict[str, jax.Array]] = {}

    def add(self, step: int, **metrics: jax.Array) -> None:
        """Adds metrics of a step without waiting for them; more metrics of the same step may be added later.

        A metric whose name ends in "_loss" also gives a perplexity.
        """
        self._pending.setdefault(step, {}).update(metrics)

    def report(self, until: int) -> None:
        """Waits for the steps up to `until` and writes their lines to the sinks.

        Raises:
          DivergedError: A loss or the gradient norm of a step is not finite; the lines up to that step are written.
        """
        steps = [step for step in self._pending if step <= until]
        if not steps:
            return
        with self.pace.waiting():
            fetched = jax.device_get([self._pending.pop(step) for step in steps])
        pace = self.pace.report(len(steps))
        lines, diverged = list[Line](), None
        for step, metrics in zip(steps, fetched, strict=True):
            values = {name: float(value) for name, value in metrics.items()}
            lines.append({**_line(step, values), **self.pace.tokens(step), **pace})
            if values.get("skipped"):
                self._on_skip(lines[-1])
            if diverged := self._find_divergence(step, values):
                break
        for sink in self._sinks:
            sink.write(lines)
        if diverged:
            raise diverged

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
            return DivergedError(step, f"{self._skipped_in_row} updates in a row were skipped, the last one")
        for name, value in values.items():
            is_required = name.endswith("_loss") or (name in ("loss", "grad_norm") and not skipped)
            if is_required and not math.isfinite(value):
                return DivergedError(step, f"{name} is {value}")
        return None


def _line(step: int, values: dict[str, float]) -> Line:
    perplexities = {
        f"{name.removesuffix('_loss')}_perplexity": math.exp(min(value, 700.0))  # e^700 is near the largest float
        for name, value in values.items()
        if name.endswith("_loss")
    }
    finite: Line = {name: value if math.isfinite(value) else None for name, value in (values | perplexities).items()}
    if "skipped" in finite:
        finite["skipped"] = int(values["skipped"])
    return {"step": step, "loss": finite.pop("loss", None), **finite}
