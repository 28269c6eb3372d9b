"""Trains a decoder with tensor parallelism: `python train/run.py [CONFIG] [--workdir DIR]
[--section.field VALUE ...]`.

A run that is started again with the same workdir continues. docs/train.md explains the options, and
docs/operations.md the exit codes.
"""

import dataclasses
import functools
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# `models`, `configs` and `train` are beside the folder of this script, installed or not
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.config import Config
from train.config.command import Command, as_json, parse
from train.lifecycle.errors import COMPLETE, exit_code
from train.lifecycle.stopping import StopRequest
from train.metrics.output import print_line, say
from train.step.flags import set_flags

_exit_code = functools.partial(
    exit_code,
    outcome="Nothing that was complete is lost: started again, the run continues from its newest "
    "checkpoint",
    memory_advice=(
        "Use a smaller data.batch_size, --model.remat layer, a larger mesh.model or bfloat16 "
        "parameters; --dry-run says beforehand what fits a TPU"
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    return _exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    command = parse(arguments)
    if command.print_config:
        print(as_json(command.config), end="")
        return COMPLETE
    # The command line is checked before JAX is imported, which takes seconds.
    if command.mesh == "auto":
        command = dataclasses.replace(command, config=_with_best_mesh(command))
    if command.topology is not None:
        from train.dry_run.command import dry_run

        return dry_run(command.config, command.topology, command.kernels)
    flags = set_flags(command.config)
    # Several processes share the chips, so none can verify alone what it would use: they agree on
    # what is stored.
    if command.config.mesh.distributed:
        _train_with_others(command, flags)
    if flags:
        print_line(flags)
    # the import takes time that other platforms need not spend
    if command.config.mesh.platform in ("auto", "tpu"):
        from train.step.verify import verify_first

        verify_first(command.config, command.verify)
    return _train(command)


def _with_best_mesh(command: Command) -> Config:
    from train.dry_run.auto_mesh import mesh_of_run, mesh_of_topology

    if command.topology is not None:
        return mesh_of_topology(command.config, command.topology)
    # What passes in the verification that follows will be trusted.
    return mesh_of_run(command.config, "verified" if command.verify == "off" else "predicted")


def _train(command: Command) -> int:
    with StopRequest(shared=command.config.mesh.distributed) as stop:
        from train.lifecycle.training import train

        return train(command, stop)


def _train_with_others(command: Command, flags: str) -> NoReturn:
    """Trains as one of several processes; an error ends this process without waiting for the
    others, as JAX would.
    """

    def join_and_train() -> int:
        # Python would not see Ctrl-C while JAX waits for the others
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from train.step.mesh import configure_jax

        configure_jax(command.config.mesh)
        if flags:
            say(flags)
        return _train(command)

    code = 1
    try:
        code = _exit_code(join_and_train, several_processes=True)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
