"""The file events.jsonl: what happened to a run and when, one line per event; `train/report.py` shows it.

Events are starts, stops, checkpoints, skipped updates, storage errors, profiles and the end of the run. A start has the
command line, the version of the code, the versions of the packages, the host and the devices.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.lifecycle.files import LineFile, read_lines

PACKAGES = ("flaxasync", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "libtpu")
"""The packages that determine what a run computes."""


class Events:
    """Appends events to events.jsonl; `path` is None in the processes of a run that write nothing."""

    def __init__(self, path: Path | None, say: Callable[[str], None] = print):
        self._file = None if path is None else LineFile(path, say)

    def add(self, event: str, **facts: Any) -> None:
        """Appends an event. A disk that does not take it is reported once, and the event waits in memory."""
        if self._file is not None:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            self._file.append([{"event": event, "time": now, "unix": round(time.time(), 3), **facts}])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads all valid events of a file."""
    return [line for line in read_lines(path)[0] if isinstance(line.get("event"), str)]


def provenance() -> dict[str, Any]:
    """Returns the command line, the versions of the code and of the packages, and the host."""
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    return {
        "command": sys.argv,
        "code": code_version(),
        "python": platform.python_version(),
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "host": platform.node(),
        "process": os.getpid(),
    }


def code_version() -> str:
    """Returns the commit of the repository that this file is in, with "+changes" if files differ from it, or ""."""
    try:
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):  # there is no git, or the code is not in a repository
        return ""


def _git(*arguments: str) -> str:
    # Without the option `git status` writes the index of the repository, and leaves its lock there if it is killed.
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
