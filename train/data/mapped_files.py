"""Tokens that are mapped from a file, and the check that this file stays as it was when the run
opened it.

A run certifies in each checkpoint which data it was trained on, by a hash that it computes once.
The file may be written by others while the run reads it. So it is compared before every checkpoint
by what the file system knows:

size, time of the last write     they change with the content; the run then ends, and saves nothing from there on
time of the last status change   it changes as well with the name, the owner or the links, which is harmless, and where
                                 somebody writes and sets the time of the write back; the content is then hashed again

The file is held open, so that another file which takes its name changes nothing: the map is of the
first one.
"""

import concurrent.futures
import dataclasses
import datetime
import hashlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from train.lifecycle.errors import InputError

HASHED_BYTES = 1 << 24  # threads hash chunks of this size


@dataclasses.dataclass(frozen=True)
class FileState:
    """What a file system knows about the content of a file."""

    size: int
    written: int  # nanoseconds since 1970
    changed: int  # the same, of content or status; nobody can set it

    @classmethod
    def of(cls, file: int | Path) -> Self:
        """Returns the state of an open file, or of the file at a path."""
        facts = os.stat(file)
        return cls(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)

    def __str__(self) -> str:
        time = datetime.datetime.fromtimestamp(self.written / 1e9, datetime.UTC)
        return f"{self.size:,} bytes, written on {time:%Y-%m-%d at %H:%M:%S.%f} UTC"


class MappedFile:
    """Tokens [N] that are mapped from a file, which stays open."""

    def __init__(self, path: Path, open_map: Callable[[Path], np.ndarray]):
        """Opens a file, and maps it by `open_map`; the state of the file is that from before
        anything was read.
        """
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._state = FileState.of(self._file)
        self.tokens = open_map(path)
        self.content_hash = hash_all(self.tokens)

    def require_unchanged(self, field: str) -> None:
        """Checks that the tokens are still those of `content_hash`; messages name the `field` that
        names the file.
        """
        try:
            now = FileState.of(self._file)
        except OSError as error:
            raise InputError(
                f"{field}: {self.path} can no longer be read: {error.strerror}; {_ADVICE}"
            ) from error
        if now == self._state:
            return
        found = str(now)
        before = str(self._state)
        is_same_write = (now.size, now.written) == (self._state.size, self._state.written)
        if is_same_write:
            if hash_all(self.tokens) == self.content_hash:
                self._state = now
                return
            found = "other content, and the time of the last write was set back"
            before = f"what is hashed, {before}"
        raise InputError(
            f"{field}: {self.path} must stay as it is while a run reads it: it had {before}, and "
            f"now it has {found}; {_ADVICE}"
        )


_ADVICE = (
    "nothing was saved since, so put the file back as it was and start the run again: it continues "
    "from the newest checkpoint"
)


def hash_all(tokens: np.ndarray) -> str:
    """Hashes the hashes of all chunks, which threads compute side by side."""
    each = HASHED_BYTES // tokens.dtype.itemsize
    chunks = (tokens[start : start + each] for start in range(0, tokens.size, each))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = pool.map(lambda chunk: hashlib.blake2b(chunk.tobytes()).digest(), chunks)
        return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """Hashes the content of a file, which may be empty."""
    is_empty = path.stat().st_size == 0
    return hash_all(np.empty(0, np.uint8) if is_empty else np.memmap(path, np.uint8, "r"))
