"""The files that an export has beside the tensors: those that an import kept, and the tokenizer of
the run.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.families import FAMILIES
from models.family_defaults import ConfigJson
from train.config import Config
from train.data.end_tokens import read_object

KEPT = "hugging_face"
"""The folder of a workdir in which an import keeps files for export."""
_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True)
class ExportedFiles:
    """What an export has beside the tensors.

    Attributes:
      config: The config.json that was imported, and the tokens that end a text; {} where there is
        nothing to say.
      copied: Files that are copied, by their names in the export.
      written: Files of JSON, by their names in the export.
      tokenizer: A sentence about the tokenizer.
    """

    config: ConfigJson
    copied: Mapping[str, Path]
    written: Mapping[str, object]
    tokenizer: str

    @property
    def length(self) -> int:
        """The longest sequence that the imported model is meant for, 0 without an import
        (tokens).
        """
        length = self.config.get("max_position_embeddings")
        family = FAMILIES.get(str(self.config.get("model_type")))
        if length is None and family is not None:
            length = family.defaults["max_position_embeddings"]
        if type(length) is not int:
            return 0
        return length


def exported_files(workdir: Path, config: Config) -> ExportedFiles:
    """Finds the files of a run that belong into an export, before anything is written."""
    kept = {
        file.relative_to(workdir / KEPT).as_posix(): file
        for file in sorted((workdir / KEPT).rglob("*"))
        if file.is_file()
    }
    kept.pop("config.json", None)
    before = read_object(workdir / KEPT, "config.json")
    of_the_import = ExportedFiles(before, kept, {}, "that of the import")
    named = config.data.tokenizer or "bytes"
    file = Path(named).expanduser()
    if not named.endswith(".json") or not file.is_file():
        missing = f"the run has {named}"
        if named.endswith(".json"):
            missing = f"there is no {file}"
        if _TOKENIZER in kept:
            return of_the_import
        return ExportedFiles(before, kept, {}, f"none: {missing}")
    if _TOKENIZER in kept and kept[_TOKENIZER].read_bytes() == file.read_bytes():
        return of_the_import
    # all that is said of the tokens of the import does not hold for those of the run
    if _TOKENIZER in kept:
        kept = {}
        before = {key: value for key, value in before.items() if not key.endswith("_token_id")}
    written = {}
    if _TOKENIZER_CONFIG not in kept:
        written[_TOKENIZER_CONFIG] = _tokenizer_config(file, config)
    ends = [
        token for token in (config.data.separator, *config.eval.stop_tokens) if token is not None
    ]
    if ends:
        before = {"eos_token_id": ends} | before
    return ExportedFiles(before, {**kept, _TOKENIZER: file}, written, f"{file} as tokenizer.json")


def _tokenizer_config(file: Path, config: Config) -> dict[str, Any]:
    """Returns what makes `transformers` take a file of a tokenizer as it is."""
    from train.data.tokenizer import Tokenizer

    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokenizer = Tokenizer.open(file, vocab_size=config.model.vocab_size)
    names = {"bos_token": None, "eos_token": config.data.separator}
    if len(tokenizer.prefix) == 1:
        names["bos_token"] = tokenizer.prefix[0]
    texts = tokenizer.texts()
    return content | {name: texts[token] for name, token in names.items() if token in texts}
