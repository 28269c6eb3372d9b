"""Lines of text for whoever started the command; they go on without a reader, and nothing here imports JAX."""

import os
import sys


def print_line(text: str) -> None:
    """Prints a line; once nobody reads standard output any more, as when a terminal was closed, nothing is printed."""
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def warn(text: str) -> None:
    """Prints a line on standard error, for what is wrong and does not end the run."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
