"""Lines on standard output that a command goes on without, once nobody reads them. Nothing here imports JAX."""

import os
import sys


def print_line(text: str) -> None:
    """Prints a line and flushes it; once nobody reads standard output any more, nothing more is printed there.

    A run goes on when its terminal is closed, or when the program that its output is piped to ends.
    """
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
