"""Trains a decoder with tensor parallelism: `python train/run.py [CONFIG] [--workdir DIR] [--section.field VALUE ...]`.

A run that is started again with the same workdir continues; see docs/train.md. With `--dry-run --topology v5e:2x4` the
script compiles the training step for those chips, which do not need to be there, and reports whether it fits and how
fast it would be. The exit codes are those of train/lifecycle/errors.py, and docs/operations.md says what to do
after each.
"""

import sys
from collections.abc import Sequence

from train.config.command import Command, as_json, parse
from train.lifecycle.errors import COMPLETE, INTERRUPTED, RunError
from train.lifecycle.explained_errors import explained_memory_errors, explained_storage_errors
from train.lifecycle.monitor import Link, supervise
from train.lifecycle.signals import StopRequest

_MEMORY_ADVICE = (
    "No checkpoint was changed. Use a smaller data.batch_size, --model.remat layer, a larger mesh.model or bfloat16 "
    "parameters; --dry-run says beforehand what fits a TPU"
)
_STORAGE_ADVICE = (
    "Nothing that was complete is lost; started again with a disk that works, the run continues from its checkpoint"
)


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    try:
        command = parse(arguments)
        if command.print_config:
            print(as_json(command.config), end="")
            return COMPLETE
        # The command line is checked before JAX is imported, which takes seconds.
        if command.topology is not None and command.compare_meshes:
            from train.dry_run.compare_meshes import compare_meshes

            return compare_meshes(command.config, command.topology, command.trust, command.compiled_meshes)
        if command.topology is not None:
            from train.dry_run.command import dry_run

            return dry_run(command.config, command.topology, command.trust, command.kernels)
        # Several processes share the chips, so none can verify alone what it would use: they agree on what is stored.
        if command.config.mesh.distributed:
            return supervise(lambda link: _train(command, link), command.config.mesh.heartbeat_seconds)
        if command.config.mesh.platform in ("auto", "tpu"):  # the import takes time that other platforms need not spend
            from train.step.verify import verify_first

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
        from train.lifecycle.training import train

        with explained_memory_errors(_MEMORY_ADVICE), explained_storage_errors(_STORAGE_ADVICE):
            return train(command, stop, link)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
