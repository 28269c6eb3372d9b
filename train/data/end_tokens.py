"""Which token of somebody else's model separates documents: one that ends texts and that no chat
template uses.

Models that chat often name the token that ends a turn as the one that ends a text. As a separator
of documents it would hide every turn from the next one, because attention and loss stay within
documents.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flaxasync.foreign_json import JsonError, parse_json, read_regular
from models.foreign_folder import checked_file, shown
from train.lifecycle.errors import InputError, as_input_errors

TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""Where `save_pretrained` of `transformers` writes the template of a chat, and the folder of
further ones.
"""
_OLD_TEMPLATE = "chat_template.json"
_MOST_BYTES = 1 << 25
_MOST_DIGITS = 20  # of a token; if it has more, the first ones are too large a number already


@dataclasses.dataclass(frozen=True)
class EndTokens:
    """The tokens that end what a model writes.

    Attributes:
      separator: The token that ends documents, if there is one.
      stops: The others, which only end what is sampled.
      reason: A sentence that says so.
    """

    separator: int | None
    stops: tuple[int, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """What the files beside a tokenizer say.

    Attributes:
      ends: The tokens that end a text, those of config.json first.
      texts: The texts of tokens, as far as they are known.
      names: The names under which a template knows tokens, such as eos_token, and their texts.
      templates: The chat templates.
    """

    ends: tuple[int, ...]
    texts: Mapping[int, str]
    names: Mapping[str, str]
    templates: tuple[str, ...]


def choose_separator(
    files: TokenFiles, wanted: int | Literal["auto", "none"] = "auto"
) -> EndTokens:
    """Chooses the token that ends documents.

    Args:
      files: What the folder says.
      wanted: A token; or "none"; or "auto" for the first token that ends a text and that no chat
        template uses.
    """
    if wanted == "none":
        return EndTokens(None, files.ends, "none, as --separator says")
    if wanted != "auto":
        stops = tuple(token for token in files.ends if token != wanted)
        reason = f"{_name(wanted, files)} ends documents, as --separator says"
        if _is_in_a_template(wanted, files):
            reason += ", though the chat template uses it: no turn sees the one before it"
        return EndTokens(wanted, stops, reason)
    in_turns = [token for token in files.ends if _is_in_a_template(token, files)]
    free = [token for token in files.ends if token not in in_turns]
    used = (
        f"{', '.join(_name(token, files) for token in in_turns)} can end a turn of its chat "
        "template"
    )
    if free:
        stops = tuple(token for token in files.ends if token != free[0])
        reason = f"{_name(free[0], files)} ends documents"
        if in_turns:
            reason += f"; {used}"
        return EndTokens(free[0], stops, reason)
    if in_turns:
        return EndTokens(None, files.ends, f"none, as {used}; --separator TOKEN names another one")
    return EndTokens(None, (), "none, as no file names a token that ends a text")


def read_token_files(folder: Path, *, vocab_size: int, texts: Mapping[int, str]) -> TokenFiles:
    """Reads what the files of a folder say of special tokens, and compares their numbers with the
    vocabulary.

    Args:
      folder: The folder.
      vocab_size: The entries of the vocabulary.
      texts: The texts of the tokens of the tokenizer, if there is one.
    """
    ends: list[int] = []
    for name in ("config.json", "generation_config.json"):
        content = read_object(folder, name)
        # Nothing here uses these, but `transformers` looks them up. Some files say -1 for none.
        for key in ("bos_token_id", "pad_token_id"):
            for token in _as_list(content.get(key)):
                if token not in (None, -1):
                    _check_token(key, token, folder / name, vocab_size)
        ends += [token for token in _end_tokens(content, folder / name) if token not in ends]
    config_file = folder / "tokenizer_config.json"
    tokenizer_config = read_object(folder, config_file.name)
    known: dict[int, str] = {}
    added_tokens = folder / "added_tokens.json"
    for text, token in read_object(folder, added_tokens.name).items():
        _check_token(shown(repr(text)), token, added_tokens, vocab_size)
        known[token] = text
    decoder = tokenizer_config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for digits, entry in decoder.items():
            known_text = _text(entry)
            if digits.isdecimal() and known_text is not None:
                number = int(digits[:_MOST_DIGITS])
                _check_token(shown(repr(known_text)), number, config_file, vocab_size)
                known[number] = known_text
    # tokenizer_config.json stands above the map, and the tokenizer above both files of tokens
    entries = {**read_object(folder, "special_tokens_map.json"), **tokenizer_config}
    names = {key: _text(entry) for key, entry in entries.items() if key.endswith("_token")}
    return TokenFiles(
        ends=tuple(ends),
        texts={**known, **texts},
        names={key: text for key, text in names.items() if text},
        templates=tuple(_read_templates(folder, tokenizer_config)),
    )


def template_files(folder: Path) -> list[str]:
    """Returns the names of the files of a folder that are further templates, relative to it."""
    return sorted(f"{TEMPLATES}/{file.name}" for file in (folder / TEMPLATES).glob("*.jinja"))


def _is_in_a_template(token: int, files: TokenFiles) -> bool:
    """Says whether a chat template uses a token, by its text or by a name; a token without a text
    may be in each.
    """
    text = files.texts.get(token)
    if text is None:
        return bool(files.templates)
    names = [name for name, named in files.names.items() if named == text]
    return any(
        text in template or any(re.search(rf"\b{re.escape(name)}\b", template) for name in names)
        for template in files.templates
    )


def _name(token: int, files: TokenFiles) -> str:
    if token in files.texts:
        return f"token {token} ({shown(files.texts[token])})"
    return f"token {token}"


def _as_list(value: object) -> list[Any]:
    """Returns the elements of a list, or what stands in the place of one."""
    if isinstance(value, list):
        return value
    return [value]


def _end_tokens(content: Mapping[str, object], file: Path) -> Sequence[int]:
    given = content.get("eos_token_id")
    tokens: list[int] = []
    if given is not None:
        tokens = _as_list(given)
    if not all(type(token) is int for token in tokens):
        raise InputError(
            f"eos_token_id of {file} must be a token or a list of tokens: got {shown(repr(given))}"
        )
    return list(dict.fromkeys(tokens))


def _check_token(key: str, token: object, file: Path, vocab_size: int) -> None:
    if type(token) is not int or not 0 <= token < vocab_size:
        raise InputError(
            f"{key} of {file} must be a token below vocab_size={vocab_size}: got "
            f"{shown(repr(token))}"
        )


def _read_templates(folder: Path, config: Mapping[str, object]) -> list[str]:
    given = [config.get("chat_template"), read_object(folder, _OLD_TEMPLATE).get("chat_template")]
    templates = [_property(entry, "template") for value in given for entry in _as_list(value)]
    for name in (TEMPLATE, *template_files(folder)):
        content = _read(folder, name)
        if content is not None:
            try:
                templates.append(content.decode())
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{folder / name} must be text in UTF-8: {error.reason}"
                ) from error
    return [template for template in templates if isinstance(template, str)]


def _text(entry: object) -> str | None:
    """Returns the text of a token, which files have as it is or with its properties."""
    text = _property(entry, "content")
    if isinstance(text, str):
        return text
    return None


def _property(entry: object, name: str) -> object:
    """Returns a property of an entry, or the entry that stands in its place."""
    if isinstance(entry, dict):
        return entry.get(name)
    return entry


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Reads a file that has an object; empty if there is none."""
    content = _read(folder, name)
    if content is None:
        return {}
    with as_input_errors(JsonError):
        value = parse_json(content, str(folder / name))
    if not isinstance(value, dict):
        raise InputError(f"{folder / name} must be a JSON object: got {shown(repr(value))}")
    return value


def _read(folder: Path, name: str) -> bytes | None:
    try:
        return read_regular(checked_file(folder, name), most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{folder / name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(str(error)) from error
