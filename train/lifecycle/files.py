"""Files that survive a process that is killed and a disk that is full: atomic replacement, and lines of JSON."""

import json
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

BLOCK_BYTES = 1 << 16  # the last line break of a file is searched in blocks of this size, from its end


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
    if not path.exists():
        return [], []
    lines, bad = [], []
    for raw in path.read_bytes().splitlines(keepends=True):
        line = _parse(raw)
        if line is not None:
            lines.append(line)
        elif raw.endswith(b"\n"):
            bad.append(raw)
    return lines, bad


class LineFile:
    """A file that JSON lines are appended to, and that keeps them in memory while the disk does not take them.

    A write that fails is reported once through `on_error`, and again after it has succeeded in between. The lines are
    written at the next call, so none is lost while the process lives. Opening the file removes an incomplete last line,
    which a killed process leaves.
    """

    def __init__(self, path: Path, on_error: Callable[[str], None]):
        self._path, self._on_error = path, on_error
        self._pending: list[str] = []
        self._is_failing = False
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (`close` closes it)
        self._size = _remove_incomplete_line(self._file)  # number of bytes of the complete lines

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Appends lines, and does not raise if the disk does not take them."""
        self._pending += [json.dumps(line, allow_nan=False) + "\n" for line in lines]
        try:
            self._write()
        except OSError as error:
            if not self._is_failing:
                self._on_error(f"{self._path} cannot be written: {error.strerror}; its lines wait in memory")
            self._is_failing = True

    def flush(self) -> None:
        """Waits until all lines are on the disk.

        Raises:
          OSError: The disk does not take them; they are still kept.
        """
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; lines that the disk still does not take are lost."""
        try:
            self._write()
        except OSError as error:
            self._on_error(f"{self._path} lacks its last {len(self._pending)} lines: {error.strerror}")
        self._file.close()

    def _write(self) -> None:
        if not self._pending:
            return
        self._reopen_if_removed()
        content = "".join(self._pending).encode()
        try:
            while content:
                content = content[os.write(self._file.fileno(), content) :]
        except OSError:
            os.truncate(self._file.fileno(), self._size)  # remove what was written of these lines
            raise
        self._size = os.fstat(self._file.fileno()).st_size
        self._pending, self._is_failing = [], False

    def _reopen_if_removed(self) -> None:
        try:
            is_there = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            file = open(self._path, "a+b", buffering=0)  # noqa: SIM115
            self._file.close()
            self._file, self._size = file, _remove_incomplete_line(file)
            self._on_error(f"{self._path} was removed or replaced while the run was writing it; it begins anew")


def _remove_incomplete_line(file: IO[bytes]) -> int:
    """Truncates a file to its last line break, and returns its size."""
    size = end = file.seek(0, os.SEEK_END)
    complete = 0
    while end and not complete:
        start = max(end - BLOCK_BYTES, 0)
        file.seek(start)
        block = file.read(end - start)
        complete = start + block.rfind(b"\n") + 1 if b"\n" in block else 0
        end = start
    if complete < size:
        os.truncate(file.fileno(), complete)
    return complete


def _parse(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
