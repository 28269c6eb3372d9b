"""What commands write: lines of text that nobody needs to read, and files that a killed process leaves whole."""

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

GIB = 1 << 30


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


def gib(count: float) -> str:
    return f"{count / GIB:,.4g} GiB" if count >= 0.1 * GIB else f"{count / (1 << 20):,.3g} MiB"


def time_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


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


def user_cache() -> Path:
    """Returns the folder flaxasync/ in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flaxasync"


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file by one rename, so that a killed process leaves either the old or the new content.

    The name of the temporary file has the host and the process in it, because several processes may write one file.
    """
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
