"""How a command can end: the exit codes that a supervisor acts on, and the errors that end a
command with one of them.

docs/operations.md says what a supervisor does after each code. Any function of `train` raises an
InputError where it is given what it cannot use; docstrings name only the other errors.
"""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator

from train.metrics.output import open_missing_streams, print_error

COMPLETE = 0  # all steps are done, or there was nothing to do
# the command line, the data or the workdir cannot be used as they are; no checkpoint was changed
BAD_INPUT = 2
# the loss or the gradient is not finite, so that repeating the same steps does not help
DIVERGED = 3
OUT_OF_MEMORY = 4  # the devices or the host have too little memory for this configuration
# EX_IOERR: the workdir cannot be written; checkpoints that were complete before are intact
STORAGE = 74
RESTART = 75  # EX_TEMPFAIL: the run continues from its newest checkpoint when it is started again
INTERRUPTED = 130  # by Ctrl-C

_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
)
_NO_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory")
# What a collective and the coordination service of JAX say where another process is gone.
_LOST_PROCESS = re.compile("Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


_MOST_CHARACTERS = 200


class RunError(Exception):
    """An error that ends a command with one paragraph on standard error and an exit code, instead
    of a traceback.
    """

    exit_code = 1


class InputError(RunError, ValueError):
    """A mistake that the person who starts the run can correct."""

    exit_code = BAD_INPUT


class DivergedError(RunError, ArithmeticError):
    """A number of a step is not finite, or too many updates in a row were skipped."""

    exit_code = DIVERGED

    def __init__(self, step: int, cause: str, advice: str = ""):
        super().__init__(f"{cause} at step {step}{advice}")
        self.step = step
        self.cause = cause


class StorageError(RunError, OSError):
    """A checkpoint or the metrics could not be written, even after repeated attempts."""

    exit_code = STORAGE


class RestartError(RunError):
    """The run cannot go on in this process, but can be continued by a new one."""

    exit_code = RESTART


def cut(value: object) -> str:
    """Returns the `repr` of a value in one line, cut where it is long, whatever the value is."""
    try:
        text = repr(value)
    except Exception as error:  # Python refuses to print integers of thousands of digits; others' types do as they like
        text = (
            f"a value of type {type(value).__name__}, which cannot be printed "
            f"({type(error).__name__})"
        )
    return one_line(text)


def one_line(text: object) -> str:
    """Returns a text, such as the message of an error, in one line of at most about 200
    characters.
    """
    line = " ".join(str(text).split())
    return f"{line[:_MOST_CHARACTERS]}..." if len(line) > _MOST_CHARACTERS else line


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of an error."""
    return str(error).strip().partition("\n")[0]


@contextlib.contextmanager
def as_input_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of some types, whose messages a person can act on, into InputErrors."""
    try:
        yield
    except kinds as error:
        raise InputError(str(error)) from error


def exit_code(
    action: Callable[[], int | None],
    *,
    outcome: str,
    memory_advice: str,
    reader_may_leave: bool = False,
    several_processes: bool = False,
) -> int:
    """Runs a command and returns its exit code; an error that a person can act on is one line on
    standard error.

    Args:
      action: The command. It returns its exit code, or None for 0.
      outcome: What a command that did not finish has done, as a sentence without a period: "Nothing
        was imported".
      memory_advice: What needs less memory, as a sentence without a period.
      reader_may_leave: Whether the command only prints, so that it is complete once nobody reads
        its output. One that writes files prints by `train.metrics.output.print_line`, which goes on
        without a reader.
      several_processes: Whether the errors of a collective whose partner is gone are explained,
        too.
    """
    open_missing_streams()
    try:
        return action() or COMPLETE
    except KeyboardInterrupt:
        print_error(f"\nerror: interrupted. {outcome}")
        return INTERRUPTED
    except BrokenPipeError:
        if not reader_may_leave:
            raise
        # Whoever read the output, such as `head`, has enough of it. Python would complain again
        # when it flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COMPLETE
    except Exception as error:
        code, explanation = _explain(error, outcome, memory_advice, several_processes)
        if not explanation:
            raise
        print_error(f"error: {explanation}")
        return code


def is_of_lost_process(error: RuntimeError) -> bool:
    """Says whether JAX raised an error because another process of the run is gone."""
    return _LOST_PROCESS.search(str(error)) is not None


def _explain(
    error: Exception, outcome: str, memory_advice: str, several_processes: bool
) -> tuple[int, str]:
    """Returns the exit code and a paragraph for an error that a person can act on; "" for any other
    one.
    """
    if isinstance(error, RunError):
        return error.exit_code, str(error)
    if isinstance(error, MemoryError):
        return (
            OUT_OF_MEMORY,
            f"the host has too little memory ({error}). {outcome}. {memory_advice}",
        )
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        what = error.filename or "a file of the workdir"
        return STORAGE, f"{what} could not be written or read: {error.strerror}. {outcome}"
    if isinstance(error, RuntimeError):  # jax.errors.JaxRuntimeError is one
        said = first_line(error)
        if _NO_MEMORY.search(str(error)):
            return (
                OUT_OF_MEMORY,
                f"a device has too little memory ({said}). {outcome}. {memory_advice}",
            )
        if several_processes and is_of_lost_process(error):
            return RESTART, (
                f"another process of the run is gone ({said}), so this one ends; starting all of "
                "them again continues from the newest checkpoint"
            )
    return 1, ""
