"""The command line of train/run.py: a preset file, options that replace single fields, and what to
do with the run.

The configuration of a run or of an import that is already in a workdir is read here, too. Nothing
here imports JAX, so that a mistake on the command line is reported within a second.
"""

import dataclasses
import json
import os
import re
import runpy
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxasync.foreign_json import JsonError, read_json
from models.foreign_folder import listed
from train.config import Config
from train.config.check import check, expanded
from train.config.types import check_types
from train.lifecycle.errors import InputError, cut, one_line

DEFAULT_PRESET = Path(__file__).resolve().parents[2] / "configs" / "tiny.py"
# the file of a workdir that has the configuration of an import, before there is a run
PRESET = "preset.py"
_PRESET_MODULE = "_preset"  # name under which a preset file is run


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command line."""

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    mesh: Literal["named", "auto"] = "named"
    """auto takes the sizes of the mesh that are predicted to be the fastest of those that fit the
    TPUs of a run or of --topology; a run that continues keeps its mesh. named takes --mesh.data,
    --mesh.fsdp, --mesh.context, --mesh.model.
    """
    resume: str = "latest"
    """What to continue from: latest, the step of a checkpoint, or none; checkpoints that are later
    are set aside.
    """
    print_config: bool = False
    """Print the resolved configuration as JSON, and do nothing else."""
    dry_run: bool = False
    """Compile the training step for --topology and report memory and estimated speed, without
    running it.
    """
    verify: Literal["auto", "off"] = "auto"
    """What is verified before a run on TPUs: the kernels of this configuration, once, or nothing.
    """
    kernels: Literal["play", "estimate"] = "play"
    """Times of kernels in --dry-run: each distinct one is simulated once, or takes what its own
    cost estimate says.
    """
    topology: str | None = None
    """TPU chips that --dry-run compiles for, such as v5e:2x4 or v5p:2x2x2; the machine does not
    need to have them.
    """

    @property
    def resume_step(self) -> int | None:
        """The step of the checkpoint to continue from, 0 to begin anew, or None for the newest
        one.
        """
        if self.resume == "latest":
            return None
        if self.resume == "none":
            return 0
        return int(self.resume)


def parse(arguments: Sequence[str]) -> Command:
    """Parses a command line, `[CONFIG] [--section.field VALUE ...] [--resume STEP] ...`, and checks
    the values.

    An unknown field or a value of the wrong type makes tyro exit the process with code 2, and
    `--help` with code 0.
    """
    preset = DEFAULT_PRESET
    options = list(arguments)
    if options and not options[0].startswith("-"):
        preset = Path(options.pop(0))
    config = load_preset(preset)
    default: object = Command(config)
    if len(options) == 2 and options[0] in ("--help", "-h"):
        default = _section(config, options[1])
        options = ["--help"]
    command = tyro.cli(
        type(default),
        args=options,
        default=default,
        prog="train/run.py [CONFIG]",
        description=(
            "Trains a decoder with tensor parallelism. CONFIG is a preset file and must come "
            f"first. The defaults shown below are those of {preset.name}. --help SECTION shows one "
            "section alone."
        ),
        config=(tyro.conf.FlagCreatePairsOff,),
        use_underscores=True,
    )
    assert isinstance(command, Command)
    sizes = [
        option for option in options if re.match(r"--mesh\.(data|fsdp|context|model)(=|$)", option)
    ]
    if command.mesh == "auto" and sizes:
        raise InputError(
            f"--mesh auto chooses all sizes of the mesh: got {sizes[0]} as well; leave out one of "
            "the two"
        )
    _check_modes(command)
    config = command.config
    check(config)
    # a shell leaves the "~" of --workdir=~/run as it is, and so does a preset
    config = dataclasses.replace(config, workdir=os.path.expanduser(config.workdir))
    return dataclasses.replace(command, config=config)


def parse_as[T](
    kind: type[T], arguments: Sequence[str], *, prog: str, default: Any = tyro.MISSING_NONPROP
) -> T:
    """Parses the command line of a command that reads or writes checkpoints; it exits as that of
    `parse`.
    """
    options = (tyro.conf.FlagConversionOff,)
    return tyro.cli(
        kind, args=list(arguments), prog=prog, default=default, use_underscores=True, config=options
    )


def as_json(config: Config) -> str:
    """Formats a configuration as JSON, one field per line."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def load_preset(path: Path) -> Config:
    """Loads the configuration that the one public function of a Python file returns."""
    if not path.is_file():
        raise InputError(
            f"CONFIG must be a preset file such as configs/tiny.py: there is no file {path}; the "
            f"presets are in {DEFAULT_PRESET.parent}"
        )
    try:
        names = runpy.run_path(str(path), run_name=_PRESET_MODULE).items()
        functions = [
            f for name, f in names if isinstance(f, types.FunctionType) and not name.startswith("_")
        ]
        functions = [function for function in functions if function.__module__ == _PRESET_MODULE]
        config = functions[0]() if len(functions) == 1 else None
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as error:  # whatever the code of the preset raises, such as the SystemExit of sys.exit()
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        where = ""
        if lines:
            where = f", line {lines[-1]}"
        what = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(
            f"CONFIG must be a file that runs to its end: {path}{where}: {what}"
        ) from error
    if not isinstance(config, Config):
        has = listed((function.__name__ for function in functions), ", ") or "none"
        returned = f", which returned {type(config).__name__}" if len(functions) == 1 else ""
        raise InputError(
            f"CONFIG must have one public function, which returns a Config: {path} has "
            f"{has}{returned}"
        )
    check_types(config, where=str(path))
    return config


def load_config(workdir: Path) -> Config:
    """Returns the configuration of the last start of a run, or that of an import that no run has
    continued yet.
    """
    folder = Path(expanded("WORKDIR", str(workdir)))
    file = folder / "config.json"
    if file.is_file():
        try:
            config = _from_json(Config, read_json(file))
        except (JsonError, TypeError) as error:
            raise InputError(
                f"{file} cannot be read ({error}); repair the file, or start the run again"
            ) from error
        check_types(config, where=str(file))
        return config
    if (folder / PRESET).is_file():
        return load_preset(folder / PRESET)
    raise InputError(
        f"WORKDIR must be the folder of a run or of an import: there is no {file} and no {PRESET}"
    )


def is_step(name: str) -> bool:
    """Says whether a text is the number of a step, in the digits 0 to 9 and below 2**31.

    `str.isdigit` is also true for superscripts and for digits of other scripts.
    """
    return re.fullmatch("[0-9]{1,10}", name) is not None and int(name) < 2**31


def _section(config: Config, name: str) -> Any:
    """Returns a dataclass that has one section of a configuration alone, to show its help."""
    sections = [
        field.name for field in dataclasses.fields(config) if dataclasses.is_dataclass(field.type)
    ]
    if name not in sections:
        raise InputError(f"--help takes one of the sections {', '.join(sections)}: got {name}")
    section = getattr(config, name)
    annotated = Annotated[type(section), tyro.conf.FlagConversionOff]
    return dataclasses.make_dataclass("Section", [(name, annotated)], frozen=True)(section)


def _check_modes(command: Command) -> None:
    if command.dry_run != (command.topology is not None):
        only = "--dry-run" if command.dry_run else "--topology"
        raise InputError(
            f"--dry-run and --topology go together: got only {only}; write --dry-run --topology "
            "v5e:2x4"
        )
    if command.resume not in ("latest", "none") and not is_step(command.resume):
        raise InputError(
            "--resume must be latest, none, or the step of a checkpoint: got "
            f"{one_line(command.resume)}"
        )


def _from_json(kind: Any, given: object) -> Any:
    """Makes a dataclass of JSON data. Fields that an older version did not write have their
    defaults.
    """
    if not isinstance(given, dict):
        raise TypeError(f"{kind.__name__} must be an object: got {cut(given)}")
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in given:
            value = given[field.name]
            if dataclasses.is_dataclass(field.type):
                values[field.name] = _from_json(field.type, value)
            else:
                values[field.name] = _as_tuple(value)
    return kind(**values)


def _as_tuple(value: object) -> object:
    if isinstance(value, list):
        return tuple(map(_as_tuple, value))
    return value
