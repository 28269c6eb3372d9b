"""The folder of a run: what is where, that one process group uses it at a time, and that it holds *this* run.

```
config.json      the configuration as it was resolved, last time
metrics.jsonl    a line a step
tensorboard/     the same as event files
loss.png         the curves
sample.txt       text generated at the end
checkpoints/     a folder a step
set_aside/       checkpoints that a return to an earlier step moved out of the way
dry_run/         what `--dry-run` found; it begins no run
```
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from train.config import Config, InputError, flatten

_ABSENT = "absent"
# How the model is computed, not what it is: a run may go on with another value.
_NOT_ARCHITECTURE = frozenset({"model.dtype", "model.remat"})


@dataclasses.dataclass(frozen=True)
class Workdir:
    """The paths in a run's folder."""

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
        """Makes the folder and keeps other runs out of it; the lock goes with the process, however that ends.

        Of several processes of a run the first one holds it.
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
        """Returns how `config` differs from the run that is here already, a line a field; [] if there is none.

        Raises:
          InputError: it differs in the architecture, or in what the saved data position refers to.
        """
        if not self.config.exists():
            return []
        try:
            saved = dict(flatten(json.loads(self.config.read_text())))
        except (ValueError, AttributeError) as error:
            raise InputError(
                f"{self.config} cannot be read ({error}), so it is not known which run is there; "
                "mend it, or choose another --workdir"
            ) from error
        where, now = f"workdir {self.root}", _plain(config)
        require_same(_pick(saved, is_architecture), architecture(config), where=where, what="another architecture")
        require_same(_pick(saved, _is_data), _pick(now, _is_data), where=where, what="other data")
        ignored = {"workdir", "checkpoint.step"}
        return [
            f"{name} was {before} and is {after}"
            for name, before, after in _differences(saved, now)
            if name not in ignored
        ]

    def begin(self, config: Config) -> None:
        """Notes that training goes on: writes config.json, and removes the sample, which marks a run that is over."""
        write_atomically(self.config, json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        self.sample.unlink(missing_ok=True)


def architecture(config: Config) -> dict[str, Any]:
    """Returns the fields that say which parameters there are and what they mean: {"model.layers": 4, ...}."""
    return _pick(_plain(config), is_architecture)


def is_architecture(name: str) -> bool:
    """Says whether a run with another value of this field is another model."""
    return name.startswith("model.") and name not in _NOT_ARCHITECTURE


def require_same(saved: dict[str, Any], now: dict[str, Any], *, where: str, what: str) -> None:
    """Raises InputError that names each field in which two flat configurations differ."""
    lines = [f"{name} is {before} there and {after} here" for name, before, after in _differences(saved, now)]
    if lines:
        raise InputError(
            f"{where} holds a run with {what}: {'; '.join(lines)}. Give it the values it was begun with, "
            "or choose another --workdir"
        )


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is either the old one or the new one, whenever the process is killed."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _is_data(name: str) -> bool:
    return name == "seed" or name.startswith("data.")


def _plain(config: Config) -> dict[str, Any]:
    """Returns {"section.field": value} with the types that JSON gives back."""
    return dict(flatten(json.loads(json.dumps(dataclasses.asdict(config)))))


def _pick(fields: dict[str, Any], wanted: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if wanted(name)}


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns (name, value saved, value now) of each field that differs."""
    pairs = [(name, saved.get(name, _ABSENT), now.get(name, _ABSENT)) for name in dict.fromkeys([*now, *saved])]
    return [pair for pair in pairs if pair[1] != pair[2]]
