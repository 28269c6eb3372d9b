"""The tokens of a run: one 1-D array, made from Python's standard library, from text, or from a file of tokens.

Every byte of a text is one token, unless `data.tokenizer` is the file of a tokenizer: text is then turned into a file
of tokens first, see `train.tokenize_data`. Text files and token files are memory-mapped. A folder of text and the
standard library are read into memory; the library is about 10 MB and takes a tenth of a second to read, so it is not
cached.
"""

import dataclasses
import platform
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from train.config import DataConfig
from train.data.remote import fetch, is_remote
from train.data.tokenizer import Tokenizer, is_file
from train.lifecycle.errors import InputError
from train.tokenize_data import tokenize_files

CHUNK_TOKENS = 1 << 24  # number of tokens that are checked at a time
_TOKEN_DTYPES = (np.dtype("uint8"), np.dtype("uint16"), np.dtype("uint32"))
# These folders and modules are not code that was written to be read, or differ between machines: tests, character
# tables, and build settings that contain local paths.
_LIBRARY_SKIPS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})
_LIBRARY_SKIPPED_PREFIX = "_sysconfigdata"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens and where they come from.

    Attributes:
      name: Name of the source, for messages.
      tokens: The tokens, a 1-D array of uint8, uint16 or uint32 that may be mapped from a file.
      is_text: Whether every token is a byte of text, so that generated tokens can be shown as text.
      file: The file that the tokens are mapped from, or None if they are in memory.
      tokenizer: The tokenizer that makes text of tokens, if its file was given.
    """

    name: str
    tokens: np.ndarray
    is_text: bool
    file: Path | None = None
    tokenizer: Tokenizer | None = None


def open_corpora(config: DataConfig, *, vocab_size: int) -> dict[str, Corpus]:
    """Opens every data source of a run, by its name; the one of `data.path` is called "data".

    Raises:
      InputError: A source is missing, empty or of an unknown kind, or has a token that is not in the vocabulary.
    """
    if not config.sources:
        return {"data": open_source(config.path, config, vocab_size=vocab_size)}
    return {
        name: open_source(path, config, vocab_size=vocab_size, field=f"the path of {name} in data.sources")
        for name, path, _ in config.sources
    }


def open_source(location: str | None, config: DataConfig, *, vocab_size: int, field: str = "data.path") -> Corpus:
    """Opens the data at a path as tokens: of the tokenizer of the run, if that is a file, otherwise as `open_corpus`.

    Raises:
      InputError: As `open_corpus`, the tokenizer does not match the vocabulary, or text has only the name of one.
    """
    dtype = np.dtype(config.token_dtype)
    if not is_file(config.tokenizer):
        corpus = open_corpus(location, dtype=dtype, vocab_size=vocab_size, field=field)
        if corpus.is_text and config.tokenizer is not None:
            raise InputError(
                f"{field} must be a .npy or .bin file of tokens where data.tokenizer is a name: {corpus.name} is text, "
                f"and nothing says how to turn it into tokens of {config.tokenizer}; give --data.tokenizer the file "
                "tokenizer.json, or None for bytes"
            )
        return corpus
    assert config.tokenizer is not None
    path = Path(config.tokenizer).expanduser()
    tokenizer = Tokenizer.open(path, vocab_size=vocab_size)
    name = location or "the standard library of this Python"
    if location is None or Path(location).suffix not in (".npy", ".bin"):
        files = _text_files(location, field)
        tokens = tokenize_files(files, tokenizer, path.parent / "tokens", separator=config.separator)
        location, dtype = str(tokens), np.dtype("uint32")
    corpus = open_corpus(location, dtype=dtype, vocab_size=vocab_size, field=field)
    return dataclasses.replace(corpus, name=name, tokenizer=tokenizer)


def open_corpus(location: str | None, *, dtype: np.dtype, vocab_size: int, field: str = "data.path") -> Corpus:
    """Opens the data at a path and checks every token.

    Args:
      location: A file or a folder; None is the standard library of this Python.
      dtype: Type of the tokens in a .bin file.
      vocab_size: The number of tokens in the vocabulary.
      field: The field of the configuration that names the path, for messages.

    Raises:
      InputError: The data is missing, unreadable, empty or of an unknown kind, or has a token that is not in the
        vocabulary.
    """
    if location is None:
        corpus = _standard_library()
    else:
        path = fetch(location, field) if is_remote(location) else Path(location).expanduser()
        try:
            corpus = dataclasses.replace(_open_path(path, dtype, field), name=location)
        except InputError:
            raise
        except OSError as error:
            raise InputError(f"{field} must be readable: {error.filename or path}: {error.strerror}") from error
    _check_tokens(corpus, vocab_size, field)
    return corpus


def _open_path(path: Path, dtype: np.dtype, field: str) -> Corpus:
    if not path.exists():
        raise InputError(f"{field} must be a file or a folder: there is no {path}")
    if path.is_dir():
        return _folder(path, field)
    if not path.is_file():
        raise InputError(f"{field} must be a file or a folder: {path} is neither")
    if path.stat().st_size == 0:
        raise InputError(f"{field} must hold data: {path} is empty")
    if path.suffix == ".npy":
        return Corpus(str(path), _map_npy(path, field), is_text=False, file=path)
    if path.suffix == ".bin":
        return Corpus(str(path), _map_bin(path, dtype, field), is_text=False, file=path)
    return Corpus(str(path), _map_text(path, field), is_text=True, file=path)


def _text_files(location: str | None, field: str) -> list[Path]:
    """Returns the text files at a path, or those of the standard library, in the order in which they are used."""
    if location is None:
        return _library_files()
    path = fetch(location, field) if is_remote(location) else Path(location).expanduser()
    if path.is_dir():
        return _folder_files(path, field)
    _open_path(path, np.dtype("uint8"), field)  # checks that it is text
    return [path]


def _standard_library() -> Corpus:
    return Corpus(
        f"the standard library of Python {platform.python_version()}",
        _join(_library_files()),
        is_text=True,
    )


def _library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in root.walk():
        folders[:] = [name for name in folders if name not in _LIBRARY_SKIPS]
        modules = [name for name in names if name.endswith(".py")]
        files += [folder / name for name in modules if not name.startswith(_LIBRARY_SKIPPED_PREFIX)]
    if not files:
        raise InputError(f"this Python has no source files of its standard library in {root}; give data.path")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _folder(root: Path, field: str) -> Corpus:
    return Corpus(str(root), _join(_folder_files(root, field)), is_text=True)


def _folder_files(root: Path, field: str) -> list[Path]:
    files = [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise InputError(f"{field} must hold text: the folder {root} has no file that is not empty")
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    for path in files:
        _map_text(path, field)
    return files


def _join(files: Iterable[Path]) -> np.ndarray:
    """Returns a read-only array of the bytes of all files, separated by line breaks."""
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)


def _map_text(path: Path, field: str) -> np.ndarray:
    tokens = np.memmap(path, np.uint8, "r")
    if not tokens[:4096].all():
        raise InputError(
            f"{field} must be text, or tokens in a .npy or .bin file: {path} holds a zero byte, so it is neither"
        )
    return tokens


def _map_npy(path: Path, field: str) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise InputError(f"{field} must be a .npy file of tokens: {path} cannot be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype not in _TOKEN_DTYPES:
        raise InputError(
            f"{field} must hold a one-dimensional uint16 or uint32 array: {path} is {tokens.dtype} {list(tokens.shape)}"
        )
    return tokens


def _map_bin(path: Path, dtype: np.dtype, field: str) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise InputError(
            f"{field} must hold whole tokens: {path} has {size} bytes, which is no multiple of the "
            f"{dtype.itemsize} bytes of a {dtype}; set data.token_dtype to what the file was written with"
        )
    return np.memmap(path, dtype, "r")


def _check_tokens(corpus: Corpus, vocab_size: int, field: str) -> None:
    """Checks every token, one chunk at a time, unless no value of the type can leave the vocabulary."""
    tokens = corpus.tokens
    if tokens.size == 0:
        raise InputError(f"{field} must hold data: {corpus.name} has no tokens")
    if np.iinfo(tokens.dtype).max < vocab_size:
        return
    for start in range(0, tokens.size, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        if chunk.max() >= vocab_size:
            index = int(np.argmax(chunk >= vocab_size))
            raise InputError(
                f"token ids must be below model.vocab_size={vocab_size}: token {start + index} of {corpus.name} "
                f"is {chunk[index]}; raise model.vocab_size, or check data.token_dtype"
            )
