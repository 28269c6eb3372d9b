"""The command line of train/run.py: a preset file, options that replace single fields, and what to do with the run.

Nothing here imports JAX, so that a mistake on the command line is reported within a second.
"""

import dataclasses
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import tyro

from train.config import Config
from train.config.check import check
from train.lifecycle.errors import InputError

DEFAULT_PRESET = Path(__file__).resolve().parents[2] / "configs" / "tiny.py"
_PRESET_MODULE = "_preset"  # name under which a preset file is imported
_TYRO_OPTIONS = (tyro.conf.FlagCreatePairsOff,)


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command line."""

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    resume: str = "latest"
    """What to continue from: latest, the step of a checkpoint, or none; checkpoints that are later are set aside."""
    print_config: bool = False
    """Print the resolved configuration as JSON, and do nothing else."""
    dry_run: bool = False
    """Compile the training step for --topology and report memory and estimated speed, without running it."""
    compare_meshes: bool = False
    """Rank all meshes of --topology by predicted time and memory, compile the best ones, and report a table."""
    compiled_meshes: int = 3
    """Number of meshes that --compare_meshes compiles; 0 compiles none, which takes seconds (meshes)."""
    verify: Literal["auto", "off", "full"] = "auto"
    """What is verified before a run on TPUs: the kernels of this configuration, once (auto), nothing, or every op."""
    trust: Literal["predicted", "verified"] = "predicted"
    """Kernels that --dry-run takes: those predicted to be fastest, or only those that were verified on such a chip."""
    kernels: Literal["play", "estimate"] = "play"
    """Times of kernels in --dry-run: each distinct one is simulated once, or takes what its own cost estimate says."""
    topology: str | None = None
    """TPU chips that --dry-run compiles for, such as v5e:2x4 or v5p:2x2x2; the machine does not need to have them."""

    @property
    def resume_step(self) -> int | None:
        """The step of the checkpoint to continue from, 0 to begin anew, or None for the newest one."""
        if self.resume == "latest":
            return None
        return 0 if self.resume == "none" else int(self.resume)


def parse(arguments: Sequence[str]) -> Command:
    """Parses a command line, `[CONFIG] [--section.field VALUE ...] [--resume STEP] ...`, and checks the values.

    An unknown field or a value of the wrong type makes tyro exit the process with code 2, and `--help` with code 0.

    Raises:
      InputError: The preset is missing or has no configuration, or a value is out of its range.
    """
    preset, options = DEFAULT_PRESET, list(arguments)
    if options and not options[0].startswith("-"):
        preset = Path(options.pop(0))
    config = load_preset(preset)
    _show_help_of_a_section(config, options)
    command = tyro.cli(
        Command,
        args=options,
        default=Command(config),
        prog="train/run.py [CONFIG]",
        description=(
            "Trains a decoder with tensor parallelism. CONFIG is a preset file and must come first. "
            f"The defaults shown below are those of {preset.name}. --help SECTION shows one section alone."
        ),
        config=_TYRO_OPTIONS,
        use_underscores=True,
    )
    if command.dry_run != (command.topology is not None):
        raise InputError(
            f"--dry-run and --topology go together: got only {'--dry-run' if command.dry_run else '--topology'}; "
            "write --dry-run --topology v5e:2x4, for example"
        )
    if command.compare_meshes and not command.dry_run:
        raise InputError("--compare_meshes belongs to a dry run: add --dry-run --topology v5e:4x4, for example")
    if command.compiled_meshes < 0:
        raise InputError(f"--compiled_meshes must be at least 0: got {command.compiled_meshes}")
    if command.resume not in ("latest", "none") and not command.resume.isdigit():
        raise InputError(f"--resume must be latest, none, or the step of a checkpoint: got {command.resume}")
    check(command.config)
    return command


def as_json(config: Config) -> str:
    """Formats a configuration as JSON, one field per line."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def load_preset(path: Path) -> Config:
    """Loads the configuration that the one public function of a Python file returns.

    Raises:
      InputError: There is no such file, it is not Python, it fails, or it has no such function.
    """
    if not path.is_file():
        raise InputError(f"CONFIG must be a preset file such as configs/tiny.py: there is no file {path}")
    try:
        functions = [
            function
            for name, function in inspect.getmembers(_run_file(path), inspect.isfunction)
            if function.__module__ == _PRESET_MODULE and not name.startswith("_")
        ]
        if len(functions) != 1:
            names = ", ".join(function.__name__ for function in functions) or "none"
            raise InputError(f"CONFIG must hold one public function, which returns a Config: {path} has {names}")
        config = functions[0]()
    except InputError:
        raise
    except Exception as error:  # whatever the code of the preset raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise InputError(
            f"CONFIG must be a Python file that runs: {path}{where}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, Config):
        raise InputError(
            f"CONFIG must return a train.config.Config: {functions[0].__name__}() of {path} "
            f"returned {type(config).__name__}"
        )
    return config


def _show_help_of_a_section(config: Config, options: Sequence[str]) -> None:
    """Prints the help of one section and ends the process, if the options are `--help SECTION`."""
    if len(options) != 2 or options[0] not in ("--help", "-h"):
        return
    sections = [field.name for field in dataclasses.fields(config) if dataclasses.is_dataclass(field.type)]
    name = options[1]
    if name not in sections:
        raise InputError(f"--help takes one of the sections {', '.join(sections)}: got {name}")
    section = getattr(config, name)
    alone = dataclasses.make_dataclass("Section", [(name, type(section), section)], frozen=True)
    tyro.cli(
        alone,
        args=["--help"],
        prog="train/run.py [CONFIG]",
        description=type(section).__doc__,
        config=(*_TYRO_OPTIONS, tyro.conf.FlagConversionOff),
        use_underscores=True,
    )


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_PRESET_MODULE, path)
    if spec is None or spec.loader is None:
        raise InputError(f"CONFIG must be a Python file: got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PRESET_MODULE] = module  # `dataclasses` looks up the module of a class that a preset defines
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"CONFIG must be a Python file: {path}, line {error.lineno}: {error.msg}") from error
    return module
