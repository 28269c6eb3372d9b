"""Checks the range of every value of a configuration, as far as it depends on neither the devices nor the data."""

import dataclasses
import importlib.util
import math
import re

from train.config import Config, flatten
from train.lifecycle.errors import InputError

_RANGES = {
    "at least 1": (
        lambda value: value >= 1,
        "steps data.sequence_length data.batch_size data.microbatches checkpoint.every checkpoint.keep eval.batches "
        "report.every mesh.cpu_devices model.layers model.width model.heads model.kv_heads model.mlp_width "
        "model.vocab_size model.experts_per_token skip.limit profile.steps",
    ),
    "at least 0": (
        lambda value: value >= 0,
        "seed optimizer.learning_rate optimizer.warmup_steps optimizer.weight_decay eval.every eval.sample_tokens "
        "model.experts model.shared_expert_width model.load_balance_weight model.router_z_weight "
        "skip.spike_factor checkpoint.minutes checkpoint.permanent_every checkpoint.retry_seconds report.hang_seconds "
        "profile.start",
    ),
    "at least 0 and below 1": (
        lambda value: 0 <= value < 1,
        "data.validation_fraction optimizer.b1 optimizer.b2 optimizer.ema_decay",
    ),
    "0 to 1": (lambda value: 0 <= value <= 1, "optimizer.decay_floor optimizer.decay_fraction"),
    "above 0": (
        lambda value: value > 0,
        "optimizer.epsilon eval.temperature model.rope_theta model.norm_epsilon model.rope_factor "
        "model.rope_low_frequency model.rope_high_frequency model.rope_original_length mesh.heartbeat_seconds",
    ),
    "above 0, or None": (
        lambda value: value is None or value > 0,
        "model.attention_scale model.attention_softcap model.alternating_window model.logit_softcap report.peak_tflops "
        "model.expert_width model.capacity_factor",
    ),
    # The devices count steps in int32.
    "at most 2147483647": (lambda value: value < 2**31, "steps seed optimizer.warmup_steps"),
}
"""What values must be: the test, and the fields that must pass it. All of these must be finite, too."""


def check(config: Config) -> None:
    values = dict(flatten(dataclasses.asdict(config)))
    for needed, (is_right, names) in _RANGES.items():
        for name in names.split():
            value = values[name]
            is_finite = value is None or math.isfinite(value)
            _require(is_finite and is_right(value), name, value, needed + ("" if is_finite else " and finite"))

    optimizer, model, data, spikes = config.optimizer, config.model, config.data, config.skip.spike_factor
    length, vocabulary, high = data.sequence_length, model.vocab_size, model.rope_high_frequency
    copies_are_of_use = not optimizer.master_copies or model.param_dtype == "bfloat16"
    is_validated = data.validation_fraction > 0 or not config.eval.every
    ends_documents = data.separator is None or 0 <= data.separator < vocabulary
    are_tokens = all(0 <= token < vocabulary for token in config.eval.stop_tokens)
    leaves_a_prompt = config.eval.sample_tokens < length
    is_local = config.workdir and "://" not in config.workdir
    flags = config.xla.flags
    are_flags = flags in ("auto", "none") or re.fullmatch(r"\s*((--)?\w+=\S+(\s+|$))+", flags)
    no_copies = f"False where model.param_dtype={model.param_dtype}, which needs no copies in float32"
    for name, holds, needed in (
        ("workdir", is_local, "a folder of this machine, and only --checkpoint.folder may be gs://bucket/folder"),
        ("optimizer.clip_norm", optimizer.clip_norm > 0, "above 0"),
        ("optimizer.master_copies", copies_are_of_use, no_copies),
        ("skip.spike_factor", spikes == 0 or spikes > 1, "0, or above 1"),
        ("model.rope_low_frequency", model.rope_low_frequency < high, f"below model.rope_high_frequency={high}"),
        ("data.validation_fraction", is_validated, "above 0 where eval.every is not 0"),
        ("data.sources", not data.sources or data.path is None, "empty where data.path names the data, too"),
        ("data.separator", ends_documents, f"a token below model.vocab_size={vocabulary}"),
        ("eval.stop_tokens", are_tokens, f"tokens below model.vocab_size={vocabulary}"),
        ("eval.sample_tokens", leaves_a_prompt, f"below data.sequence_length={length}, to leave a prompt"),
        ("xla.flags", are_flags, 'auto, none, or flags of libtpu as "name=value name=value"'),
    ):
        _require(holds, name, values[name], needed)
    _check_locations(config)
    _check_names("data.sources", [name for name, _, _ in data.sources])
    _check_names("eval.sets", [name for name, _ in config.eval.sets])
    for name, _, weight in data.sources:
        _require(0 < weight < math.inf, f"data.sources: the weight of {name}", weight, "above 0")


def _check_locations(config: Config) -> None:
    """Checks that checkpoints are in a folder or in a bucket that can be opened."""
    for name, place in (("init_from", config.init_from), ("checkpoint.folder", config.checkpoint.folder)):
        if place is not None and "://" in place:
            is_folder = place.startswith("gs://") and "/" in place[5:].strip("/")
            _require(is_folder, name, place, "a folder of this machine, or gs://bucket/folder")
            if importlib.util.find_spec("gcsfs") is None:
                raise InputError(f"{name}={place} needs the package gcsfs, which is not installed: pip install '.[gs]'")


def _check_names(field: str, names: list[str]) -> None:
    """Checks the names of data sources or of evaluation sets, which become names of metrics."""
    for name in names:
        _require(name.isidentifier(), field, name, "given names that are letters, digits and underscores")
    _require(len(set(names)) == len(names), field, " ".join(names), "given a different name for each")


def _require(holds: object, name: str, value: object, needed: str) -> None:
    if not holds:
        raise InputError(f"{name} must be {needed}: got {value!r}")
