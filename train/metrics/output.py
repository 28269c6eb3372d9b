"""What commands write: lines of text that nobody needs to read, and files that a killed process
leaves whole.
"""

import io
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

GIB = 1 << 30


def open_missing_streams() -> None:
    """Lets a process without a terminal go on: what is printed to a closed standard stream goes
    nowhere.

    The numbers of closed streams are taken as well. Otherwise the next file that is opened has such
    a number, and what a library writes to standard error ends up in it. A character that the
    encoding of standard output lacks, as in the text of a sample, is printed as its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
    # Python has None for a stream that was closed when it started.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 (open until the process ends)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_line(text: str) -> None:
    """Prints a line; once nobody reads standard output any more, as when a terminal was closed,
    nothing is printed.
    """
    _print(text, sys.stdout)


def print_error(text: str) -> None:
    """Prints a line on standard error as `print_line` does, so that an error ends a process as it
    should.
    """
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(text: str) -> None:
    """Prints a line in the first of several processes only."""
    import jax  # the commands that print their own lines check their options before they import JAX

    if jax.process_index() == 0:
        print_line(text)


def warn(text: str) -> None:
    """Prints a line on standard error, for what is wrong and does not end the run."""
    print_error(f"warning: {text}")


def gib(count: float) -> str:
    return f"{count / GIB:,.4g} GiB" if count >= 0.1 * GIB else f"{count / (1 << 20):,.3g} MiB"


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
    """Replaces a file by one rename, so that a killed process leaves either the old or the new
    content.

    The name of the temporary file has the host and the process in it, because several processes may
    write one file.
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
