"""How much of a long transfer is done: a live bar in a terminal, and a line for every tenth anywhere else."""

import sys
from types import TracebackType
from typing import Self

from train.metrics.output import print_line


class Percent:
    """Reports parts of a whole. Use it as a context manager; `report` is a `models.hugging_face.Report`.

    Args:
      verb: What is done, for the report, such as "imported".
    """

    def __init__(self, verb: str):
        import rich.progress

        self._verb, self._tenths = verb, 0
        self._bar = rich.progress.Progress(disable=not sys.stdout.isatty())
        self._task = self._bar.add_task(verb, total=None)

    def report(self, what: str, done: int, total: int) -> None:
        """Says that `done` of `total` are done, the last of which is `what`."""
        self._bar.update(self._task, completed=done, total=total, description=f"{self._verb} {what}")
        if self._bar.disable and done * 10 // total > self._tenths:
            self._tenths = done * 10 // total
            print_line(f"{self._verb} {self._tenths * 10}% ({what})")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
