"""The working copy of a workdir that is in an object store, and the file in which it notes what the store has."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import orbax.checkpoint as ocp

from train.data.remote import is_remote
from train.lifecycle.files import user_cache, write_atomically

CHECKPOINTS = "checkpoints"
_STATE = ".mirror.json"


def working_copy(location: str) -> Path:
    """Returns the folder in which a run works: its workdir, or a folder of the user's cache if that is in a store."""
    if not is_remote(location):
        return Path(location)
    name = hashlib.blake2b(location.rstrip("/").encode(), digest_size=16).hexdigest()
    return user_cache() / "workdirs" / name


class WorkingCopy:
    """The folder on this machine, and what is known here of the store.

    Attributes:
      folder: The folder, which this process has locked.
      stored: Size and time of modification of each file here that the store has, by name.
      incomplete: The steps whose checkpoints are marked as incomplete in the store.
      owners: One of these starts owns the store, unless a start on another machine does.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.stored: dict[str, list[int]] = {}
        self.incomplete: set[str] = set()
        self.owners: list[str] = []

    def read_state(self) -> None:
        """Reads what an earlier start noted of the store. Nothing is known if there is no note, or a damaged one."""
        self.stored, self.incomplete, self.owners = {}, set(), []
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads((self.folder / _STATE).read_text())
            self.stored, self.incomplete, self.owners = state["files"], set(state["incomplete"]), state["owners"]

    def write_state(self) -> None:
        """Notes what is known of the store for the next start on this machine."""
        state = {"owners": self.owners, "files": self.stored, "incomplete": sorted(self.incomplete)}
        write_atomically(self.folder / _STATE, json.dumps(state))

    def move_aside(self, name: str) -> Path:
        """Moves everything into a new folder beside this one, whose name ends with `name`, and returns that folder."""
        aside = self.folder.with_name(f"{self.folder.name}-{name}")
        aside.mkdir(exist_ok=True)
        for path in self._entries():
            path.rename(aside / path.name)
        return aside

    def clear(self) -> None:
        """Deletes everything."""
        for path in self._entries():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def files(self) -> dict[str, list[int]]:
        """Returns size and time of modification of each file here that belongs into the store, by name."""
        files = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if name.startswith(".") or is_half_written(name):
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    files[name] = stamp(path)
        return files

    def _entries(self) -> list[Path]:
        """Returns what is in the folder but the lock, which this process holds."""
        return [path for path in self.folder.iterdir() if path.name != ".lock"]


def is_half_written(name: str) -> bool:
    """Returns whether a file belongs to a checkpoint that orbax has not finished."""
    return ocp.path.step.TMP_DIR_SUFFIX in name


def step_of(name: str) -> str | None:
    """Returns the step of a file that belongs to a checkpoint, otherwise None."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == CHECKPOINTS and parts[1].isdigit() else None


def steps_of(names: Iterable[str]) -> set[str]:
    """Returns the steps of the checkpoints to which files belong."""
    return {step for name in names if (step := step_of(name)) is not None}


def stamp(path: Path) -> list[int]:
    """Returns the size of a file (bytes) and its time of modification (nanoseconds)."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
