"""What a training run is made of: one frozen dataclass a section, from a preset file and the command line.

A preset is a Python file with one public function that returns a `Config`. Options on the command line then replace
single fields. Nothing here touches a device: `check` looks at the values alone, and what depends on the mesh or on
the data is checked where those are opened.
"""

import dataclasses
import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import tyro

from models.transformer import TransformerConfig

DEFAULT_PRESET = Path(__file__).resolve().parent.parent / "configs" / "tiny.py"


class InputError(ValueError):
    """A mistake that the person who starts the run can mend; `run.py` prints it and exits with code 2."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices, as a grid of data x context x model."""

    data: int = -1
    """Devices the batch is split over; -1 takes what the other two leave (devices)."""
    context: int = 1
    """Devices every sequence is split over, by ring attention (devices)."""
    model: int = 1
    """Devices every layer is split over; -1 takes what the other two leave (devices)."""
    context_layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Which positions a device of mesh.context holds; zigzag gives all of them the same work."""
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device; auto leaves the choice to JAX."""
    cpu_devices: int = 8
    """Devices the CPU is divided into, when mesh.platform is cpu (devices)."""
    distributed: bool = False
    """Several processes train together: join them before the first device is touched (TPU pods, SLURM, Open MPI)."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, and how it is cut into batches."""

    path: str | None = None
    """A text file, a folder of text files, or tokens in a .npy or .bin file; None takes Python's standard library."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the tokens in a .bin file; a .npy file says so itself."""
    sequence_length: int = 256
    """Tokens the model sees at once (tokens)."""
    batch_size: int = 16
    """Sequences in a step, over all devices (sequences)."""
    validation_fraction: float = 0.05
    """Part of the data, from its end, that is kept for validation (fraction of the tokens, 0 to 1)."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, with a linear warm-up and a cosine decay."""

    learning_rate: float = 1e-3
    """Highest learning rate, reached after the warm-up (change per update)."""
    warmup_steps: int = 100
    """Updates over which the learning rate rises from 0 (steps)."""
    decay_floor: float = 0.1
    """Learning rate of the last step (fraction of optimizer.learning_rate, 0 to 1)."""
    weight_decay: float = 0.1
    """Pull of the matrices to 0; norms, biases and embeddings have none (fraction per unit of learning rate)."""
    b1: float = 0.9
    """Decay of the mean of the gradients (fraction per step, 0 to 1)."""
    b2: float = 0.95
    """Decay of the mean of their squares (fraction per step, 0 to 1)."""
    epsilon: float = 1e-8
    """Added to the root of the mean square (units of the gradient)."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this norm; inf never does (units of the gradient)."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and which of it a run continues from."""

    every: int = 500
    """Steps between checkpoints; the last step is always saved (steps)."""
    keep: int = 3
    """Newest checkpoints that are kept (checkpoints)."""
    step: int | None = None
    """Go back to the checkpoint of this step and set newer ones aside; None takes the newest (steps)."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation, and the sample at the end."""

    every: int = 500
    """Steps between validations; 0 never validates (steps)."""
    batches: int = 8
    """Batches in a validation, the same ones each time (batches of data.batch_size sequences)."""
    sample_tokens: int = 128
    """Tokens generated at the end; 0 generates none (tokens)."""
    temperature: float = 0.8
    """Spread of the generated tokens: below 1 likelier ones, above 1 wilder ones (ratio)."""


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What is shown while the run goes on."""

    every: int = 10
    """Steps between progress reports. Between them the host never waits for the devices (steps)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run."""

    workdir: str
    """Folder of the run, made if missing. A run that is started again with the same folder continues."""
    steps: int
    """Optimizer updates in the whole run (steps)."""
    seed: int = 0
    """Seeds the parameters, the order of the data and the sample (whole number, 0 to 2**31 - 1)."""
    backend: Literal["auto", "xla", "pallas", "stateful", "fused", "none"] = "auto"
    """How layers move blocks: xla anywhere; pallas, stateful, fused on TPUs; none gathers first; auto: by fa.plan."""
    mesh: MeshConfig = MeshConfig()
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    report: ReportConfig = ReportConfig()


@dataclasses.dataclass(frozen=True)
class Command:
    """What a command line asks for."""

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    dry_run: bool = False
    """Compile the training step for --topology and report whether it fits and how fast it would be; run nothing."""
    topology: str | None = None
    """Of a dry run: TPU chips to compile for, like v5e:2x4 or v5p:2x2x2; none of them has to be there."""


def parse(arguments: Sequence[str]) -> Command:
    """Reads a command line, `[CONFIG] [--section.field VALUE ...] [--dry-run --topology NAME]`, and checks the values.

    Exits with code 2 (through tyro) on an unknown field or a value of the wrong type.

    Raises:
      InputError: the preset is missing or holds no configuration, or a value is out of its range.
    """
    preset, options = DEFAULT_PRESET, list(arguments)
    if options and not options[0].startswith("-"):
        preset = Path(options.pop(0))
    command = tyro.cli(
        Command,
        args=options,
        default=Command(load_preset(preset)),
        prog="train/run.py [CONFIG]",
        description=(
            f"Trains a decoder tensor-parallel. CONFIG, which comes first, is a preset file; here it is {preset.name}, "
            "whose values are shown below as the defaults."
        ),
        config=(tyro.conf.FlagCreatePairsOff,),
        use_underscores=True,
    )
    if command.dry_run != (command.topology is not None):
        raise InputError(
            f"--dry-run and --topology go together: got only {'--dry-run' if command.dry_run else '--topology'}; "
            "write --dry-run --topology v5e:2x4, for example"
        )
    check(command.config)
    return command


def load_preset(path: Path) -> Config:
    """Returns what the one public function of the Python file at `path` returns."""
    if not path.is_file():
        raise InputError(f"CONFIG must be a preset file such as configs/tiny.py: there is no file {path}")
    functions = [
        function
        for name, function in inspect.getmembers(_run_file(path), inspect.isfunction)
        if function.__module__ == _PRESET_MODULE and not name.startswith("_")
    ]
    if len(functions) != 1:
        names = ", ".join(function.__name__ for function in functions) or "none"
        raise InputError(f"CONFIG must hold one public function, which returns a Config: {path} has {names}")
    config = functions[0]()
    if not isinstance(config, Config):
        raise InputError(
            f"CONFIG must return a train.config.Config: {functions[0].__name__}() of {path} "
            f"returned {type(config).__name__}"
        )
    return config


def check(config: Config) -> None:
    """Raises InputError when a value is out of its range, whatever the devices and the data."""
    at_least_one = {
        "steps": config.steps,
        "data.sequence_length": config.data.sequence_length,
        "data.batch_size": config.data.batch_size,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        "eval.batches": config.eval.batches,
        "report.every": config.report.every,
        "mesh.cpu_devices": config.mesh.cpu_devices,
        "model.layers": config.model.layers,
        "model.width": config.model.width,
        "model.heads": config.model.heads,
        "model.kv_heads": config.model.kv_heads,
        "model.mlp_width": config.model.mlp_width,
        "model.vocab_size": config.model.vocab_size,
    }
    at_least_zero = {
        "seed": config.seed,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "optimizer.warmup_steps": config.optimizer.warmup_steps,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "eval.every": config.eval.every,
        "eval.sample_tokens": config.eval.sample_tokens,
    }
    fractions = {
        "data.validation_fraction": config.data.validation_fraction,
        "optimizer.b1": config.optimizer.b1,
        "optimizer.b2": config.optimizer.b2,
    }
    positive = {
        "optimizer.epsilon": config.optimizer.epsilon,
        "optimizer.clip_norm": config.optimizer.clip_norm,
        "eval.temperature": config.eval.temperature,
    }
    for name, value in at_least_one.items():
        _need(value >= 1, name, value, "at least 1")
    for name, number in at_least_zero.items():
        _need(number >= 0 and math.isfinite(number), name, number, "at least 0")
    for name, number in fractions.items():
        _need(0 <= number < 1, name, number, "at least 0 and below 1")
    for name, number in positive.items():
        _need(number > 0, name, number, "above 0")
    _need(config.seed < 2**31, "seed", config.seed, "below 2**31")
    _need(0 <= config.optimizer.decay_floor <= 1, "optimizer.decay_floor", config.optimizer.decay_floor, "0 to 1")
    if config.eval.every:
        fraction = config.data.validation_fraction
        _need(fraction > 0, "data.validation_fraction", fraction, "above 0 where eval.every is not 0")
    length, sample = config.data.sequence_length, config.eval.sample_tokens
    _need(sample < length, "eval.sample_tokens", sample, f"below data.sequence_length={length}: a prompt comes first")


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("section.field", value) of a configuration that `dataclasses.asdict` or JSON made."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_PRESET_MODULE = "_preset"


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_PRESET_MODULE, path)
    if spec is None or spec.loader is None:
        raise InputError(f"CONFIG must be a Python file: got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PRESET_MODULE] = module  # dataclasses that a preset defines look their module up here
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"CONFIG must be a Python file: {path}, line {error.lineno}: {error.msg}") from error
    return module


def _need(holds: bool, name: str, value: object, needed: str) -> None:
    if not holds:
        raise InputError(f"{name} must be {needed}: got {value}")
