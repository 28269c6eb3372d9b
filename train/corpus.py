"""The tokens a run learns from: one long 1-D array, from this Python's standard library, from text or from tokens.

Text is taken as bytes, a token a byte. A text file and a token file are mapped, not loaded; a folder of text and the
standard library are read into memory (the library is about 9 MB, read in a tenth of a second, so nothing is cached).
"""

import dataclasses
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from train.config import DataConfig, InputError

CHUNK_TOKENS = 1 << 24  # a check looks at this many tokens at once
_TOKEN_DTYPES = (np.dtype("uint8"), np.dtype("uint16"), np.dtype("uint32"))
# Not code that was written to be read: tests, character tables, and modules with this machine's paths in them.
_LIBRARY_SKIPS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})
_LIBRARY_SKIPPED_PREFIX = "_sysconfigdata"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens, and what to call them.

    Attributes:
      name: where they are from, for people.
      tokens: [tokens], uint8, uint16 or uint32; often mapped from a file.
      is_text: whether a token is a byte of text, so that a sample can be shown as text.
    """

    name: str
    tokens: np.ndarray
    is_text: bool


def open_corpus(config: DataConfig, *, vocab_size: int) -> Corpus:
    """Opens what `data.path` names and checks every token.

    Raises:
      InputError: it is missing, empty, no text, no tokens, or holds a token id that the vocabulary lacks.
    """
    if config.path is None:
        corpus = _standard_library()
    else:
        path = Path(config.path).expanduser()
        if not path.exists():
            raise InputError(f"data.path must be a file or a folder: there is no {path}")
        if path.is_dir():
            corpus = _folder(path)
        elif path.stat().st_size == 0:
            raise InputError(f"data.path must hold data: {path} is empty")
        elif path.suffix == ".npy":
            corpus = Corpus(str(path), _map_npy(path), is_text=False)
        elif path.suffix == ".bin":
            corpus = Corpus(str(path), _map_bin(path, np.dtype(config.token_dtype)), is_text=False)
        else:
            corpus = Corpus(str(path), _map_text(path), is_text=True)
    _check_tokens(corpus, vocab_size)
    return corpus


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in root.rglob("*.py")
        if _LIBRARY_SKIPS.isdisjoint(path.relative_to(root).parts) and not path.name.startswith(_LIBRARY_SKIPPED_PREFIX)
    ]
    if not files:
        raise InputError(f"this Python has no source files of its standard library in {root}; give data.path")
    return Corpus(
        f"the Python {sysconfig.get_python_version()} standard library",
        _join(sorted(files, key=lambda path: path.relative_to(root).as_posix())),
        is_text=True,
    )


def _folder(root: Path) -> Corpus:
    files = [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise InputError(f"data.path must hold text: the folder {root} has no file with something in it")
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    for path in files:
        _map_text(path)
    return Corpus(str(root), _join(files), is_text=True)


def _join(files: Iterable[Path]) -> np.ndarray:
    """Returns the bytes of all files, a line break between any two, read-only."""
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)


def _map_text(path: Path) -> np.ndarray:
    tokens = np.memmap(path, np.uint8, "r")
    if not tokens[:4096].all():
        raise InputError(
            f"data.path must be text, or tokens in a .npy or .bin file: {path} holds a zero byte, so it is neither"
        )
    return tokens


def _map_npy(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"data.path must be a .npy file of tokens: {path} cannot be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype not in _TOKEN_DTYPES:
        raise InputError(
            f"data.path must hold a one-dimensional uint16 or uint32 array: {path} is {tokens.dtype} "
            f"{list(tokens.shape)}"
        )
    return tokens


def _map_bin(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise InputError(
            f"data.path must hold whole tokens: {path} has {size} bytes, which is no multiple of the "
            f"{dtype.itemsize} bytes of a {dtype}; set data.token_dtype to what the file was written with"
        )
    return np.memmap(path, dtype, "r")


def _check_tokens(corpus: Corpus, vocab_size: int) -> None:
    """Looks at every token, a chunk at a time, unless the type alone says that all fit."""
    tokens = corpus.tokens
    if tokens.size == 0:
        raise InputError(f"data.path must hold data: {corpus.name} has no tokens")
    if np.iinfo(tokens.dtype).max < vocab_size:
        return
    for start in range(0, tokens.size, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        if chunk.max() >= vocab_size:
            at = int(np.argmax(chunk >= vocab_size))
            raise InputError(
                f"token ids must be below model.vocab_size={vocab_size}: token {start + at} of {corpus.name} "
                f"is {chunk[at]}; raise model.vocab_size, or check data.token_dtype"
            )
