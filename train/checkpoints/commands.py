"""What the commands that read or write checkpoints share: the parser of their options, and their exit codes.

They are train/import_checkpoint.py, train/export_checkpoint.py and train/sample.py. The exit codes are those of
train/lifecycle/errors.py.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from train.lifecycle.errors import COMPLETE, INTERRUPTED, RunError
from train.lifecycle.explained_errors import explained_errors


def parse[T](kind: type[T], arguments: Sequence[str], *, prog: str, default: Any = tyro.MISSING_NONPROP) -> T:
    """Parses a command line; an option that is not understood ends the process with code 2, and `--help` with 0."""
    return tyro.cli(
        kind, args=list(arguments), prog=prog, default=default, use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )  # fmt: skip


def exit_code(action: Callable[[], None], *, outcome: str, memory_advice: str, reader_may_leave: bool = False) -> int:
    """Runs a command and returns its exit code; an error that a person can act on is one line on standard error.

    Args:
      action: The command.
      outcome: What a command that did not finish has done, as a sentence without a period: "Nothing was imported".
      memory_advice: What needs less memory, as a sentence without a period.
      reader_may_leave: Whether the command does nothing but print, so that it is complete once nobody reads its output.
        A command that writes files must go on without a reader: it prints by `train.metrics.output.print_line`.
    """
    try:
        with explained_errors(memory=f"{outcome}. {memory_advice}", storage=outcome):
            action()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\nerror: interrupted. {outcome}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not reader_may_leave:
            raise
        # Whoever read the output, such as `head`, has enough of it. Python would complain again when it flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return COMPLETE
