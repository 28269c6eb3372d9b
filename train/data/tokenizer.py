"""Tokenizers: files of the `tokenizers` package, which turn text into the tokens of a model and back."""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import tokenizers

from train.lifecycle.errors import InputError


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and what identifies it.

    Attributes:
      name: The hash of its file, which a run must not change.
      inner: The tokenizer of the package. It neither truncates nor pads, whatever the file says.
      prefix: The special tokens that begin every text, such as the one that begins a document.
      path: Its file.
    """

    name: str
    inner: tokenizers.Tokenizer
    prefix: tuple[int, ...]
    path: Path

    @classmethod
    def open(cls, path: Path, *, vocab_size: int, field: str = "data.tokenizer") -> Self:
        """Reads a file.

        Raises:
          InputError: There is no such file, it is no tokenizer, or it makes tokens that are not in the vocabulary.
        """
        try:
            content = path.read_bytes()
            inner = tokenizers.Tokenizer.from_str(content.decode())
        except OSError as error:
            raise InputError(f"{field} must be a file of a tokenizer: {path}: {error.strerror}") from error
        except Exception as error:  # the package raises Exception itself
            raise InputError(f"{field} must be a file of a tokenizer: {path} cannot be read: {error}") from error
        largest = max(inner.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= vocab_size:
            raise InputError(
                f"{field} must match the vocabulary: {path} has tokens up to {largest}, and model.vocab_size is "
                f"{vocab_size}; use the tokenizer of this model, or a model.vocab_size of {largest + 1} or more"
            )
        # A file often records the truncation and the padding of the last call that used it.
        inner.no_truncation()
        inner.no_padding()
        sample = inner.encode("a")
        pairs = zip(sample.ids, sample.special_tokens_mask, strict=True)
        prefix = tuple(token for token, _ in itertools.takewhile(lambda pair: pair[1], pairs))
        return cls(f"tokenizer {hashlib.blake2b(content, digest_size=8).hexdigest()}", inner, prefix, path)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt: those that begin every text, and those of this one."""
        return [*self.prefix, *self.inner.encode(text, add_special_tokens=False).ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        return self.inner.decode(list(tokens))


def is_file(tokenizer: str | None) -> bool:
    """Says whether `data.tokenizer` is a file, and not the name of a tokenizer that was applied before."""
    return tokenizer is not None and tokenizer.endswith(".json")


def decode_bytes(tokens: Sequence[int]) -> str:
    """Returns the text of tokens that are bytes; tokens from 256 on, which a larger vocabulary has, become "?"."""
    return bytes(token if token < 256 else ord("?") for token in tokens).decode(errors="replace")
