"""The configuration of a run or of an import that is already in a workdir, read again.

Nothing here imports JAX.
"""

import dataclasses
import json
import pprint
import textwrap
from pathlib import Path
from typing import Any

from train.config import Config
from train.config.command import load_preset
from train.lifecycle.errors import InputError

PRESET = "preset.py"
"""The file in which train/import_checkpoint.py writes the configuration, before there is a run."""
_HERE = "@here@"  # stands for the folder of the preset file
_TEMPLATE = '''"""The configuration of an imported checkpoint; train/run.py takes this file as its preset."""

from math import inf
from pathlib import Path

from models.config import TransformerConfig
from train.config import *

_HERE = str(Path(__file__).resolve().parent)


def imported():
    return '''


def load_config(workdir: Path) -> Config:
    """Returns the configuration of the last start of a run, or that of an import that no run has continued yet."""
    file = workdir / "config.json"
    if file.is_file():
        try:
            return _read(Config, json.loads(file.read_text()))
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{file} cannot be read ({error}); repair the file, or start the run again") from error
    if (workdir / PRESET).is_file():
        return load_preset(workdir / PRESET)
    raise InputError(f"WORKDIR must be the folder of a run or of an import: there is no {file} and no {PRESET}")


def as_preset(config: Config) -> str:
    """Returns the text of a preset file for a workdir, where paths into the workdir are relative to the file."""
    here = Path(config.workdir)

    def relative(value: Any) -> Any:
        inside = isinstance(value, str) and Path(value).is_relative_to(here)
        return f"{_HERE}/{Path(value).relative_to(here)}" if inside else value

    data = dataclasses.replace(config.data, tokenizer=relative(config.data.tokenizer))
    moved = dataclasses.replace(config, workdir=_HERE, init_from=relative(config.init_from), data=data)
    source = textwrap.indent(pprint.pformat(moved, width=110), " " * 11).lstrip()
    return _TEMPLATE + source.replace(f"'{_HERE}", "_HERE + '") + "\n"


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
