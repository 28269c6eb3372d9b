"""The files metrics.jsonl and events.jsonl, which have one JSON object on each line whatever
happens to the run.

metrics.jsonl has each step exactly once: a step that is repeated after a restart replaces its line.
A line that is not valid is moved to another file, and never takes other lines with it. events.jsonl
has what happened and when.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flaxasync.foreign_json import JsonError, parse_json
from train.lifecycle.errors import StorageError
from train.metrics.output import warn, write_atomically

# the values of one step by name, as docs/train.md lists them, where not finite is None; or the
# facts of one event
Line = dict[str, Any]
PACKAGES = (
    "flaxasync",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "libtpu",
)


class Sink:
    """A destination of finished lines, such as a file, TensorBoard or a terminal. A sink overrides
    what it needs.
    """

    def write(self, lines: Iterable[Line]) -> None:
        """Takes the lines of a report."""

    def flush(self) -> None:
        """Waits until all lines are on disk, because a checkpoint must not be newer than its
        lines.
        """

    def close(self) -> None:
        """Writes what is left."""


class AppendedFile:
    """A file that keeps in memory what is appended while the disk does not take it, and reports
    that once.
    """

    def __init__(self, path: Path):
        self._path = path
        self._pending = b""
        self._is_failing = False
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (`close` closes it)

    def append(self, content: bytes) -> None:
        """Appends bytes, and does not raise if the disk does not take them."""
        self._pending += content
        try:
            self._write_pending()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                warn(
                    f"{self._path} cannot be written: {error.strerror}; what it lacks waits in "
                    "memory"
                )
            self._is_failing = True

    def flush(self) -> None:
        """Waits until everything is on the disk; if that does not take it, keeps it and raises a
        StorageError.
        """
        try:
            self._write_pending()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"{self._path} could not be written: {error.strerror}") from error

    def close(self) -> None:
        """Closes the file; what the disk still does not take is lost."""
        try:
            self._write_pending()
        except OSError as error:
            warn(f"{self._path} lacks its last {len(self._pending)} bytes: {error.strerror}")
        self._file.close()

    def _write_pending(self) -> None:
        while self._pending:  # a disk that is almost full takes a part of it
            self._pending = self._pending[os.write(self._file.fileno(), self._pending) :]


class LineFile(AppendedFile):
    """A file of JSON lines. Opening it removes an incomplete last line, which a killed process
    leaves.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def write(self, lines: Iterable[Line]) -> None:
        """Appends lines; see `append`."""
        self.append(b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines))


class MetricsFile(LineFile, Sink):
    """The sink that writes metrics.jsonl. Opening it drops the lines after step `start`, which are
    repeated.
    """

    def __init__(self, path: Path, *, start: int):
        kept = repair(path, start=start)
        # that earlier processes spent
        self.seconds = math.fsum(line.get("step_seconds") or 0.0 for line in kept)
        super().__init__(path)


class Events:
    """Appends events to events.jsonl; `path` is None in the processes of a run that write
    nothing.
    """

    def __init__(self, path: Path | None):
        self._file = None if path is None else LineFile(path)

    def add(self, event: str, **facts: object) -> None:
        if self._file is not None:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            self._file.write(
                [{"event": event, "time": now, "unix": round(time.time(), 3), **facts}]
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[Line]:
    """Reads the valid lines of a metrics.jsonl in the order of their steps; the last one of a step
    counts.
    """
    return _by_step(_read_lines(path)[0])


def read_events(path: Path) -> list[Line]:
    """Reads all valid events of a file."""
    return [line for line in _read_lines(path)[0] if isinstance(line.get("event"), str)]


def repair(path: Path, *, start: int) -> list[Line]:
    """Drops the lines of steps later than `start`, moves invalid lines aside, and returns the lines
    that were kept.
    """
    lines, bad = _read_lines(path)
    bad += [
        json.dumps(line).encode() + b"\n" for line in lines if not isinstance(line.get("step"), int)
    ]
    if bad:
        aside = path.with_name(f"{path.stem}.invalid{path.suffix}")
        with open(aside, "ab") as file:
            file.writelines(bad)
        warn(
            f"{path} had {len(bad)} invalid lines, which were moved to {aside}; all others were "
            "kept"
        )
    kept = [line for line in _by_step(lines) if line["step"] <= start]
    if path.exists():
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    if missing := start - len(kept):
        warn(
            f"{path} lacks {missing} of the {start} steps that were done before; they may still be "
            "in tensorboard/"
        )
    return kept


def provenance() -> dict[str, Any]:
    """Returns the command line, the versions of the code and of the packages, and the host."""
    installed = importlib.metadata.distributions()
    return {
        "command": sys.argv,
        "code": code_version(),
        "python": platform.python_version(),
        "packages": {
            package.name: package.version for package in installed if package.name in PACKAGES
        },
        "host": platform.node(),
        "process": os.getpid(),
    }


def code_version() -> str:
    """Returns the commit of the repository that this file is in, with "+changes" if files differ
    from it, or "".
    """
    # With optional locks `git status` would write the index, and leave its lock there if it is
    # killed.
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    command = [*git, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (
        OSError,
        subprocess.SubprocessError,
    ):  # there is no git, or the code is not in a repository
        return ""
    commit, *others = done.stdout.splitlines()
    is_changed = any(not line.startswith("#") for line in others)
    return commit.removeprefix("# branch.oid ") + ("+changes" if is_changed else "")


def _read_lines(path: Path) -> tuple[list[Line], list[bytes]]:
    """Returns the JSON objects of a file and the raw lines that hold none, both without an
    incomplete last line.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = list[Line]()
    bad = list[bytes]()
    for raw in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        try:
            line = parse_json(raw, str(path))
        except JsonError:
            line = None
        lines.append(line) if isinstance(line, dict) else bad.append(raw)
    return lines, bad


def _by_step(lines: list[Line]) -> list[Line]:
    newest = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    return [newest[step] for step in sorted(newest)]
