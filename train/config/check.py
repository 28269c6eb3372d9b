"""Checks the range of every value of a configuration, as far as it depends on neither the devices nor the data."""

import dataclasses
import importlib.util
import math

from train.config import Config, flatten
from train.data.remote import is_remote
from train.lifecycle.errors import InputError

LARGEST_STEP = 2**31 - 1
"""Steps are counted in int32 on the devices."""
_AT_LEAST_ONE = (
    "steps", "data.sequence_length", "data.batch_size", "data.microbatches", "checkpoint.every", "checkpoint.keep",
    "eval.batches", "report.every", "mesh.cpu_devices", "model.layers", "model.width", "model.heads", "model.kv_heads",
    "model.mlp_width", "model.vocab_size", "skip.limit", "profile.steps",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "seed", "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.weight_decay", "eval.every",
    "eval.sample_tokens", "skip.spike_factor", "checkpoint.minutes", "checkpoint.permanent_every",
    "checkpoint.retry_seconds", "report.hang_seconds", "profile.start",
)  # fmt: skip
_FRACTIONS = ("data.validation_fraction", "optimizer.b1", "optimizer.b2", "optimizer.ema_decay")
_POSITIVE = (
    "optimizer.epsilon", "eval.temperature", "model.rope_theta", "model.norm_epsilon", "model.rope_factor",
    "model.rope_low_frequency", "model.rope_high_frequency", "model.rope_original_length", "mesh.heartbeat_seconds",
)  # fmt: skip
_POSITIVE_OR_NONE = (
    "model.attention_scale", "model.attention_softcap", "model.alternating_window", "model.logit_softcap",
)  # fmt: skip


def check(config: Config) -> None:
    """Checks the range of every value.

    Raises:
      InputError: A value is out of its range; the message names the field.
    """
    _check_ranges(config)
    _require(bool(config.workdir), "workdir", repr(config.workdir), "a folder")
    _check_locations(config)
    _require(config.seed < 2**31, "seed", config.seed, "below 2**31")
    for name, value in (("steps", config.steps), ("optimizer.warmup_steps", config.optimizer.warmup_steps)):
        _require(value <= LARGEST_STEP, name, value, f"at most {LARGEST_STEP}")
    for name, number in (
        ("optimizer.decay_floor", config.optimizer.decay_floor),
        ("optimizer.decay_fraction", config.optimizer.decay_fraction),
    ):
        _require(0 <= number <= 1, name, number, "0 to 1")
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
    spikes = config.skip.spike_factor
    _require(spikes == 0 or spikes > 1, "skip.spike_factor", spikes, "0, or above 1")
    copies = config.optimizer.master_copies
    _require(
        not copies or config.model.param_dtype == "bfloat16",
        "optimizer.master_copies",
        copies,
        f"False where model.param_dtype={config.model.param_dtype}, which needs no copies in float32",
    )
    for name, given in flatten({"model": dataclasses.asdict(config.model)}):
        if given is not None and name in _POSITIVE_OR_NONE:
            _require_finite(given > 0, name, given, "above 0, or None")
    model = config.model
    _require(
        model.rope_low_frequency < model.rope_high_frequency,
        "model.rope_low_frequency",
        model.rope_low_frequency,
        f"below model.rope_high_frequency={model.rope_high_frequency}",
    )
    _check_names(config)


def _check_ranges(config: Config) -> None:
    values = dict(flatten(dataclasses.asdict(config)))
    for name in _AT_LEAST_ONE:
        _require(values[name] >= 1, name, values[name], "at least 1")
    for name in _AT_LEAST_ZERO:
        _require_finite(values[name] >= 0, name, values[name], "at least 0")
    for name in _FRACTIONS:
        _require(0 <= values[name] < 1, name, values[name], "at least 0 and below 1")
    for name in _POSITIVE:
        _require_finite(values[name] > 0, name, values[name], "above 0")
    _require(config.optimizer.clip_norm > 0, "optimizer.clip_norm", config.optimizer.clip_norm, "above 0")
    peak = config.report.peak_tflops
    _require(peak is None or peak > 0, "report.peak_tflops", peak, "above 0")
    separator, vocabulary = config.data.separator, config.model.vocab_size
    _require(
        separator is None or 0 <= separator < vocabulary,
        "data.separator",
        separator,
        f"a token below model.vocab_size={vocabulary}",
    )
    stops = config.eval.stop_tokens
    _require(
        all(0 <= token < vocabulary for token in stops),
        "eval.stop_tokens",
        stops,
        f"tokens below model.vocab_size={vocabulary}",
    )


def _check_names(config: Config) -> None:
    """Checks the names of data sources and of evaluation sets, which become names of metrics."""
    for field, names in (
        ("data.sources", [name for name, _, _ in config.data.sources]),
        ("eval.sets", [name for name, _ in config.eval.sets]),
    ):
        for name in names:
            _require(name.isidentifier(), field, name, "given names that are letters, digits and underscores")
        _require(len(set(names)) == len(names), field, " ".join(names), "given a different name for each")
    for name, _, weight in config.data.sources:
        _require(weight > 0 and math.isfinite(weight), f"data.sources: the weight of {name}", weight, "above 0")
    if config.data.sources and config.data.path is not None:
        raise InputError("data.path and data.sources both name the data: give one of them")


def _check_locations(config: Config) -> None:
    """Checks that the workdir is no URL, and that checkpoints are in a folder or in a bucket that can be opened."""
    _require(
        not is_remote(config.workdir),
        "workdir",
        config.workdir,
        "a folder of this machine, where any store can be mounted; --checkpoint.folder may be gs://bucket/folder",
    )
    for field, location in (("init_from", config.init_from), ("checkpoint.folder", config.checkpoint.folder)):
        if location is not None and is_remote(location):
            scheme, _, path = location.partition("://")
            is_folder = scheme == "gs" and "/" in path.strip("/")
            _require(
                is_folder,
                field,
                location,
                "a folder of this machine, where any store can be mounted, or gs://bucket/folder",
            )
            if importlib.util.find_spec("gcsfs") is None:
                raise InputError(
                    f"{field}={location} needs the package gcsfs, which is not installed: pip install '.[gs]'"
                )


def _require_finite(holds: bool, name: str, value: float, needed: str) -> None:
    _require(holds and math.isfinite(value), name, value, needed if math.isfinite(value) else f"{needed} and finite")


def _require(holds: bool, name: str, value: object, needed: str) -> None:
    if not holds:
        raise InputError(f"{name} must be {needed}: got {value}")
