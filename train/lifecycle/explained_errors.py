"""Errors of memory and of disks, turned into a `train.lifecycle.errors.RunError` that says what helps."""

import contextlib
import errno
from collections.abc import Iterator

from train.lifecycle.errors import OutOfMemoryError, RunError, StorageError

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})


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
        cause = str(error).partition("\n")[0]
        raise OutOfMemoryError(f"a device has too little memory ({cause}). {advice}") from error


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
