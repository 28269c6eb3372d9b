"""Errors of memory, of disks and of other processes, turned into a RunError that says what helps."""

import contextlib
import errno
import re
from collections.abc import Iterator

from train.lifecycle.errors import OutOfMemoryError, RestartError, RunError, StorageError

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})
# What a collective and the coordination service of JAX say where another process is gone.
_LOST_PROCESS = re.compile("Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


@contextlib.contextmanager
def explained_memory_errors(advice: str) -> Iterator[None]:
    """Turns a failed allocation, on a device or on the host, into an OutOfMemoryError that ends with `advice`."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(f"the host has too little memory ({error}). {advice}") from error
    except RuntimeError as error:  # jax.errors.JaxRuntimeError is one
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise OutOfMemoryError(f"a device has too little memory ({_first_line(error)}). {advice}") from error


@contextlib.contextmanager
def explained_storage_errors(advice: str) -> Iterator[None]:
    """Turns the failure of a disk, wherever it is noticed, into a StorageError that ends with `advice`."""
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise StorageError(
            f"{error.filename or 'a file of the workdir'} could not be written or read: {error.strerror}. {advice}"
        ) from error


@contextlib.contextmanager
def explained_lost_processes() -> Iterator[None]:
    """Turns the failure of a collective whose partner is gone into a RestartError."""
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:
        if not _LOST_PROCESS.search(str(error)):
            raise
        raise RestartError(
            f"another process of the run is gone ({_first_line(error)}), so this one ends; starting all of them again "
            "continues from the newest checkpoint"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
