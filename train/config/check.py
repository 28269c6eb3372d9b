"""Checks the range of every value of a configuration, as far as it depends on neither the devices
nor the data.
"""

import dataclasses
import importlib.util
import math
import os

from models.foreign_folder import listed
from train.config import Config, flatten
from train.lifecycle.errors import InputError, cut

LARGEST_SLICE = 9216
"""Chips of the largest TPU slice there is, Ironwood's. JAX takes about 330 kB of the host for each
simulated device.
"""

_RANGES = {
    "at least 1": (
        lambda value: value >= 1,
        "steps data.sequence_length data.batch_size data.microbatches checkpoint.every "
        "checkpoint.keep eval.batches report.every mesh.cpu_devices model.layers model.width "
        "model.heads model.kv_heads model.mlp_width model.vocab_size model.experts_per_token "
        "skip.limit profile.steps",
    ),
    "at least 0": (
        lambda value: value >= 0,
        "seed optimizer.learning_rate optimizer.warmup_steps optimizer.weight_decay eval.every "
        "model.experts model.shared_expert_width model.load_balance_weight "
        "model.router_z_weight skip.spike_factor checkpoint.permanent_every "
        "checkpoint.retry_seconds report.hang_seconds profile.start",
    ),
    "at least 0 and below 1": (
        lambda value: 0 <= value < 1,
        "data.validation_fraction optimizer.b1 optimizer.b2",
    ),
    "0 to 1": (lambda value: 0 <= value <= 1, "optimizer.decay_floor optimizer.decay_fraction"),
    "above 0": (
        lambda value: value > 0,
        "optimizer.epsilon model.rope_theta model.norm_epsilon model.rope_factor "
        "model.rope_low_frequency model.rope_high_frequency model.rope_original_length "
        "mesh.heartbeat_seconds",
    ),
    "above 0, or None": (
        lambda value: value is None or value > 0,
        "model.attention_scale model.attention_softcap model.alternating_window "
        "model.logit_softcap model.expert_width model.capacity_factor",
    ),
    # The devices count steps in int32.
    "at most 2147483647": (lambda value: value < 2**31, "steps seed optimizer.warmup_steps"),
    "at most 2147483647, as devices count in int32": (
        lambda value: value is None or value < 2**31,
        "data.sequence_length data.batch_size data.microbatches checkpoint.every checkpoint.keep "
        "checkpoint.permanent_every eval.every eval.batches report.every "
        "skip.limit profile.start profile.steps model.layers model.width model.heads "
        "model.kv_heads model.head_dim model.mlp_width model.vocab_size model.experts "
        "model.experts_per_token model.expert_width model.shared_expert_width "
        "model.rope_original_length model.alternating_window model.gathered_mib mesh.data "
        "mesh.fsdp mesh.context mesh.model",
    ),
    f"at most {LARGEST_SLICE}, the chips of the largest TPU slice": (
        lambda value: value <= LARGEST_SLICE,
        "mesh.cpu_devices",
    ),
}
"""What values must be: the test, and the fields that must pass it. All of these must be finite,
too.
"""


def check(config: Config) -> None:
    values = dict(flatten(dataclasses.asdict(config)))
    for needed, (is_right, names) in _RANGES.items():
        for name in names.split():
            value = values[name]
            if isinstance(value, float):
                _require(math.isfinite(value), name, value, f"{needed} and finite")
            _require(is_right(value), name, value, needed)

    for name, value in values.items():
        check_texts(name, value)
    optimizer = config.optimizer
    model = config.model
    data = config.data
    spikes = config.skip.spike_factor
    length = data.sequence_length
    vocabulary = model.vocab_size
    high = model.rope_high_frequency
    copies_are_of_use = not optimizer.master_copies or model.param_dtype == "bfloat16"
    has_validation_data = data.validation_fraction > 0 or not config.eval.every
    separator_fits = data.separator is None or 0 <= data.separator < vocabulary
    stops_fit = all(0 <= token < vocabulary for token in config.eval.stop_tokens)
    is_local = config.workdir and "://" not in config.workdir
    false_needed = (
        f"False where model.param_dtype={model.param_dtype}, which needs no copies in float32"
    )
    for name, holds, needed in (
        (
            "workdir",
            is_local,
            "a folder of this machine, and only --checkpoint.folder may be gs://bucket/folder",
        ),
        ("data.batch_size", data.batch_size < 2**31 / length, _fewer_sequences(length)),
        ("optimizer.clip_norm", optimizer.clip_norm > 0, "above 0"),
        ("optimizer.master_copies", copies_are_of_use, false_needed),
        ("skip.spike_factor", spikes == 0 or spikes > 1, "0, or above 1"),
        (
            "model.rope_low_frequency",
            model.rope_low_frequency < high,
            f"below model.rope_high_frequency={high}",
        ),
        ("data.validation_fraction", has_validation_data, "above 0 where eval.every is not 0"),
        (
            "data.sources",
            not data.sources or data.path is None,
            "empty where data.path names the data, too",
        ),
        ("data.separator", separator_fits, f"a token below model.vocab_size={vocabulary}"),
        ("eval.stop_tokens", stops_fit, f"tokens below model.vocab_size={vocabulary}"),
    ):
        _require(holds, name, values[name], needed)
    _check_locations(config)
    _check_names("data.sources", [name for name, _, _ in data.sources])
    _check_names("eval.sets", [name for name, _ in config.eval.sets])
    for name, _, weight in data.sources:
        field = f"data.sources: the weight of {name}"
        _require(0 < weight < math.inf, field, weight, "above 0 and finite")


def check_texts(name: str, value: object) -> None:
    """Checks that the texts in a value can be written: JSON and checkpoints take names in UTF-8,
    and no zero byte.

    Python makes half of a surrogate pair of each byte of the command line that is no UTF-8.
    """
    if isinstance(value, tuple):
        for element in value:
            check_texts(name, element)
    if isinstance(value, str):
        _require(
            "\0" not in value and is_utf8(value), name, value, "a text in UTF-8 without zero bytes"
        )


def expanded(name: str, place: str) -> str:
    """Returns the path of a file or a folder with the home folder in place of "~". The whole path is
    checked, in which links and the present folder have names, too.
    """
    path = os.path.expanduser(place)
    is_known = not place.startswith("~") or path != place
    _require(
        is_known,
        name,
        place,
        "in the home folder of a user that this machine has, or begin with another letter",
    )
    whole = os.path.realpath(path)
    _require(is_utf8(whole), name, whole, "in a folder whose name is text in UTF-8")
    return path


def is_utf8(text: str) -> bool:
    """Says whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fewer_sequences(length: int) -> str:
    most = (2**31 - 1) // length
    return (
        f"at most {most} where data.sequence_length={length}, as devices count the tokens of a "
        "step in int32"
    )


def _check_locations(config: Config) -> None:
    """Checks that checkpoints are in a folder or in a bucket that can be opened, and that folders
    have such names.
    """
    places = {
        "workdir": config.workdir,
        "checkpoint.folder": config.checkpoint.folder,
        "init_from": config.init_from,
    }
    places |= {"compile_cache": config.compile_cache, "data.path": config.data.path}
    places |= {"data.tokenizer": config.data.tokenizer}
    for name, path, _ in config.data.sources:
        places[f"the path of {name} in data.sources"] = path
    for name, path in config.eval.sets:
        places[f"the path of {name} in eval.sets"] = path
    for name, place in places.items():
        if place == "":  # as a path, this is the present folder
            raise InputError(f"{name} must not be empty: got ''")
        if place is not None and "://" not in place:
            expanded(name, place)
    for name, place in (
        ("init_from", config.init_from),
        ("checkpoint.folder", config.checkpoint.folder),
    ):
        if place is not None and "://" in place:
            is_folder = place.startswith("gs://") and "/" in place[5:].strip("/")
            _require(is_folder, name, place, "a folder of this machine, or gs://bucket/folder")
            if importlib.util.find_spec("gcsfs") is None:
                raise InputError(
                    f"{name}={place} needs the package gcsfs, which is not installed: pip install "
                    "'.[gs]'"
                )


def _check_names(field: str, names: list[str]) -> None:
    """Checks the names of data sources or of evaluation sets, which become names of metrics."""
    for name in names:
        needed = "given names that are letters, digits and underscores, and begin with no digit"
        _require(name.isidentifier(), field, name, needed)
    _require(
        len(set(names)) == len(names), field, listed(names, " "), "given a different name for each"
    )


def _require(holds: object, name: str, value: object, needed: str) -> None:
    if not holds:
        raise InputError(f"{name} must be {needed}: got {cut(value)}")
