"""The folder of a run: its paths, a lock that admits one run at a time, and the check that it belongs to this run.

```
config.json      the resolved configuration of the last start
metrics.jsonl    one line per step
tensorboard/     the same metrics as event files
loss.png         plot of the losses
sample.txt       text that was generated at the end
checkpoints/     one folder per checkpoint
set_aside/       later checkpoints, moved here when the run went back to an earlier one
dry_run/         report of the last `--dry-run`, which does not start a run
```
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from train.config import Config, InputError, flatten

_ABSENT = "absent"
# These fields say how the model is computed and not what it is, so a run may continue with other values of them.
_NOT_ARCHITECTURE = frozenset({"model.dtype", "model.remat"})


@dataclasses.dataclass(frozen=True)
class Workdir:
    """The paths in the folder of a run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

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
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def set_aside(self) -> Path:
        return self.root / "set_aside"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and locks it against other runs while the context lasts.

        The operating system releases the lock when the process ends, even if it is killed. If several processes train
        together, the first one holds the lock.

        Raises:
          InputError: The folder cannot be made, or another run uses it.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"workdir must be a folder that can be written: {self.root}: {error.strerror}") from error
        with open(self.root / ".lock", "w") as lock:
            try:
                if jax.process_index() == 0:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"workdir {self.root} is in use by another run: wait for it to end, or choose another --workdir"
                ) from error
            yield

    def changes(self, config: Config) -> list[str]:
        """Compares a configuration with that of the run that is already in this folder, if there is one.

        Returns:
          One line for each field that differs.

        Raises:
          InputError: They differ in the architecture, or in a field that determines the order of the data, to which
            the saved data position refers.
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
        where, now = f"workdir {self.root}", _as_json(config)
        require_same(_pick(saved, _is_architecture), architecture(config), where=where, what="another architecture")
        require_same(_pick(saved, _is_data), _pick(now, _is_data), where=where, what="other data")
        ignored = {"workdir", "checkpoint.step"}  # these do not change what is trained
        return [
            f"{name} was {before} and is {after}"
            for name, before, after in _differences(saved, now)
            if name not in ignored
        ]

    def begin(self, config: Config) -> None:
        """Marks the run as unfinished: writes config.json, and removes the sample, which only a complete run has."""
        write_atomically(self.config, json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        self.sample.unlink(missing_ok=True)


def architecture(config: Config) -> dict[str, Any]:
    """Returns the fields that determine the parameters and what they mean, {"model.layers": 4, ...}."""
    return _pick(_as_json(config), _is_architecture)


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


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file by one rename, so that a killed process leaves either the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _is_architecture(name: str) -> bool:
    return name.startswith("model.") and name not in _NOT_ARCHITECTURE


def _is_data(name: str) -> bool:
    return name == "seed" or name.startswith("data.")


def _as_json(config: Config) -> dict[str, Any]:
    """Returns {"section.field": value} with the types that values have after a round trip through JSON."""
    return dict(flatten(json.loads(json.dumps(dataclasses.asdict(config)))))


def _pick(fields: dict[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if wanted(name)}


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns the name, the saved value and the present value of each field that differs."""
    pairs = [(name, saved.get(name, _ABSENT), now.get(name, _ABSENT)) for name in dict.fromkeys([*now, *saved])]
    return [pair for pair in pairs if pair[1] != pair[2]]
