"""Errors of the package `tokenizers`, which raises whatever its Rust code meets, as errors of the
input.

A file that says nothing sensible, or a text that a tokenizer has no tokens for, can end in a panic
of Rust. Python sees that as a BaseException, after Rust has written where it panicked, and perhaps
a stack, to standard error.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO

from train.lifecycle.errors import InputError

_redirecting = threading.Lock()


@contextlib.contextmanager
def errors_of_tokenizers(says: str) -> Iterator[None]:
    """Turns what the package `tokenizers` raises into an InputError.

    What it writes to standard error is dropped then, because the InputError has the message, and is
    written afterwards otherwise.
    """
    with _redirecting, tempfile.TemporaryFile() as aside:
        restore = _redirect_stderr(aside)
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, InputError):
            raise
        except BaseException as error:
            aside.truncate(0)
            raise InputError(f"{says}: {' '.join(str(error).split())}") from error
        finally:
            restore()
            aside.seek(0)
            if (said := aside.read().decode(errors="replace")) and sys.stderr is not None:
                sys.stderr.write(said)


def _redirect_stderr(file: IO[bytes]) -> Callable[[], None]:
    """Lets the process write what it writes to standard error to a file, and returns what ends
    that.
    """
    if sys.stderr is None:
        return _do_nothing
    try:
        sys.stderr.flush()
        saved = os.dup(2)
    except OSError:  # it is closed
        return _do_nothing
    os.dup2(file.fileno(), 2)

    def restore() -> None:
        os.dup2(saved, 2)
        os.close(saved)

    return restore


def _do_nothing() -> None: ...
