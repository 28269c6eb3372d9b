"""Trains a decoder with tensor parallelism: `python train/run.py [CONFIG] [--workdir DIR] [--section.field VALUE ...]`.

A run that is started again with the same workdir continues; see docs/train.md. With `--dry-run --topology v5e:2x4` the
script compiles the training step for those chips, which do not need to be there, and reports whether it fits and how
fast it would be. The exit codes are those of train/lifecycle/errors.py, and docs/operations.md says what to do
after each.
"""

import os
import signal
import sys
import traceback
from collections.abc import Sequence

from train.config.command import Command, as_json, parse
from train.lifecycle.errors import COMPLETE, INTERRUPTED, RunError
from train.lifecycle.explained_errors import explained_errors, explained_lost_processes
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
            return _train_with_others(command)
        if command.config.mesh.platform in ("auto", "tpu"):  # the import takes time that other platforms need not spend
            from train.step.verify import verify_first

            verify_first(command.config, command.verify)
        return _train(command)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; starting again continues from the last checkpoint, if there is one", file=sys.stderr)
        return INTERRUPTED


def _train(command: Command) -> int:
    with StopRequest(shared=command.config.mesh.distributed) as stop:
        from train.lifecycle.training import train

        with explained_errors(memory=_MEMORY_ADVICE, storage=_STORAGE_ADVICE):
            return train(command, stop)


def _train_with_others(command: Command) -> int:
    """Trains as one of several processes; an error ends this process without waiting for the others, as JAX would."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not see Ctrl-C while JAX waits for the others
        from train.step.mesh import configure_jax

        configure_jax(command.config.mesh)
        with explained_lost_processes():
            return _train(command)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
