"""What a person sees of a run or of a long transfer: a live line in a terminal, plain lines anywhere else."""

import contextlib
import datetime
import sys
from typing import Self

import rich.progress

from train.metrics.output import print_line
from train.metrics.recorder import Line, Sink


class Progress(Sink):
    """A sink that shows the newest line, and prints a line for each validation and each skipped update."""

    def __init__(self, *, start: int, steps: int):
        columns = [
            rich.progress.TextColumn(text) for text in ("step {task.completed}/{task.total}", "{task.description}")
        ]
        self._bar = rich.progress.Progress(*columns, refresh_per_second=4, disable=not sys.stdout.isatty())
        self._task = self._bar.add_task("starting", total=steps, completed=start)
        self._bar.start()
        self._steps = steps

    def write(self, lines: list[Line]) -> None:
        for line in lines:
            if line.get("skipped"):
                self._print(f"step {line['step']}: the update was skipped, {describe(line)}")
            if "validation_loss" in line:
                self._print(describe_validation(line))
        if lines:
            step, seconds = lines[-1]["step"], lines[-1].get("step_seconds") or 0
            eta = datetime.timedelta(seconds=round(seconds * (self._steps - step)))
            text = f"{describe(lines[-1])}  eta {eta}"
            self._bar.update(self._task, completed=step, description=text)
            if self._bar.disable:
                print_line(f"step {step}/{self._steps}  {text}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._bar.stop()

    def _print(self, text: str) -> None:
        if self._bar.disable:
            print_line(text)
        else:
            with contextlib.suppress(OSError):
                self._bar.print(text, highlight=False)


class Percent:
    """Shows how much of a long transfer is done. Use it as a context manager; `verb` is what is done, as "imported"."""

    def __init__(self, verb: str):
        self._verb, self._tenths = verb, 0
        self._bar = rich.progress.Progress(disable=not sys.stdout.isatty())
        self._task = self._bar.add_task(verb, total=None)

    def report(self, what: str, done: int, total: int) -> None:
        """Says that `done` of `total` are done, the last of which is `what`; it is a `models.hugging_face.Report`."""
        self._bar.update(self._task, completed=done, total=total, description=f"{self._verb} {what}")
        if self._bar.disable and done * 10 // total > self._tenths:
            self._tenths = done * 10 // total
            print_line(f"{self._verb} {self._tenths * 10}% ({what})")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def describe(line: Line) -> str:
    """Formats a line as "loss 2.3101  grad norm 0.512  81,920 tokens/s"."""
    loss, norm = _number(line.get("loss"), ".4f"), _number(line.get("grad_norm"), ".3f")
    return f"loss {loss}  grad norm {norm}  {_number(line.get('tokens_per_second'), ',.0f')} tokens/s"


def describe_validation(line: Line) -> str:
    """Formats a line as "step 200: validation loss 2.3456 nats per token, perplexity 10.44", one part for each set."""
    parts = [
        f"{name} loss {_number(line[f'{name}_loss'], '.4f')} nats per token, "
        f"perplexity {_number(line.get(f'{name}_perplexity'), '.4g')}"
        for name in (key.removesuffix("_loss") for key in line if key.endswith("_loss"))
    ]
    return f"step {line['step']}: {'; '.join(parts)}"


def _number(value: float | int | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
