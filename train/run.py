"""Trains a decoder with tensor parallelism: `python train/run.py [CONFIG] [--workdir DIR] [--section.field VALUE ...]`.

A run that is started again with the same workdir continues; see docs/train.md. With `--dry-run --topology v5e:2x4` the
script compiles the training step for those chips, which do not need to be there, and reports whether it fits and how
fast it would be. The exit codes are those of train/errors.py, and docs/operations.md says what to do after each.
"""

import contextlib
import errno
import sys
from collections.abc import Iterator, Sequence

from train.command import Command, as_json, parse
from train.errors import COMPLETE, INTERRUPTED, OutOfMemoryError, RunError, StorageError
from train.monitor import Link, supervise
from train.signals import StopRequest

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    try:
        command = parse(arguments)
        if command.print_config:
            print(as_json(command.config), end="")
            return COMPLETE
        # The command line is checked before JAX is imported, which takes seconds.
        if command.topology is not None and command.compare_meshes:
            from train.compare_meshes import compare_meshes

            return compare_meshes(command.config, command.topology, command.trust, command.compiled_meshes)
        if command.topology is not None:
            from train.dry_run import dry_run

            return dry_run(command.config, command.topology, command.trust)
        if command.config.mesh.distributed:
            return supervise(lambda link: _train(command, link), command.config.mesh.heartbeat_seconds)
        # Several processes share the chips, so none of them can verify alone what it would use.
        if command.config.mesh.platform in ("auto", "tpu"):  # the import takes time that other platforms need not spend
            from train.verify import verify_first

            verify_first(command.config, command.verify)
        return _train(command, None)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; starting again continues from the last checkpoint, if there is one", file=sys.stderr)
        return INTERRUPTED


def _train(command: Command, link: Link | None) -> int:
    with StopRequest(shared=link is not None) as stop:
        from train.lifecycle import train

        with _explained_memory_errors(), _explained_storage_errors():
            return train(command, stop, link)


@contextlib.contextmanager
def _explained_memory_errors() -> Iterator[None]:
    """Turns a failed allocation, on a device or on the host, into an OutOfMemoryError."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(_advice("the host", str(error))) from error
    except RuntimeError as error:  # jax.errors.JaxRuntimeError is one
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise OutOfMemoryError(_advice("a device", str(error).partition("\n")[0])) from error


@contextlib.contextmanager
def _explained_storage_errors() -> Iterator[None]:
    """Turns the failure of a disk, wherever it is noticed, into a StorageError."""
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise StorageError(
            f"{error.filename or 'a file of the workdir'} could not be written or read: {error.strerror}. Nothing "
            "that was complete is lost; started again with a disk that works, the run continues from its checkpoint"
        ) from error


def _advice(where: str, cause: str) -> str:
    return (
        f"{where} has too little memory ({cause}). No checkpoint was changed. Use a smaller data.batch_size, "
        "--model.remat layer, a larger mesh.model or bfloat16 parameters; --dry-run says beforehand what fits a TPU"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
