"""What a checkpoint stores beside its arrays: where the data stood, of what run it is, and
checksums of everything.

A run that would continue with other data or with another architecture than those of the record is
refused.
"""

import dataclasses
import hashlib
import json
import types
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from models.config import HOW_IT_RUNS
from models.foreign_folder import listed
from train.config import Config, flatten
from train.lifecycle.errors import InputError, cut

# values by name, as they are after a round trip through JSON
type JsonFields = dict[str, Any]

VERSION = 2  # of the format; 1 had neither a checksum nor the identity of the data
_STREAM = frozenset({"seed", "data.sequence_length", "data.validation_fraction", "data.separator"})
# a run may continue with others
_NOT_ARCHITECTURE = frozenset(f"model.{name}" for name in HOW_IT_RUNS)
_OF_OPTIMIZER = frozenset({"optimizer.master_copies", "optimizer.first_moment_dtype"})
# how the parameters and what the optimizer keeps are stored
_TYPES = _OF_OPTIMIZER | {"model.param_dtype"}


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint must agree with so that a run can continue from it."""

    # what determines the stream of sequences: fields of `Config`, and weights of the sources
    stream: JsonFields
    # each data source by its name, see `train.data.corpus.identify`
    corpus: dict[str, JsonFields]
    architecture: JsonFields  # see `architecture`
    # Flags of the compiler, by name. A run may continue with others, which it says, as they can
    # change how it rounds.
    flags: dict[str, str] = dataclasses.field(default_factory=dict, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Record(RunIdentity):
    """The record of a checkpoint, as JSON data."""

    step: int  # number of steps that are done
    data: JsonFields  # position of the training batches, see `TrainingBatches.get_state`
    tokens: int  # number of tokens that were consumed
    parts: list[str]  # the fields of the train state that the checkpoint has
    fingerprint: dict[str, int]  # checksum of each array of the train state, see `fingerprint`
    version: int = VERSION

    def to_json(self) -> JsonFields:
        """Returns the record with a checksum over all of it."""
        fields = dataclasses.asdict(self)
        return fields | {"checksum": _checksum(fields)}

    @classmethod
    def from_json(cls, fields: JsonFields) -> Self:
        """Reads what `to_json` returned, or raises a DamagedError if it is not what was saved."""
        found = fields.get("version", 1)
        if found != VERSION:
            raise InputError(
                f"the checkpoint has version {cut(found)} of the format, and this code reads "
                f"{VERSION}; continue it with the code that wrote it"
            )
        rest = {name: value for name, value in fields.items() if name != "checksum"}
        if fields.get("checksum") != _checksum(rest):
            raise DamagedError("the record is not what was saved")
        try:
            return cls(**rest)
        except TypeError as error:
            raise DamagedError(f"the record has other fields: {error}") from error


class DamagedError(ValueError):
    """A record is not what was saved."""


def fingerprint(state: PyTree) -> dict[str, int]:
    """Computes a checksum of each array, {"params.layers.kernel": checksum, ...}, and waits for the
    devices.

    It is the sum of the elements' bits as unsigned integers, modulo 2**32, which is the same on
    every mesh and detects any single damaged element.
    """
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    return {
        name: int(total)
        for name, total in zip(names, jax.device_get(_sums_of_bits(leaves)), strict=True)
    }


@jax.jit
def _sums_of_bits(leaves: tuple[jax.Array, ...]) -> list[jax.Array]:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = [jax.lax.bitcast_convert_type(leaf, unsigned[leaf.dtype.itemsize]) for leaf in leaves]
    return [jnp.sum(each.astype(jnp.uint32), dtype=jnp.uint32) for each in bits]


def identify_run(
    config: Config,
    corpus: dict[str, JsonFields],
    flags: Mapping[str, str] = types.MappingProxyType({}),
) -> RunIdentity:
    stream = {name: value for name, value in flat_fields(config).items() if name in _STREAM}
    if config.data.sources:
        stream["weights"] = {name: weight for name, _, weight in config.data.sources}
    return RunIdentity(stream, corpus, architecture(config), flags=dict(flags))


def check_identity(
    record: Record, identity: RunIdentity, *, where: str, accept_change: bool
) -> list[str]:
    """Checks that a run can continue from the checkpoint in the folder `where`; returns the
    accepted differences.
    """
    check_architecture(record.architecture, identity.architecture, where=where)
    changed = differences(
        record.stream | _flat(record.corpus), identity.stream | _flat(identity.corpus)
    )
    if changed and not accept_change:
        raise InputError(
            f"the data are not those of {where}: {listed(changed)}. Its position of "
            f"{record.data['sequences']} sequences has no meaning there: give the same data, or "
            "--data.accept_change True to continue with others"
        )
    return changed


def check_parameters(record: Record, config: Config, *, where: str) -> None:
    """Checks that a run can take the parameters of a checkpoint, whose type may be another one."""
    saved = record.architecture
    check_architecture(
        saved, architecture(config) | {name: saved.get(name) for name in _TYPES}, where=where
    )


def check_architecture(saved: JsonFields, now: JsonFields, *, where: str) -> None:
    """Checks that the parameters of a checkpoint are those of this run, and otherwise raises an
    InputError.
    """
    if changed := differences(saved, now):
        what = listed(changed)
        raise InputError(
            f"{where} holds a run with another architecture: {what}; use its values or another "
            "workdir"
        )


def differences(saved: JsonFields, now: JsonFields) -> list[str]:
    """Says how flat fields differ, one phrase for each. A field of `Config` that was not saved had
    its default.
    """
    defaults = flat_fields(Config(workdir="", steps=1))
    found = list[str]()
    for name in dict.fromkeys([*now, *saved]):
        before = saved.get(name, defaults.get(name, "absent"))
        after = now.get(name, "absent")
        if before != after:
            found.append(f"{name} was {before} and is {after}")
    return found


def architecture(config: Config) -> JsonFields:
    """Returns the fields that determine the arrays of a run and what they mean, {"model.layers": 4,
    ...}.
    """
    return {
        name: value
        for name, value in flat_fields(config).items()
        if (name.startswith("model.") and name not in _NOT_ARCHITECTURE) or name in _OF_OPTIMIZER
    }


def flat_fields(config: Config) -> JsonFields:
    """Returns {"section.field": value} with the types that values have after a round trip through
    JSON.
    """
    return dict(flatten(json.loads(json.dumps(dataclasses.asdict(config)))))


def _flat(corpus: dict[str, JsonFields]) -> JsonFields:
    return {
        f"source {name}: {field}": value
        for name, facts in corpus.items()
        for field, value in facts.items()
    }


def _checksum(fields: JsonFields) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()
