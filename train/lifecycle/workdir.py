"""The folder of a run: its paths, and a lock that admits one run at a time."""

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax

from flaxasync.foreign_json import JsonError, read_json
from train.checkpoints.record import differences, flat_fields
from train.config import Config, flatten
from train.config.command import as_json
from train.lifecycle.errors import InputError, StorageError
from train.metrics.output import write_atomically

LOCK_SECONDS = 2.0  # a process that was killed a moment ago may still hold the lock


class Workdir:
    """The folder of a run and the paths in it. docs/train.md says what each file holds."""

    def __init__(self, root: Path):
        self.root = root
        self.config = root / "config.json"
        self.form = root / "form.json"
        self.metrics = root / "metrics.jsonl"
        self.events = root / "events.jsonl"
        self.tensorboard = root / "tensorboard"
        self.plot = root / "loss.png"
        self.program = root / "program.txt.gz"
        self.checkpoints = root / "checkpoints"
        self.set_aside = root / "set_aside"
        self.profile = root / "profile"
        self.stacks = root / "stacks.txt"
        self.lock_file: IO[str] | None = None

    def require_lock(self) -> None:
        """Raises a StorageError if the lock file is no longer the one that this process has
        locked.
        """
        lock = self.lock_file
        with contextlib.suppress(OSError):
            if lock is None or os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno())):
                return
        raise StorageError(
            f"workdir {self.root} or its file .lock was removed or replaced while the run was "
            "going on"
        )

    def check_paths(self) -> None:
        """Checks that what the run will write can be written, because it writes most of it after it
        has compiled.
        """
        files = (
            self.config,
            self.form,
            self.metrics,
            self.events,
            self.plot,
            self.program,
            self.stacks,
        )
        folders = (self.tensorboard, self.checkpoints, self.set_aside, self.profile)
        for path in files:
            if path.exists() and not path.is_file():
                raise InputError(
                    f"workdir must have a file, or nothing, called {path.name}: {path} is "
                    "something else"
                )
        for path in folders:
            if path.exists() and not path.is_dir():
                raise InputError(
                    f"workdir must have a folder, or nothing, called {path.name}: {path} is "
                    "something else"
                )
        for path in (self.metrics, self.events):  # a run appends to them; all others it replaces
            if path.exists() and not os.access(path, os.R_OK | os.W_OK):
                raise InputError(f"workdir must have files that can be written: {path} cannot")

    def changes(self, config: Config) -> list[str]:
        """Says how a configuration differs from that of the last start; checkpoints decide whether
        it may.
        """
        try:
            saved = dict(flatten(read_json(self.config)))
        except (JsonError, AttributeError):
            return []
        unimportant = {"workdir": config.workdir, "data.accept_change": config.data.accept_change}
        now = flat_fields(config)
        known = {name: value for name, value in saved.items() if name in now}
        return differences(known | unimportant, now)

    def begin(self, config: Config) -> None:
        """Writes config.json, and removes what killed processes left."""
        for temporary in self.root.glob(".*.tmp"):
            temporary.unlink(missing_ok=True)
        write_atomically(self.config, as_json(config))


@contextlib.contextmanager
def open_workdir(folder: Path) -> Iterator[Workdir]:
    """Makes the folder of a run and locks it against other runs; of several processes the first one
    holds the lock.
    """
    work = Workdir(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise InputError(
            f"workdir must be a folder that can be written: {folder}: {error.strerror}"
        ) from error
    with lock:
        if jax.process_index() == 0:
            _lock(lock, folder)
            work.lock_file = lock
            work.check_paths()
        yield work


def _lock(lock: IO[str], folder: Path) -> None:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() > until:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise InputError(
                    f"workdir {folder} is in use by another run ({holder}): wait for it to end, or "
                    "choose another --workdir"
                ) from error
            time.sleep(0.05)
        except OSError as error:
            raise InputError(
                f"workdir {folder} is on a file system without locks ({error.strerror}); choose "
                "another --workdir"
            ) from error
    with contextlib.suppress(OSError):  # a full disk does not keep a run from continuing
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
