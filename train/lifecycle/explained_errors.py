"""Errors of memory, of disks and of other processes, turned into a RunError that says what helps."""

import contextlib
import errno
import re
from collections.abc import Iterator

from train.lifecycle.errors import OutOfMemoryError, RestartError, RunError, StorageError

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})
_NO_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory")
# What a collective and the coordination service of JAX say where another process is gone.
_LOST_PROCESS = re.compile("Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


@contextlib.contextmanager
def explained_errors(*, memory: str, storage: str) -> Iterator[None]:
    """Turns what a person can act on into a RunError that ends with an advice; any other error keeps its traceback.

    Args:
      memory: The advice where an allocation failed, on a device or on the host.
      storage: The advice where a disk failed.
    """
    try:
        yield
    except RunError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"the host has too little memory ({error}). {memory}") from error
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        what = error.filename or "a file of the workdir"
        raise StorageError(f"{what} could not be written or read: {error.strerror}. {storage}") from error
    except RuntimeError as error:  # jax.errors.JaxRuntimeError is one
        if not _NO_MEMORY.search(str(error)):
            raise
        raise OutOfMemoryError(f"a device has too little memory ({_first_line(error)}). {memory}") from error


@contextlib.contextmanager
def explained_lost_processes() -> Iterator[None]:
    """Turns the error of a collective whose partner is gone into a RestartError, in a run of several processes."""
    try:
        yield
    except RuntimeError as error:
        if not _LOST_PROCESS.search(str(error)):
            raise
        raise RestartError(
            f"another process of the run is gone ({_first_line(error)}), so this one ends; starting all of them again "
            "continues from the newest checkpoint"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
