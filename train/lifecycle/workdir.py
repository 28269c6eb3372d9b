"""The folder of a run: its paths, a lock that admits one run at a time, and the check that it belongs to this run.

```
config.json      the resolved configuration of the last start
metrics.jsonl    one line per step
events.jsonl     starts, stops, checkpoints, skipped updates and errors
tensorboard/     the same metrics as event files
loss.png         plot of the losses
sample.txt       text that was generated at the end
program.txt.gz   the compiled training step
corpus.json      hashes of large data files
checkpoints/     one folder per checkpoint
imported/        parameters of an import, as the checkpoint of step 0; see train/import_checkpoint.py
set_aside/       later checkpoints, moved here when the run went back to an earlier one
profile/         what JAX's profiler recorded
dry_run/         report of the last `--dry-run`, which does not start a run
stacks.txt       the stacks of a process that made no progress
```
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import jax

from models.config import TransformerConfig
from train.config import Config, flatten
from train.lifecycle.errors import InputError, StorageError
from train.lifecycle.files import write_atomically

LOCK_SECONDS = 2.0
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a disk without room, of a used-up quota, and of a file that may not grow."""
_ABSENT = "absent"
# These fields say how the model is computed and not what it is, so a run may continue with other values of them.
_NOT_ARCHITECTURE = frozenset(
    {"model.dtype", "model.remat", "model.fsdp_overlap", "model.gathered_mib", "model.exchange_heads"}
)
# Runs that were started before these options existed lack the fields, and had what is their default.
_ADDED_LATER = {
    f"model.{field.name}": field.default
    for field in dataclasses.fields(TransformerConfig)
    if field.name
    in (
        "head_dim", "activation", "attention_bias", "mlp_bias", "qk_norm", "attention_scale", "attention_softcap",
        "alternating_window", "rope_factor", "rope_low_frequency", "rope_high_frequency", "rope_original_length",
        "norm_plus_one", "post_norms", "scale_embeddings", "logit_softcap",
    )
}  # fmt: skip


class Workdir:
    """The folder of a run and the paths in it."""

    def __init__(self, root: Path):
        self.root = root
        self._lock_file: IO[str] | None = None

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def plot(self) -> Path:
        return self.root / "loss.png"

    @property
    def sample(self) -> Path:
        return self.root / "sample.txt"

    @property
    def program(self) -> Path:
        return self.root / "program.txt.gz"

    @property
    def hashes(self) -> Path:
        return self.root / "corpus.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def set_aside(self) -> Path:
        return self.root / "set_aside"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def stacks(self) -> Path:
        return self.root / "stacks.txt"

    def keep_copy(self, file: Path, folder: Path) -> None:
        """Copies a file into a folder, which is made if need be, under a name that is not used there."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, unused_path(folder / file.name))

    def write_if_there_is_room(self, file: Path, content: bytes) -> None:
        """Writes a file that nothing depends on, unless the disk is full."""
        try:
            file.write_bytes(content)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.unlink()
            if error.errno not in FULL_DISK:
                raise

    def require_lock(self) -> None:
        """Checks that the lock file is still the one that this process has locked.

        Raises:
          StorageError: The folder or its lock file was removed, so another run may be writing there.
        """
        if self._lock_file is None:
            return
        try:
            same = os.path.samestat(os.stat(self.root / ".lock"), os.fstat(self._lock_file.fileno()))
        except OSError:
            same = False
        if not same:
            raise StorageError(
                f"the workdir {self.root} or its file .lock was removed or replaced while the run was going on, so "
                "another run may be there; nothing more is written"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and locks it against other runs while the context lasts.

        The operating system releases the lock when the process ends, even if it is killed. A process that was killed a
        moment ago may still hold it, so it is tried for LOCK_SECONDS. If several processes train together, the first
        one holds the lock.

        Raises:
          InputError: The folder cannot be made or written, or another run uses it.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = open(self.root / ".lock", "a+")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise InputError(f"workdir must be a folder that can be written: {self.root}: {error.strerror}") from error
        with lock:
            if jax.process_index() == 0:
                self._lock(lock)
                self._lock_file = lock
            yield

    def _lock(self, lock: IO[str]) -> None:
        tries = int(LOCK_SECONDS / 0.05)
        for attempt in range(tries + 1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt == tries:
                    lock.seek(0)
                    raise InputError(
                        f"workdir {self.root} is in use by another run ({lock.read().strip() or 'unknown'}): wait for "
                        "it to end, or choose another --workdir"
                    ) from error
                time.sleep(0.05)
            except OSError as error:
                raise InputError(
                    f"workdir {self.root} is on a file system without locks ({error.strerror}), so another run there "
                    "could not be noticed; choose another --workdir"
                ) from error
        with contextlib.suppress(OSError):  # a full disk does not keep a run from continuing
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}")
            lock.flush()

    def require_writable(self) -> None:
        """Checks that files can be made in the folder.

        Raises:
          InputError: They cannot, for another reason than a full disk.
        """
        probe = self.root / f".probe.{os.getpid()}"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise InputError(
                    f"workdir must be a folder that can be written: {self.root}: {error.strerror}"
                ) from error

    def changes(self, config: Config) -> list[str]:
        """Compares a configuration with that of the run that is already in this folder, if there is one.

        Returns:
          One line for each field that differs.

        Raises:
          InputError: They differ in the architecture. Whether the data are the same is decided by the checkpoint, see
            `train.checkpoints.record`.
        """
        if not self.config.exists():
            return []
        try:
            saved = dict(flatten(json.loads(self.config.read_text())))
        except (ValueError, AttributeError) as error:
            raise InputError(
                f"{self.config} cannot be read ({error}), so it is not known which run is there; "
                "repair the file, or choose another --workdir"
            ) from error
        where, now = f"workdir {self.root}", flat_fields(config)
        saved_architecture = pick(saved, _is_architecture)
        if saved_architecture:  # a file without any says nothing
            require_same(saved_architecture, architecture(config), where=where, what="another architecture")
        ignored = {"workdir", "data.accept_change"}  # these do not change what is trained
        return [
            f"{name} was {before} and is {after}"
            for name, before, after in _differences(saved, now)
            if name not in ignored
        ]

    def begin(self, config: Config) -> None:
        """Marks the run as unfinished: writes config.json, and removes the sample, which only a complete run has.

        Temporary files that killed processes left are removed, too; the other processes of this run write none by now.
        """
        for temporary in self.root.glob(".*.tmp"):
            temporary.unlink(missing_ok=True)
        write_atomically(self.config, json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        self.sample.unlink(missing_ok=True)


@contextlib.contextmanager
def open_workdir(folder: Path) -> Iterator[Workdir]:
    """Opens and locks a workdir.

    Raises:
      InputError: It cannot be made or written, or another run uses it.
    """
    work = Workdir(folder)
    with work.locked():
        work.require_writable()
        yield work


def unused_path(path: Path) -> Path:
    """Returns the first of `path`, `path-1`, `path-2`, ... that does not exist."""
    candidate, count = path, 0
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate


def architecture(config: Config) -> dict[str, Any]:
    """Returns the fields that determine the parameters and what they mean, {"model.layers": 4, ...}."""
    return pick(flat_fields(config), _is_architecture)


def require_same(saved: dict[str, Any], now: dict[str, Any], *, where: str, what: str) -> None:
    """Checks that two flat configurations are equal.

    Args:
      saved: The configuration that was saved.
      now: The configuration of this start.
      where: What the saved one belongs to, for the message.
      what: What a difference means, for the message.

    Raises:
      InputError: They differ; the message names each field that does.
    """
    lines = [f"{name} is {before} there and {after} here" for name, before, after in _differences(saved, now)]
    if lines:
        raise InputError(
            f"{where} holds a run with {what}: {'; '.join(lines)}. Give it the values that it was started with, "
            "or choose another --workdir"
        )


def flat_fields(config: Config) -> dict[str, Any]:
    """Returns {"section.field": value} with the types that values have after a round trip through JSON."""
    return dict(flatten(json.loads(json.dumps(dataclasses.asdict(config)))))


def pick(fields: dict[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the fields whose names are wanted."""
    return {name: value for name, value in fields.items() if wanted(name)}


def _is_architecture(name: str) -> bool:
    return (name.startswith("model.") and name not in _NOT_ARCHITECTURE) or name == "optimizer.master_copies"


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns the name, the saved value and the present value of each field that differs."""
    saved = {name: default for name, default in _ADDED_LATER.items() if name in now} | saved
    pairs = [(name, saved.get(name, _ABSENT), now.get(name, _ABSENT)) for name in dict.fromkeys([*now, *saved])]
    return [pair for pair in pairs if pair[1] != pair[2]]
