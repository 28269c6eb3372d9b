"""Silences what orbax prints about failures, because each of them is raised to the caller and reported there.

When a write or a read fails, orbax logs the traceback of every thread that took part. When one of its concurrent reads
fails, each of the others prints a traceback too, because its event loop is closed, possibly much later.
"""

import logging
import sys
import warnings


def silence() -> None:
    """Silences orbax for the rest of the process."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    if sys.unraisablehook is not _ignore_closed_loops:
        global _hook
        _hook = sys.unraisablehook
        sys.unraisablehook = _ignore_closed_loops


def _ignore_closed_loops(event: "sys.UnraisableHookArgs") -> None:
    if "Event loop is closed" not in str(event.exc_value):
        _hook(event)


_hook = sys.__unraisablehook__
