"""The progress report of a run: one live line in a terminal, plain lines anywhere else."""

import contextlib
import datetime
import sys
import time
from collections.abc import Iterator

from train.metrics.output import print_line
from train.metrics.recorder import Line

_WIDTH_FOR_BAR = 110  # columns of a terminal; a narrower one has room for the numbers only


class PlainProgress:
    """A sink that prints one line per report and one line per validation."""

    def __init__(self, *, start: int, steps: int):
        self._estimate = _Estimate(start, steps)
        self._steps = steps

    def write(self, lines: list[Line]) -> None:
        for text in remarks(lines):
            print_line(text)
        if lines:
            eta = self._estimate.eta(lines[-1])
            print_line(f"step {lines[-1]['step']}/{self._steps}  {describe(lines[-1])}  eta {eta}")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class LiveProgress:
    """A sink that redraws one progress line in place and prints validations above it."""

    def __init__(self, *, start: int, steps: int):
        import rich.console
        import rich.progress  # imported late, because only a terminal needs it

        self._estimate = _Estimate(start, steps)
        console = rich.console.Console()
        columns: list[rich.progress.ProgressColumn] = [
            rich.progress.TextColumn("step {task.completed}/{task.total}"),
            rich.progress.TextColumn("{task.description}"),
        ]
        if console.width >= _WIDTH_FOR_BAR:
            columns.insert(1, rich.progress.BarColumn(bar_width=20))
        self._bar = rich.progress.Progress(*columns, console=console, refresh_per_second=4)
        self._task = self._bar.add_task("starting", total=steps, completed=start)
        self._bar.start()

    def write(self, lines: list[Line]) -> None:
        for text in remarks(lines):
            with contextlib.suppress(OSError):  # the terminal was closed
                self._bar.print(text, highlight=False)
        if lines:
            text = f"{describe(lines[-1])}  eta {self._estimate.eta(lines[-1])}"
            self._bar.update(self._task, completed=lines[-1]["step"], description=text)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()


def make_progress(*, start: int, steps: int) -> PlainProgress | LiveProgress:
    """Returns a live line if standard output is a terminal, and plain lines otherwise."""
    return (LiveProgress if sys.stdout.isatty() else PlainProgress)(start=start, steps=steps)


def describe(line: Line) -> str:
    """Formats a line as "loss 2.3101  grad norm 0.512  81,920 tokens/s"."""
    loss, norm = _number(line.get("loss"), ".4f"), _number(line.get("grad_norm"), ".3f")
    return f"loss {loss}  grad norm {norm}  {_number(line.get('tokens_per_second'), ',.0f')} tokens/s"


def remarks(lines: list[Line]) -> Iterator[str]:
    """Yields the lines to print about validations and skipped updates."""
    for line in lines:
        if line.get("skipped"):
            yield f"step {line['step']}: the update was skipped, {describe(line)}"
        if "validation_loss" in line:
            yield describe_validation(line)


def describe_validation(line: Line) -> str:
    """Formats a line as "step 200: validation loss 2.3456 nats per token, perplexity 10.44", one part for each set."""
    sets = [name.removesuffix("_loss") for name in line if name.endswith("_loss")]
    parts = [
        f"{name} loss {_number(line[f'{name}_loss'], '.4f')} nats per token, "
        f"perplexity {_number(line.get(f'{name}_perplexity'), '.4g')}"
        for name in sets
    ]
    return f"step {line['step']}: {'; '.join(parts)}"


class _Estimate:
    """The time that the run still needs, estimated from the mean speed of this process."""

    def __init__(self, start: int, steps: int):
        self._start, self._steps, self._began = start, steps, time.monotonic()

    def eta(self, line: Line) -> str:
        step = line["step"]
        if step is None or step <= self._start:
            return "?"
        seconds = (time.monotonic() - self._began) / (step - self._start) * (self._steps - step)
        return str(datetime.timedelta(seconds=round(seconds)))


def _number(value: float | int | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
