"""Tokenizers, and how one of them turns text data into tokens; `train.data.token_cache` keeps these
in a file.

A text file is a document, and so is the "text" of each line of a .jsonl file. A document begins
with the tokens with which the tokenizer begins a prompt, and a token that the run names may end it.
Long documents are encoded in pieces of about PIECE_BYTES, cut at the end of a line, so that memory
stays small and threads encode pieces side by side; tokens next to a cut may differ from those of
the whole document. A tokenizer that begins every text with a space adds one after each cut. A text
that begins with these tokens, or ends with that one, as chat templates write it, gets no second.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Self

import numpy as np
import tokenizers

from flaxasync.foreign_json import JsonError, parse_json, read_regular
from train.data.tokenizer_errors import errors_of_tokenizers
from train.lifecycle.errors import InputError
from train.metrics.output import percent_printer

VERSION = 3
"""Version of the tokens that a text becomes. Those of 1 lacked the tokens that begin a document;
those of 2 had them, or the one that ends it, twice where the text has them itself."""
MOST_BYTES = 1 << 29
"""The most bytes of a tokenizer's file."""
PIECE_BYTES = 1 << 20
BATCH_PIECES = 16


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the package `tokenizers`, which turns text into the tokens of a model and
    back.
    """

    name: str  # has the hash of its file, which a run must not change
    inner: tokenizers.Tokenizer  # neither truncates nor pads, whatever the file says
    prefix: tuple[int, ...]  # the special tokens that begin every text
    path: Path

    @classmethod
    def open(cls, path: Path, *, vocab_size: int, field: str = "data.tokenizer") -> Self:
        """Reads a file, which must be a tokenizer and make no token that is not in the vocabulary."""
        try:
            content = read_regular(path, most_bytes=MOST_BYTES)
        except OSError as error:
            raise InputError(
                f"{field} must be a file of a tokenizer: {path}: {error.strerror or error}"
            ) from error
        with errors_of_tokenizers(f"{field} must be a file of a tokenizer: {path} cannot be read"):
            inner = tokenizers.Tokenizer.from_str(content.decode())
            # A file often records the truncation and the padding of the last call that used it.
            inner.no_truncation()
            inner.no_padding()
            vocabulary = inner.get_vocab(with_added_tokens=True)
            prefix = _prefix(inner, vocabulary)
            inner.decode(list(prefix))
        largest = max([*vocabulary.values(), *prefix], default=0)
        if largest >= vocab_size:
            raise InputError(
                f"{field} must match the vocabulary: {path} has tokens up to {largest}, and "
                f"model.vocab_size is {vocab_size}; use the tokenizer of this model, or a "
                f"model.vocab_size of {largest + 1} or more"
            )
        return cls(
            f"tokenizer {hashlib.blake2b(content, digest_size=8).hexdigest()}", inner, prefix, path
        )

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt: those that begin every text, and those of this one."""
        with errors_of_tokenizers(f"the tokenizer {self.path} cannot encode the text"):
            tokens = self.inner.encode(text, add_special_tokens=False).ids
        return self.begin(tokens)

    def begin(self, tokens: list[int]) -> list[int]:
        """Returns the tokens of a text after those that begin every text, of which it may have the
        last ones itself.
        """
        for length in range(len(self.prefix), 0, -1):
            if self.prefix[-length:] == tuple(tokens[:length]):
                return [*self.prefix[:-length], *tokens]
        return [*self.prefix, *tokens]

    def texts(self) -> dict[int, str]:
        """Returns the text of every token, as the file has it."""
        return {token: text for text, token in self.inner.get_vocab(with_added_tokens=True).items()}

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        with errors_of_tokenizers(f"the tokenizer {self.path} cannot decode tokens"):
            return self.inner.decode(list(tokens))


def _prefix(inner: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the special tokens with which a tokenizer begins a text.

    They are told from those that end it by the tokens of a text between them, which the tokenizer
    must not drop.
    """
    failed: Exception | None = None
    for text in ("a", *itertools.islice(vocabulary, 16)):
        try:
            sample = inner.encode(text)
        except Exception as error:  # it lacks a token for what it does not know
            failed = failed or error
            continue
        if 0 in sample.special_tokens_mask:
            pairs = zip(sample.ids, sample.special_tokens_mask, strict=True)
            return tuple(token for token, _ in itertools.takewhile(_is_special, pairs))
    raise failed or ValueError("it has no token for any text")


def _is_special(pair: tuple[int, int]) -> bool:
    return pair[1] == 1


def is_file(tokenizer: str | None) -> bool:
    """Says whether `data.tokenizer` is a file, and not the name of a tokenizer that was applied
    before.
    """
    return tokenizer is not None and tokenizer.endswith(".json")


def decode_bytes(tokens: Sequence[int]) -> str:
    """Returns the text of tokens that are bytes; tokens from 256 on, which a larger vocabulary has,
    become "?".
    """
    return bytes(token if token < 256 else ord("?") for token in tokens).decode(errors="replace")


class _Piece(NamedTuple):
    """A piece of a document."""

    file: Path
    text: str
    begins: bool  # whether the document begins here
    ends: bool
    used: int  # bytes of the file


def write_tokens(
    out: IO[bytes],
    files: Iterable[Path],
    tokenizer: Tokenizer,
    separator: int | None,
    *,
    total: int,
) -> None:
    """Writes the tokens of texts, uint32, one document after the other, and prints the share of
    `total` bytes.
    """
    pieces = (piece for file in files for piece in _pieces(file))
    done = 0
    report = percent_printer("tokenized")
    for batch in itertools.batched(pieces, BATCH_PIECES):  # they are encoded side by side
        with errors_of_tokenizers(
            f"the tokenizer {tokenizer.path} cannot encode {batch[0].file} or what follows it"
        ):
            encoded = tokenizer.inner.encode_batch(
                [piece.text for piece in batch], add_special_tokens=False
            )
        for piece, encoding in zip(batch, encoded, strict=True):
            tokens = tokenizer.begin(encoding.ids) if piece.begins else encoding.ids
            if piece.ends and separator is not None and tokens[-1:] != [separator]:
                tokens = [*tokens, separator]
            out.write(np.asarray(tokens, np.uint32).tobytes())
            done += piece.used
        report(batch[-1].file.name, done, total)


def _pieces(file: Path) -> Iterator[_Piece]:
    try:
        with open(file, "rb") as lines:
            if file.suffix == ".jsonl":
                for number, line in enumerate(lines, start=1):
                    yield _Piece(file, _text_of_line(line, file, number), True, True, len(line))
                return
            begins = True
            piece = lines.readlines(PIECE_BYTES)
            while piece:
                following = lines.readlines(PIECE_BYTES)
                content = b"".join(piece)
                yield _Piece(file, content.decode(), begins, not following, len(content))
                begins = False
                piece = following
    except OSError as error:
        raise InputError(f"data must be readable: {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"data must be text in UTF-8: {file}: {error}") from error


def _text_of_line(line: bytes, file: Path, number: int) -> str:
    try:
        content = parse_json(line, f"{file}, line {number},")
    except JsonError as error:
        raise InputError(f"every line of a .jsonl file must be JSON: {error}") from error
    try:
        text = content["text"]
        if not isinstance(text, str):
            raise TypeError(f"the text is {text!r:.40}")
        return text
    except (KeyError, TypeError) as error:
        raise InputError(
            f'every line of a .jsonl file must be an object with "text", a string: {file}, line '
            f"{number}: "
            f"{type(error).__name__}: {error}"
        ) from error
