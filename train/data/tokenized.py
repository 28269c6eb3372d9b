"""Text data turned into tokens once: a file of tokens, mapped into memory, in which a token ends every document.

A document begins with the tokens that the tokenizer begins a prompt with, if it has such tokens.

A text file is a document, and so is the "text" of each line of a .jsonl file. Long documents are encoded in pieces of
about PIECE_BYTES, cut at the end of a line, so that memory stays small and every piece can be encoded by a thread of
its own; tokens next to a cut may differ from those of the whole document. A tokenizer that begins every text with a
space adds one after each cut.

The file lies in tokens/ beside the tokenizer, under a hash of VERSION, the tokenizer, the separator, and the names,
sizes and modification times of the text files, so that it is made again if one of them changes.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import filelock
import numpy as np

from train.data.tokenizer import Tokenizer
from train.lifecycle.errors import InputError
from train.metrics.progress import Percent

VERSION = 2
"""Version of the tokens that a text becomes; those of 1 lacked the tokens that begin a document."""
PIECE_BYTES, BATCH_PIECES = 1 << 20, 16


class Piece(NamedTuple):
    """A piece of a document: its file, its text, which ends of the document it has, and the bytes it used up."""

    file: Path
    text: str
    begins: bool
    ends: bool
    used: int


def tokenize_files(files: list[Path], tokenizer: Tokenizer, *, separator: int | None) -> Path:
    """Returns the file of tokens of some text files, uint32, which is made unless it is there.

    If several processes need it at once, one makes it and the others wait.

    Raises:
      InputError: A file cannot be read, is not UTF-8, or a line of a .jsonl file has no string "text".
    """
    described = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([VERSION, tokenizer.name, separator, described])
    folder = tokenizer.path.parent / "tokens"
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.bin"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            temporary = path.with_suffix(".tmp")
            try:
                with open(temporary, "wb") as out:
                    total = sum(size for _, size, _ in described)
                    _write(out, files, tokenizer, separator, total=max(total, 1))
                    out.flush()
                    os.fsync(out.fileno())
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)  # what a bad file or Ctrl-C has left may be large
    return path


def _write(out: IO[bytes], files: Iterable[Path], tokenizer: Tokenizer, separator: int | None, *, total: int) -> None:
    """Writes the tokens of some files, which have `total` bytes."""
    pieces, done = (piece for file in files for piece in _pieces(file)), 0
    with Percent("tokenized") as percent:
        for batch in itertools.batched(pieces, BATCH_PIECES):  # they are encoded side by side
            encoded = tokenizer.inner.encode_batch([piece.text for piece in batch], add_special_tokens=False)
            for piece, encoding in zip(batch, encoded, strict=True):
                tokens = [*tokenizer.prefix, *encoding.ids] if piece.begins else encoding.ids
                if piece.ends and separator is not None:
                    tokens = [*tokens, separator]
                out.write(np.asarray(tokens, np.uint32).tobytes())
                done += piece.used
            percent.report(batch[-1].file.name, done, total)


def _pieces(file: Path) -> Iterator[Piece]:
    try:
        with open(file, "rb") as lines:
            if file.suffix == ".jsonl":
                for number, line in enumerate(lines, start=1):
                    yield Piece(file, _text_of_line(line, file, number), True, True, len(line))
                return
            begins, piece = True, lines.readlines(PIECE_BYTES)
            while piece:
                following = lines.readlines(PIECE_BYTES)
                content = b"".join(piece)
                yield Piece(file, content.decode(), begins, not following, len(content))
                begins, piece = False, following
    except OSError as error:
        raise InputError(f"data must be readable: {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"data must be text in UTF-8: {file}: {error}") from error


def _text_of_line(line: bytes, file: Path, number: int) -> str:
    try:
        text = json.loads(line)["text"]
        if not isinstance(text, str):
            raise TypeError(f"the text is {text!r:.40}")
        return text
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'every line of a .jsonl file must be an object with "text", a string: {file}, line {number}: '
            f"{type(error).__name__}: {error}"
        ) from error
