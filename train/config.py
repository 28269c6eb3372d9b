"""The configuration of a training run: one frozen dataclass per section, read from a preset and the command line.

A preset is a Python file with one public function that returns a `Config`. Options on the command line then replace
single fields. Nothing here touches a device: `check` looks at the values alone. What depends on the mesh or on the data
is checked where those are opened.
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

from models.config import TransformerConfig

DEFAULT_PRESET = Path(__file__).resolve().parent.parent / "configs" / "tiny.py"
_PRESET_MODULE = "_preset"  # name under which a preset file is imported


class InputError(ValueError):
    """A mistake that the person who starts the run can correct; `run.py` prints it and exits with code 2."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices, as a mesh of data x context x model."""

    data: int = -1
    """Size of the mesh axis that splits the batch; -1 takes all devices that the other axes leave (devices)."""
    context: int = 1
    """Size of the mesh axis that splits every sequence, for ring attention (devices)."""
    model: int = 1
    """Size of the mesh axis that splits every layer; -1 takes all devices that the other axes leave (devices)."""
    context_layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Order in which mesh.context splits the positions of a sequence; zigzag gives every device the same work."""
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device to run on; auto leaves the choice to JAX."""
    cpu_devices: int = 8
    """Number of devices that the CPU simulates if mesh.platform is cpu (devices)."""
    distributed: bool = False
    """Whether several processes train together, as on a TPU pod, under SLURM or under Open MPI."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training data, and how it is divided into batches."""

    path: str | None = None
    """A text file, a folder of text files, or a .npy or .bin file of tokens; None takes Python's standard library."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the tokens in a .bin file; a .npy file records its own type."""
    sequence_length: int = 256
    """Length of the sequences that the model is trained on (tokens)."""
    batch_size: int = 16
    """Sequences per step, over all devices (sequences)."""
    validation_fraction: float = 0.05
    """Share of the data, taken from its end, that is kept for validation (fraction of the tokens, 0 to 1)."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay of the learning rate."""

    learning_rate: float = 1e-3
    """Peak of the learning rate, reached at the end of the warm-up (change per update)."""
    warmup_steps: int = 100
    """Length of the warm-up, over which the learning rate rises from 0 to its peak (steps)."""
    decay_floor: float = 0.1
    """Learning rate of the last step, relative to its peak (fraction of optimizer.learning_rate, 0 to 1)."""
    weight_decay: float = 0.1
    """Weight decay of the matmul kernels; nothing else is decayed (fraction per update and unit of learning rate)."""
    b1: float = 0.9
    """Decay of Adam's running mean of the gradients (fraction per step, 0 to 1)."""
    b2: float = 0.95
    """Decay of Adam's running mean of the squared gradients (fraction per step, 0 to 1)."""
    epsilon: float = 1e-8
    """Constant that Adam adds to the root of the mean squared gradient (units of the gradient)."""
    clip_norm: float = 1.0
    """Global norm to which larger gradients are scaled down; inf turns clipping off (units of the gradient)."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and what a run continues from."""

    every: int = 500
    """Interval between checkpoints; the last step is always saved (steps)."""
    keep: int = 3
    """Number of checkpoints to keep; older ones are deleted (checkpoints)."""
    step: int | None = None
    """Step of the checkpoint to continue from, moving later ones to set_aside/; None takes the newest (steps)."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation, and the text that is generated at the end."""

    every: int = 500
    """Interval between validations; 0 turns them off (steps)."""
    batches: int = 8
    """Batches per validation, the same ones each time (batches of data.batch_size sequences)."""
    sample_tokens: int = 128
    """Number of tokens to generate when the run is complete; 0 generates none (tokens)."""
    temperature: float = 0.8
    """Temperature of sampling; below 1 favours likely tokens, above 1 unlikely ones (divisor of the logits)."""


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What is reported during the run."""

    every: int = 10
    """Interval between progress reports; the host waits for the devices only at reports and checkpoints (steps)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run."""

    workdir: str
    """Folder of the run; a run that is started again with the same folder continues."""
    steps: int
    """Length of the whole run (steps, which are optimizer updates)."""
    seed: int = 0
    """Seed of the parameters, the order of the data and the sample (integer, 0 to 2**31 - 1)."""
    backend: Literal["auto", "xla", "pallas", "stateful", "fused", "none"] = "auto"
    """How layers communicate: none or xla anywhere; pallas, stateful or fused on TPUs; auto lets fa.plan choose."""
    mesh: MeshConfig = MeshConfig()
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    report: ReportConfig = ReportConfig()


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command line."""

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    dry_run: bool = False
    """Compile the training step for --topology and report memory and estimated speed, without running it."""
    topology: str | None = None
    """TPU chips that --dry-run compiles for, such as v5e:2x4 or v5p:2x2x2; the machine does not need to have them."""


def parse(arguments: Sequence[str]) -> Command:
    """Parses a command line, `[CONFIG] [--section.field VALUE ...] [--dry-run --topology NAME]`, and checks the values.

    An unknown field or a value of the wrong type makes tyro exit the process with code 2.

    Raises:
      InputError: The preset is missing or has no configuration, or a value is out of its range.
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
            "Trains a decoder with tensor parallelism. CONFIG is a preset file and must come first. "
            f"The defaults shown below are those of {preset.name}."
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
    """Loads the configuration that the one public function of a Python file returns.

    Raises:
      InputError: There is no such file, it is not Python, or it has no such function.
    """
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
    """Checks the range of every value, as far as that does not depend on the devices or the data.

    Raises:
      InputError: A value is out of its range; the message names the field.
    """
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
        _require(value >= 1, name, value, "at least 1")
    for name, number in at_least_zero.items():
        _require(number >= 0 and math.isfinite(number), name, number, "at least 0")
    for name, number in fractions.items():
        _require(0 <= number < 1, name, number, "at least 0 and below 1")
    for name, number in positive.items():
        _require(number > 0, name, number, "above 0")
    _require(config.seed < 2**31, "seed", config.seed, "below 2**31")
    _require(0 <= config.optimizer.decay_floor <= 1, "optimizer.decay_floor", config.optimizer.decay_floor, "0 to 1")
    if config.eval.every:
        fraction = config.data.validation_fraction
        _require(fraction > 0, "data.validation_fraction", fraction, "above 0 where eval.every is not 0")
    length, sample = config.data.sequence_length, config.eval.sample_tokens
    _require(
        sample < length,
        "eval.sample_tokens",
        sample,
        f"below data.sequence_length={length}, to leave a prompt",
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("section.field", value) pairs of a nested dict, as `dataclasses.asdict` or JSON gives it."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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


def _require(holds: bool, name: str, value: object, needed: str) -> None:
    if not holds:
        raise InputError(f"{name} must be {needed}: got {value}")
