"""The configuration of a training run: one frozen dataclass per section.

Presets return a `Config`, and options on the command line replace single fields of it
(`train.config.command`). The ranges of the values are checked in `train.config.check`. Nothing here
imports JAX.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from models.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices, as a mesh of data x fsdp x context x model. One of the four sizes may be -1: all
    that are left.
    """

    data: int = -1
    """Size of the mesh axis that splits the batch alone; its devices hold the same parameters
    (devices).
    """
    fsdp: int = 1
    """Size of the mesh axis that splits the batch and, until a layer uses them, all parameters
    (devices).
    """
    context: int = 1
    """Size of the mesh axis that splits every sequence, for ring attention (devices)."""
    model: int = 1
    """Size of the mesh axis that splits every layer (devices)."""
    context_layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Order in which mesh.context splits the positions of a sequence; zigzag gives every device the
    same work.
    """
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device to run on; auto leaves the choice to JAX."""
    cpu_devices: int = 8
    """Number of devices that the CPU simulates if mesh.platform is cpu (devices)."""
    distributed: bool = False
    """Whether several processes train together, as on a TPU pod, under SLURM or under Open MPI."""
    heartbeat_seconds: float = 8.0
    """Silence after which another process of the run counts as dead (seconds)."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training data, and how it is divided into batches."""

    path: str | None = None
    """A text file, a folder of text files, or a .npy or .bin file of tokens; None takes Python's
    standard library.
    """
    sources: tuple[tuple[str, str, float], ...] = ()
    """Several named sources instead of data.path, as NAME PATH WEIGHT triples; weights are shares
    of the sequences.
    """
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the tokens in a .bin file; a .npy file records its own type."""
    tokenizer: str | None = None
    """File tokenizer.json that turns text into tokens, or the name of what made the tokens; None
    for bytes.
    """
    separator: int | None = None
    """Token that ends a document; attention and loss then stay within documents. None ignores
    documents (token).
    """
    sequence_length: int = 256
    """Length of the sequences that the model is trained on (tokens)."""
    batch_size: int = 16
    """Sequences per step, over all devices (sequences)."""
    microbatches: int = 1
    """Parts of a batch that are computed one after the other, to save memory; their gradients are
    summed (parts).
    """
    validation_fraction: float = 0.05
    """Share of the data, taken from its end, that is kept for validation (fraction of the tokens, 0
    to 1).
    """
    accept_change: bool = False
    """Whether to continue although the data, the seed or the sequences are not those of the
    checkpoint.
    """


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, the schedule of its learning rate, and the copies of the parameters that it keeps."""

    learning_rate: float = 1e-3
    """Peak of the learning rate, reached at the end of the warm-up (change per update)."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up: a decay to the end, none (constant), or one over the last
    steps only (wsd).
    """
    warmup_steps: int = 100
    """Length of the warm-up, over which the learning rate rises from 0 to its peak (steps)."""
    decay_floor: float = 0.1
    """Learning rate of the last step, relative to its peak (fraction of optimizer.learning_rate, 0
    to 1).
    """
    decay_fraction: float = 0.2
    """Share of the run, at its end, over which the schedule wsd decays (fraction of the steps, 0 to
    1).
    """
    weight_decay: float = 0.1
    """Weight decay of the matmul kernels; nothing else is decayed (fraction per update and unit of
    learning rate).
    """
    b1: float = 0.9
    """Decay of Adam's running mean of the gradients (fraction per step, 0 to 1)."""
    b2: float = 0.95
    """Decay of Adam's running mean of the squared gradients (fraction per step, 0 to 1)."""
    epsilon: float = 1e-8
    """Constant that Adam adds to the root of the mean squared gradient (units of the gradient)."""
    clip_norm: float = 1.0
    """Global norm to which larger gradients are scaled down; inf turns clipping off (units of the
    gradient).
    """
    first_moment_dtype: Literal["float32", "bfloat16"] | None = None
    """Type in which Adam's running mean of the gradients is kept; None for that of the parameters
    that it updates.
    """
    master_copies: bool = False
    """Whether bfloat16 parameters are copies of float32 ones, to which the optimizer applies its
    updates.
    """


@dataclasses.dataclass(frozen=True)
class SkipConfig:
    """Updates that are not applied because their batch is bad; each one is written to events.jsonl."""

    nonfinite: bool = False
    """Whether an update is skipped if its loss or gradient is not finite; otherwise the run stops
    there.
    """
    spike_factor: float = 0.0
    """Multiple of the running mean of the gradient norm above which updates are skipped; 0 skips
    none (factor).
    """
    limit: int = 10
    """Number of skipped updates in a row after which the run stops as diverged (steps)."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, where, and how often."""

    folder: str | None = None
    """Folder of the checkpoints, or a URL such as gs://bucket/run/checkpoints; None is checkpoints/
    in the workdir.
    """
    every: int = 500
    """Interval between checkpoints; the last step is always saved (steps)."""
    keep: int = 3
    """Number of newest checkpoints to keep; older ones are deleted (checkpoints)."""
    permanent_every: int = 0
    """Interval between checkpoints that are never deleted, beside the newest ones; 0 keeps none
    (steps).
    """
    retry_seconds: float = 60.0
    """Time for which a checkpoint that cannot be written is tried again (seconds)."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation, and what ends a text."""

    every: int = 500
    """Interval between validations; 0 turns them off (steps)."""
    batches: int = 8
    """Batches per validation, the same ones each time (batches of data.batch_size sequences)."""
    sets: tuple[tuple[str, str], ...] = ()
    """Further evaluation data, as NAME PATH pairs; each set has a loss and a perplexity of its
    own.
    """
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end a text of train/sample.py, beside data.separator; an import sets them
    (tokens).
    """


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What is reported during the run."""

    every: int = 10
    """Interval between progress reports; the host waits for the devices only there and at
    checkpoints (steps).
    """
    hang_seconds: float = 1800.0
    """Time without any progress after which the process ends, to be started again; 0 waits forever
    (seconds).
    """


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """A window of steps that JAX's profiler records, in the folder profile/ of the workdir."""

    start: int = 0
    """First step of the window; 0 records none (steps)."""
    steps: int = 3
    """Length of the window (steps)."""


@dataclasses.dataclass(frozen=True)
class XlaConfig:
    """How the TPU compiler is told to compile the run."""

    flags: Literal["auto", "none"] = "auto"
    """Whether the flags of libtpu that are predicted to help on the chip are set before JAX starts.
    Those in LIBTPU_INIT_ARGS stay as they are.
    """


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
    """How layers communicate: none or xla anywhere; pallas, stateful or fused on TPUs; auto lets
    fa.plan choose.
    """
    init_from: str | None = None
    """Workdir or checkpoint of another run, whose parameters step 0 of this run takes; None draws
    new ones.
    """
    compile_cache: str = "auto"
    """Folder of compiled programs; auto is flaxasync/ in the user's cache folder, none compiles at
    every start.
    """
    mesh: MeshConfig = MeshConfig()
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    skip: SkipConfig = SkipConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    report: ReportConfig = ReportConfig()
    profile: ProfileConfig = ProfileConfig()
    xla: XlaConfig = XlaConfig()


def replace_options(config: Config, options: Mapping[str, object]) -> Config:
    """Returns a configuration with the fields in `options`, such as {"data.batch_size": 8},
    replaced.
    """
    for name, value in options.items():
        section, field = name.split(".")
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("section.field", value) pairs of a nested dict, as `dataclasses.asdict` or JSON gives
    it.
    """
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
