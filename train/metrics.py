"""The measurements of a run: one line per step in metrics.jsonl, and the same numbers as TensorBoard events.

The loop hands over device arrays that may not have been computed yet, and `Recorder.report` fetches those up to a given
step. The host waits for the devices there and where a checkpoint is copied; the share of its time that it waits is a
metric, too. A step that is repeated after a restart replaces its line, so that the file has each step exactly once,
whenever the process was killed.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax

Line = dict[str, float | int | None]
"""The values of one step by name: step, loss, grad_norm, learning_rate, tokens, tokens_per_second, host_wait_share.

A step with a validation also has validation_loss.
"""
_MUST_BE_FINITE = ("loss", "grad_norm")


class DivergedError(ArithmeticError):
    """The loss or the gradient norm of a step is not a finite number."""

    def __init__(self, step: int, name: str, value: float):
        super().__init__(f"{name} is {value} at step {step}")
        self.step = step


class Sink(Protocol):
    """A destination of finished lines, such as a file, TensorBoard or a terminal."""

    def write(self, lines: list[Line]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """The file metrics.jsonl. Opening it drops the lines after step `start` and an incomplete last line."""

    def __init__(self, path: Path, *, start: int):
        drop_lines_after(path, start)
        self._file = open(path, "a")  # noqa: SIM115 (`close` closes it)

    def write(self, lines: list[Line]) -> None:
        self._file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files of TensorBoard, which is told to discard what an earlier process wrote after step `start`."""

    def __init__(self, folder: Path, *, start: int):
        from tensorboardX import SummaryWriter  # this import takes a tenth of a second

        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def write(self, lines: list[Line]) -> None:
        for line in lines:
            for name, value in line.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(name, value, line["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Recorder:
    """Collects the metrics of dispatched steps and writes finished lines to the sinks."""

    def __init__(self, sinks: Iterable[Sink], *, tokens_per_step: int):
        self._sinks = list(sinks)
        self._tokens_per_step = tokens_per_step
        self._pending: dict[int, dict[str, jax.Array]] = {}
        self.start_clock()

    def start_clock(self) -> None:
        """Starts the interval whose time the next report measures."""
        self._fetched_at, self._waited = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside the context as time in which the host waited for the devices."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def add(self, step: int, **metrics: jax.Array) -> None:
        """Adds metrics of a step without waiting for them; more metrics of the same step may be added later."""
        self._pending.setdefault(step, {}).update(metrics)

    def report(self, until: int) -> None:
        """Waits for the steps up to `until` and writes their lines to the sinks.

        Raises:
          DivergedError: The loss or the gradient norm of a step is not finite; the lines up to that step are written.
        """
        steps = [step for step in self._pending if step <= until]
        if not steps:
            return
        with self.waiting():
            fetched = jax.device_get([self._pending.pop(step) for step in steps])
        seconds = max(time.perf_counter() - self._fetched_at, 1e-9)
        pace: Line = {
            "tokens_per_second": round(self._tokens_per_step * len(steps) / seconds, 1),
            "host_wait_share": round(min(self._waited / seconds, 1.0), 4),
        }
        self.start_clock()
        lines, diverged = [], None
        for step, metrics in zip(steps, fetched, strict=True):
            values = {name: float(value) for name, value in metrics.items()}
            lines.append(self._line(step, values) | pace)
            diverged = next(
                (DivergedError(step, name, values[name]) for name in _MUST_BE_FINITE if not _finite(values, name)), None
            )
            if diverged:
                break
        for sink in self._sinks:
            sink.write(lines)
        if diverged:
            raise diverged

    def flush(self) -> None:
        """Waits until all written lines are on disk, because a checkpoint must not be newer than its lines."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _line(self, step: int, values: dict[str, float]) -> Line:
        finite: Line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return {
            "step": step,
            "loss": finite.pop("loss", None),
            **finite,
            "tokens": step * self._tokens_per_step,
        }


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines of a metrics.jsonl up to the first incomplete or invalid one."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for raw in file:
            line = _parse(raw)
            if line is None:
                return
            yield line


def step_of(line: Line) -> int:
    """Returns the step of a line."""
    step = line["step"]
    assert isinstance(step, int)
    return step


def drop_lines_after(path: Path, step: int) -> None:
    """Drops the lines of later steps than `step`, and everything from the first invalid line on, by one rename."""
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in read_lines(path) if step_of(line) <= step)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _parse(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _finite(values: dict[str, float], name: str) -> bool:
    return math.isfinite(values.get(name, 0.0))
