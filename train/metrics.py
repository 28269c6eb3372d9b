"""What a run measured: one line a step in metrics.jsonl, and the same numbers as TensorBoard events.

The loop hands over device arrays that may not exist yet. `Recorder.report` fetches those up to a step. There, and where
a checkpoint is copied, the host waits for the devices, and it is recorded for how much of the time. A step that is done
again after a restart replaces its line, so that each step is there exactly once, whenever the process was killed.
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
"""One step: step, loss, grad_norm, learning_rate, tokens, tokens_per_second, host_wait_share; validation_loss."""


class DivergedError(ArithmeticError):
    """The loss or the gradient of a step is not a finite number."""

    def __init__(self, step: int, name: str, value: float):
        super().__init__(f"{name} is {value} at step {step}")
        self.step = step


class Sink(Protocol):
    """Takes finished lines: a file, TensorBoard, a terminal."""

    def write(self, lines: list[Line]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl. Opening it drops the lines after step `start`, and a last line that was cut off."""

    def __init__(self, path: Path, *, start: int):
        keep_until(path, start)
        self._file = open(path, "a")  # noqa: SIM115 (lives as long as the run)

    def write(self, lines: list[Line]) -> None:
        self._file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files. What an earlier process wrote after step `start` is marked as undone."""

    def __init__(self, folder: Path, *, start: int):
        from tensorboardX import SummaryWriter  # a tenth of a second that a run without it need not pay

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
    """Collects the metrics of dispatched steps and gives finished lines to the sinks."""

    def __init__(self, sinks: Iterable[Sink], *, tokens_per_step: int):
        self._sinks = list(sinks)
        self._tokens_per_step = tokens_per_step
        self._pending: dict[int, dict[str, jax.Array]] = {}
        self.start_clock()

    def start_clock(self) -> None:
        """Counts the time of the next report from now."""
        self._fetched_at, self._waited = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what is done in it as time that the host waited for the devices."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def add(self, step: int, **metrics: jax.Array) -> None:
        """Notes metrics of a step, without waiting for them. A step may get some now and others later."""
        self._pending.setdefault(step, {}).update(metrics)

    def report(self, until: int) -> None:
        """Fetches the steps up to `until` and hands their lines on. Waits until the devices have done them.

        Raises:
          DivergedError: the loss or the gradient norm of one of them is not finite; lines up to it are handed on.
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
                (DivergedError(step, name, values[name]) for name in _WATCHED if not _finite(values, name)), None
            )
            if diverged:
                break
        for sink in self._sinks:
            sink.write(lines)
        if diverged:
            raise diverged

    def flush(self) -> None:
        """Returns when what was handed on is on disk; a checkpoint must not be newer than its lines."""
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


_WATCHED = ("loss", "grad_norm")


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines of a metrics.jsonl, up to the first that is not whole."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for raw in file:
            line = _parse(raw)
            if line is None:
                return
            yield line


def step_of(line: Line) -> int:
    """Returns the step of a line, which every line has."""
    step = line["step"]
    assert isinstance(step, int)
    return step


def keep_until(path: Path, step: int) -> None:
    """Drops every line after `step`, and what follows a line that is not whole, in one rename."""
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
