"""What a checkpoint stores beside its arrays: where the data stood, of what run it is, and checksums of everything.

The record says which stream of sequences its position refers to. A run that would continue with another stream, because
the corpus, the seed or the length of the sequences changed, is refused.
"""

import dataclasses
import hashlib
import json
from typing import Any

from train.config import Config
from train.data.identity import Identity, differences
from train.lifecycle.errors import InputError
from train.lifecycle.workdir import architecture, flat_fields, pick, require_same

VERSION = 2
"""Version of the format; 1 had neither a checksum nor the identity of the data."""
_STREAM = frozenset({"seed", "data.sequence_length", "data.validation_fraction", "data.separator"})


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of a checkpoint, as JSON data.

    Attributes:
      version: Version of the format.
      step: Number of steps that are done.
      data: Position of the training batches.
      tokens: Number of tokens that were consumed.
      stream: The fields of the configuration that determine the stream of sequences, and the weights of the sources.
      corpus: Identity of each data source, by its name.
      architecture: Architecture of the run, {"model.layers": 4, ...}.
      parts: The fields of the train state that the checkpoint has.
      fingerprint: Checksum of each array of the train state, see `train.checkpoints.fingerprint`.
    """

    version: int
    step: int
    data: dict[str, Any]
    tokens: int
    stream: dict[str, Any]
    corpus: dict[str, dict[str, Any]]
    architecture: dict[str, Any]
    parts: list[str]
    fingerprint: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Returns the record with a checksum over all of it."""
        fields = dataclasses.asdict(self)
        return fields | {"checksum": _checksum(fields)}


class DamagedError(ValueError):
    """A record is not what was saved."""


def from_json(fields: dict[str, Any]) -> Record:
    """Reads what `Record.to_json` returned.

    Raises:
      DamagedError: A value is missing or is not what was saved.
      InputError: The record has another version of the format.
    """
    if fields.get("version") != VERSION:
        raise InputError(
            f"the checkpoint has version {fields.get('version', 1)} of the format, and this code reads {VERSION}; "
            "continue it with the code that wrote it, or give it as --init_from of a new run"
        )
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    if fields.get("checksum") != _checksum(rest):
        raise DamagedError("the record is not what was saved")
    return Record(**rest)


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint must agree with so that this run can continue from it.

    Attributes:
      stream: As in `Record`.
      corpus: Identity of each data source, by its name.
      architecture: As in `Record`.
    """

    stream: dict[str, Any]
    corpus: dict[str, Identity]
    architecture: dict[str, Any]

    def make_record(
        self, step: int, data: dict[str, Any], tokens: int, parts: list[str], fingerprint: dict[str, int]
    ) -> Record:
        corpus = {name: dataclasses.asdict(identity) for name, identity in self.corpus.items()}
        return Record(VERSION, step, data, tokens, self.stream, corpus, self.architecture, parts, fingerprint)

    def changes_of_data(self, record: Record) -> list[str]:
        """Says how the stream of sequences differs from that of a record, one phrase per difference."""
        names = dict.fromkeys([*self.stream, *record.stream])
        changed = [
            f"{name} was {record.stream.get(name)} and is {self.stream.get(name)}"
            for name in names
            if record.stream.get(name) != self.stream.get(name)
        ]
        return changed + differences(record.corpus, self.corpus)

    def require_same(self, record: Record, *, where: str, accept_change: bool) -> list[str]:
        """Checks that the run can continue from a checkpoint.

        Args:
          record: The record of the checkpoint.
          where: The folder of the checkpoint, for messages.
          accept_change: Whether other data are accepted.

        Returns:
          The differences of the data that were accepted.

        Raises:
          InputError: The architecture differs, or the data do and that is not accepted.
        """
        require_same(record.architecture, self.architecture, where=where, what="another architecture")
        changed = self.changes_of_data(record)
        if changed and not accept_change:
            raise InputError(
                f"the data are not those of {where}: {'; '.join(changed)}. Its position in the data, "
                f"{record.data['sequences']} sequences, has no meaning there. Give it the same data, or "
                "--data.accept_change True to continue with the other ones"
            )
        return changed


def identify_run(config: Config, corpus: dict[str, Identity]) -> RunIdentity:
    """Collects what a checkpoint must agree with."""
    stream = pick(flat_fields(config), lambda name: name in _STREAM)
    if config.data.sources:
        stream["weights"] = {name: weight for name, _, weight in config.data.sources}
    return RunIdentity(stream, corpus, architecture(config))


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()
