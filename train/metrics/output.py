"""Lines of text for whoever started the command, which goes on when nobody reads them."""

import os
import sys
from typing import Self

import rich.progress


def print_line(text: str) -> None:
    """Prints a line; once nobody reads standard output any more, as when a terminal was closed, nothing is printed."""
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def say(text: str) -> None:
    """Prints a line in the first of several processes only."""
    import jax  # the commands that print their own lines check their options before they import JAX

    if jax.process_index() == 0:
        print_line(text)


def warn(text: str) -> None:
    """Prints a line on standard error, for what is wrong and does not end the run."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


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
