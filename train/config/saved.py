"""The configuration of a run or of an import that is already in a workdir, read again.

Nothing here imports JAX.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from train.config import Config
from train.config.command import load_preset
from train.lifecycle.errors import InputError

PRESET = "preset.py"
"""The file in which train/import_checkpoint.py writes the configuration, before there is a run."""


def load_config(workdir: Path) -> Config:
    """Returns the configuration of the last start of a run, or that of an import that no run has continued yet.

    Raises:
      InputError: There is neither, or the file cannot be read.
    """
    file = workdir / "config.json"
    if file.is_file():
        try:
            return _read(Config, json.loads(file.read_text()))
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{file} cannot be read ({error}); repair the file, or start the run again") from error
    if (workdir / PRESET).is_file():
        return load_preset(workdir / PRESET)
    raise InputError(f"WORKDIR must be the folder of a run or of an import: there is no {file} and no {PRESET}")


def as_preset(config: Config, name: str) -> str:
    """Returns the text of a preset file in the workdir: the fields that differ from their defaults.

    Paths in the workdir are written relative to the file, so that any working directory and any place of it will do.
    """
    classes = sorted({type(part).__name__ for part in _parts(config)} - {"TransformerConfig"})
    return (
        f'"""The configuration of an imported checkpoint; train/run.py takes this file as its preset."""\n\n'
        f"from pathlib import Path\n\n"
        f"from models.config import TransformerConfig\nfrom train.config import {', '.join(classes)}\n\n"
        f"_HERE = Path(__file__).resolve().parent\n\n\n"
        f"def {name}() -> Config:\n    return {_source(config, '    ', Path(config.workdir))}\n"
    )


def _read(kind: Any, given: dict[str, Any]) -> Any:
    """Makes a dataclass of JSON data. Fields that an older version did not write have their defaults."""
    values = {}
    for field in dataclasses.fields(kind):
        if field.name not in given:
            continue
        value = given[field.name]
        if dataclasses.is_dataclass(field.type):
            value = _read(field.type, value)
        values[field.name] = _as_tuple(value)
    return kind(**values)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _parts(config: Any) -> list[Any]:
    """Returns the configuration and its sections that differ from their defaults."""
    sections = [value for _, value in _changed(config) if dataclasses.is_dataclass(value)]
    return [config, *sections]


def _changed(value: Any) -> list[tuple[str, Any]]:
    """Returns the fields that have no default or another value."""
    changed = []
    for field in dataclasses.fields(value):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if getattr(value, field.name) != default:
            changed.append((field.name, getattr(value, field.name)))
    return changed


def _source(value: Any, indent: str, workdir: Path) -> str:
    if isinstance(value, str) and Path(value).is_relative_to(workdir):
        inside = str(Path(value).relative_to(workdir))
        return "str(_HERE)" if inside == "." else f"str(_HERE / {inside!r})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    inner = indent + "    "
    lines = [f"{inner}{name}={_source(given, inner, workdir)},\n" for name, given in _changed(value)]
    return f"{type(value).__name__}(\n{''.join(lines)}{indent})" if lines else f"{type(value).__name__}()"
