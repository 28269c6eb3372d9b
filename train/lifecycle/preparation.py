"""What a run does before its first step: it caches and compiles programs, and agrees with its other
processes.
"""

import contextlib
import gzip
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
from jax.experimental import multihost_utils

from flaxasync import check, mesh
from flaxasync.check import check_async_compatible
from flaxasync.check.progress import progress
from flaxasync.ops import trust
from train.config import Config
from train.lifecycle.errors import InputError
from train.lifecycle.workdir import Workdir
from train.metrics.lines import Events
from train.metrics.output import say, user_cache
from train.step.trainer import Trainer, backend_limits_are_input_errors

CACHE = {
    "jax_compilation_cache_max_size": 8 << 30,
    # programs that compile faster are not worth a file
    "jax_persistent_cache_min_compile_time_secs": 0.5,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_KINDS_OF_MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def configure_cache(config: Config) -> None:
    """Makes JAX keep compiled programs, unless `compile_cache` is none or JAX was told of a folder
    already.
    """
    if config.compile_cache == "none" or jax.config.jax_compilation_cache_dir:
        return
    folder = (
        user_cache() / "programs"
        if config.compile_cache == "auto"
        else Path(config.compile_cache).expanduser()
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_incomplete(folder)
    except OSError:  # a home folder that cannot be written; the run only compiles more often
        return
    for name, value in {"jax_compilation_cache_dir": str(folder.resolve()), **CACHE}.items():
        jax.config.update(name, value)


def _remove_incomplete(folder: Path) -> None:
    """Removes entries that a killed process left half-written: those without a time of use, which
    JAX writes last.
    """
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder / ".lockfile", timeout=10):
        for entry in folder.glob("*-cache"):
            used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
            if not used.exists() or not entry.stat().st_size:
                entry.unlink()


def require_same(values: dict[str, Any]) -> None:
    """Checks that values, which are JSON data, are those of the first process, before one process
    waits for another.
    """
    for name, value in values.items():
        digest = hashlib.blake2b(
            json.dumps(value, sort_keys=True).encode(), digest_size=16
        ).digest()
        try:
            multihost_utils.assert_equal(np.frombuffer(digest, np.uint32))
        except AssertionError as error:
            raise InputError(f"the {name} must be the same in all processes of a run") from error


def agree_on_kernels() -> None:
    """Makes all processes agree which kernels of the TPUs of the enclosing mesh are trusted, by
    what is stored.
    """
    if mesh.platform() != "tpu":
        return
    evidence = trust.known(mesh.chip_name())
    if evidence.rule == "stored" and trust.PASSED not in evidence.verdicts.values():
        # The flags are a part of what a verdict depends on.
        flags = os.environ.get("LIBTPU_INIT_ARGS", "").strip()
        command = trust.COMMAND
        if flags:
            command = f"LIBTPU_INIT_ARGS='{flags}' {command}"
        say(
            f"verify     no kernel has passed on the host of process 0; `{command}` there, before "
            "the run, verifies them; docs/tpu.md says how on a pod"
        )


def compile_steps(
    trainer: Trainer, config: Config, work: Workdir, events: Events
) -> tuple[jax.stages.Compiled, jax.stages.Compiled | None]:
    """Compiles the training step, whose text the workdir gets, and the evaluation step if there
    is one.
    """
    began = time.monotonic()
    with backend_limits_are_input_errors(config):
        with progress("compiling the training step"):
            train_step = trainer.compile_train_step()
        seconds = time.monotonic() - began
        with progress("compiling the validation step"):
            eval_step = trainer.compile_eval_step() if config.eval.every else None
    say(f"compiled   the training step in {seconds:.1f} s")
    for line in describe_dispatch(train_step):
        say(f"dispatch   {line}")
    memory = train_step.memory_analysis()
    sizes = {kind: int(getattr(memory, f"{kind}_size_in_bytes", 0)) for kind in _KINDS_OF_MEMORY}
    events.add("compiled", seconds=round(seconds, 3), memory_bytes=sizes)
    text = train_step.as_text()
    if jax.process_index() == 0 and text:
        try:
            work.program.write_bytes(gzip.compress(text.encode(), mtime=0))
        except OSError:  # a full disk; nothing depends on this file
            with contextlib.suppress(OSError):
                work.program.unlink()
        if lost := lost_overlap(train_step):
            say(f"overlap    lost: {lost}")
    return train_step, eval_step


def lost_overlap(step: jax.stages.Compiled | str) -> str:
    """Says which rings of the compiled step have lost their overlap; "" for none, for a program
    that cannot be read, and on CPUs, whose transfers are all synchronous.
    """
    if jax.default_backend() == "cpu":
        return ""
    with progress("reading the compiled program"):
        try:
            return check.audit(step).lost_overlap
        except ValueError:
            return ""


def describe_dispatch(train_step: jax.stages.Compiled) -> list[str]:
    """Says what in a compiled step makes the host wait or calls it, such as a print, so that
    devices may idle.
    """
    info = check_async_compatible(train_step)
    if info.compatible and not info.has_host_callbacks:
        return []
    finding = {
        True: "the training step calls the host",
        False: "the host waits in every training step",
        None: "it cannot be told whether the host waits in every training step",
    }[info.compatible]
    return [f"{finding}: {'; '.join(info.reasons)}", *(f"do: {remedy}" for remedy in info.remedies)]
