"""Files that survive a process that is killed and a disk that is full: atomic replacement, and lines of JSON."""

import json
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from train.lifecycle.errors import StorageError


def user_cache() -> Path:
    """Returns the folder flaxasync/ in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "flaxasync"


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


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Reads the JSON objects of a file that has one on each line.

    Returns:
      The objects, and the raw lines that hold none. A last line without a line break, which a killed process leaves, is
      in neither.
    """
    content = path.read_bytes() if path.exists() else b""
    lines, bad = list[dict[str, Any]](), list[bytes]()
    for raw in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        lines.append(line) if isinstance(line, dict) else bad.append(raw)
    return lines, bad


class LineFile:
    """A file that JSON lines are appended to, and that keeps them in memory while the disk does not take them.

    A write that fails is reported once, and again after one has succeeded. Opening the file removes an incomplete last
    line, which a killed process leaves.
    """

    def __init__(self, path: Path, on_error: Callable[[str], None]):
        self._path, self._on_error = path, on_error
        self._pending, self._is_failing = b"", False
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (`close` closes it)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Appends lines, and does not raise if the disk does not take them."""
        self._pending += b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)
        try:
            self._write()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                self._on_error(f"{self._path} cannot be written: {error.strerror}; its lines wait in memory")
            self._is_failing = True

    def flush(self) -> None:
        """Waits until all lines are on the disk.

        Raises:
          StorageError: The disk does not take them; they are still kept.
        """
        try:
            self._write()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"{self._path} could not be written: {error.strerror}") from error

    def close(self) -> None:
        """Closes the file; lines that the disk still does not take are lost."""
        try:
            self._write()
        except OSError as error:
            self._on_error(f"{self._path} lacks its last {self._pending.count(b'\n')} lines: {error.strerror}")
        self._file.close()

    def _write(self) -> None:
        while self._pending:  # a disk that is almost full takes a part of it
            self._pending = self._pending[os.write(self._file.fileno(), self._pending) :]
