"""Lines of text for whoever started the command, which goes on when nobody reads them."""

import os
import sys
from collections.abc import Callable


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


def percent_printer(verb: str) -> Callable[[str, int, int], None]:
    """Returns a `models.hugging_face.Report` that prints a line for each tenth of a long transfer.

    `verb` says what is done, such as "imported".
    """
    tenths = 0

    def report(what: str, done: int, total: int) -> None:
        nonlocal tenths
        if done * 10 // total > tenths:
            tenths = done * 10 // total
            print_line(f"{verb} {tenths * 10}% ({what})")

    return report
