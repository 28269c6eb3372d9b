"""The tokens of a run: one 1-D array for each data source, made from text, or from a file of
tokens.

Every byte of a text is one token, unless `data.tokenizer` is the file of a tokenizer: text is then
turned into a file of tokens first, see `train.data.tokenizer`. Files are memory-mapped; a folder of
text and Python's standard library, which a run without `data.path` reads, are held in memory. Data
at a URL that fsspec reads are copied into the user's cache folder once for each version.
"""

import dataclasses
import functools
import hashlib
import json
import platform
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from flaxasync.foreign_json import JsonError, read_json
from models.foreign_folder import shown
from train.config import DataConfig
from train.data.mapped_files import MappedFile, hash_all, hash_file
from train.data.token_cache import open_tokens, remove_unfinished
from train.data.tokenizer import Tokenizer, is_file
from train.lifecycle.errors import InputError, RunError, StorageError
from train.metrics.output import user_cache, warn

CHUNK_TOKENS = 1 << 24  # number of tokens that are checked at a time
_TOKEN_FILES = (".npy", ".bin")
_FETCHED = ".fetched.json"  # has the hashes of the files of a folder in the user's cache
_TOKEN_DTYPES = (np.dtype("uint8"), np.dtype("uint16"), np.dtype("uint32"))
# These folders and modules of the standard library are not code that was written to be read, or
# differ between machines: tests, character tables, and build settings that contain local paths.
_SKIPPED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
)
_SKIPPED_MODULES = "_sysconfigdata"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens and where they come from."""

    name: str  # the path or the URL, for messages
    tokens: np.ndarray  # 1-D, uint8, uint16 or uint32; it may be mapped from a file
    # whether every token is a byte of text, so that generated tokens can be shown as text
    is_text: bool
    vocab_size: int  # the tokens are below it, in batches as well
    tokenizer: Tokenizer | None = None  # what makes text of tokens, if its file was given
    file: MappedFile | None = None  # what the tokens are mapped from
    field: str = "data.path"  # what names the data, for messages

    @functools.cached_property
    def content_hash(self) -> str:
        """The hash of all tokens, computed once."""
        return hash_all(self.tokens) if self.file is None else self.file.content_hash

    def require_unchanged(self) -> None:
        """Checks that the file, if there is one, is still the one that was hashed."""
        if self.file is not None:
            self.file.require_unchanged(self.field)

    def check_window(self, window: np.ndarray, start: int) -> None:
        """Checks tokens that were read again, from `start` on: the file may be another one by
        now.
        """
        if window.size and window.max() >= self.vocab_size:
            self.require_unchanged()
            index = int(np.argmax(window >= self.vocab_size))
            raise InputError(
                f"{self.field}: token {start + index} of {self.name} is {window[index]} and no "
                f"longer below model.vocab_size={self.vocab_size}: its file was changed while the "
                "run read it; put it back as it was and start the run again, which continues from "
                "the newest checkpoint"
            )


def open_corpora(config: DataConfig, *, vocab_size: int) -> dict[str, Corpus]:
    """Opens every data source of a run, by its name; the one of `data.path` is called "data"."""
    if not config.sources:
        return {"data": open_source(config.path, config, vocab_size=vocab_size)}
    return {
        name: open_source(
            path, config, vocab_size=vocab_size, field=f"the path of {name} in data.sources"
        )
        for name, path, _ in config.sources
    }


def open_source(
    location: str | None, config: DataConfig, *, vocab_size: int, field: str = "data.path"
) -> Corpus:
    """Opens and checks the data at a path or a URL, or Python's standard library; messages name its
    `field`.
    """
    name = location or f"the standard library of Python {platform.python_version()}"
    tokenizer = None
    if config.tokenizer is not None and is_file(config.tokenizer):
        tokenizer = Tokenizer.open(Path(config.tokenizer).expanduser(), vocab_size=vocab_size)
    is_text = False
    try:
        path = None if location is None else _find(location, field)
        if path is not None and path.suffix in _TOKEN_FILES:
            file = MappedFile(
                path, lambda path: _map_tokens(path, np.dtype(config.token_dtype), field)
            )
        elif tokenizer is not None:
            file = open_tokens(_text_files(path, field), tokenizer, separator=config.separator)
        elif config.tokenizer is not None:
            raise InputError(
                f"{field} must be a .npy or .bin file of tokens where data.tokenizer is a name: "
                f"{name} is text, and nothing says how to turn it into tokens of "
                f"{config.tokenizer}; give its tokenizer.json, or None"
            )
        elif path is not None and path.is_file():
            file = MappedFile(path, lambda path: _map_text(path, field))
            is_text = True
        else:
            joined = b"\n".join(text.read_bytes() for text in _text_files(path, field))
            file = None
            is_text = True
    except RunError:  # such as a StorageError, which is an OSError
        raise
    except OSError as error:
        what = error.strerror or error
        raise InputError(
            f"{field} must be readable: {error.filename or location}: {what}"
        ) from error
    tokens = np.frombuffer(joined, np.uint8) if file is None else file.tokens
    _check_tokens(tokens, name, vocab_size, field)
    return Corpus(name, tokens, is_text, vocab_size, tokenizer, file, field)


def identify(corpus: Corpus, tokenizer: str | None) -> dict[str, Any]:
    """Returns what a checkpoint records of data, in which alone its position has a meaning, as JSON
    data.

    `tokenizer` names what made a file of tokens.
    """
    if corpus.tokenizer:
        tokenizer = corpus.tokenizer.name
    return {
        "tokens": corpus.tokens.size,
        "dtype": str(corpus.tokens.dtype),
        "tokenizer": tokenizer or ("bytes" if corpus.is_text else "unnamed"),
        "content_hash": corpus.content_hash,
    }


def fetch(location: str, field: str) -> Path:
    """Copies a file or a folder at a URL into the user's cache folder, unless this version is
    there, and returns it.
    """
    try:
        return _fetch(location)
    except (FileNotFoundError, PermissionError, ImportError, ValueError) as error:
        raise InputError(
            f"{field}={location} cannot be read: {type(error).__name__}: {error}"
        ) from error
    except Exception as error:  # each client has errors of its own, such as gcsfs.retry.HttpError
        raise StorageError(
            f"{field}={location} did not answer: {type(error).__name__}: {error}"
        ) from error


def _fetch(location: str) -> Path:
    import fsspec  # imported late, because most runs do not need it

    store, root = fsspec.core.url_to_fs(
        location, use_listings_cache=False, skip_instance_cache=True
    )
    root = root.rstrip("/")
    found = {root: store.info(root)} if store.isfile(root) else store.find(root, detail=True)
    if not found:
        raise FileNotFoundError(f"there is no {location}")
    _check_names(root, list(found))
    # What a store says about its objects, such as their size, their time and their ETag, tells
    # versions apart.
    version = hashlib.blake2b(
        json.dumps(found, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()
    folder = user_cache() / "data" / version
    name = root.rpartition("/")[2]
    is_again = False
    if folder.exists():
        if _is_as_fetched(folder):
            return folder / name
        shutil.rmtree(folder)
        is_again = True
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder.parent)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not folder.exists():  # otherwise another process was faster
            _copy(store, found, root, folder)
    if is_again:
        warn(f"{folder} was not what was fetched from {location}; it was fetched again")
    return folder / name


def _copy(store: Any, found: Iterable[str], root: str, folder: Path) -> None:
    """Copies the files `found` below `root` of a store into a new folder, which exists only when
    all of them are there.
    """
    files = [path for path in found if not path.endswith("/")]  # some tools mark folders so
    name = root.rpartition("/")[2]
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        store.get(files, [f"{temporary}/{name}{path.removeprefix(root)}" for path in files])
        (temporary / _FETCHED).write_text(json.dumps(_describe_fetched(temporary)))
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_as_fetched(folder: Path) -> bool:
    """Says whether a folder of the user's cache has the files that were fetched into it, with their
    content.
    """
    try:
        return bool(read_json(folder / _FETCHED) == _describe_fetched(folder))
    except (JsonError, OSError):
        return False


def _describe_fetched(folder: Path) -> dict[str, str]:
    """Returns the hash of each file below a folder, by its path there."""
    paths = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / _FETCHED
    ]
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in paths}


def _check_names(root: str, paths: list[str]) -> None:
    """Refuses names of a store that would lead out of the folder into which its files are
    copied.
    """
    for path in paths:
        name = root.rpartition("/")[2] + path.removeprefix(root)
        parts = name.split("/")
        if not path.startswith(root) or not parts[0] or "\0" in name or {".", ".."} & set(parts):
            raise ValueError(
                f"it has an object with a name that is none of a file below {root}: {shown(path)}"
            )


def _find(location: str, field: str) -> Path:
    path = fetch(location, field) if "://" in location else Path(location).expanduser()
    if not path.exists():
        raise InputError(f"{field} must be a file or a folder: there is no {path}")
    if not path.is_dir() and not path.is_file():
        raise InputError(f"{field} must be a file or a folder: {path} is neither")
    if path.is_file() and path.stat().st_size == 0:
        raise InputError(f"{field} must hold data: {path} is empty")
    return path


def _text_files(path: Path | None, field: str) -> list[Path]:
    """Returns the text files at a path, or those of the standard library, in the order in which
    they are used.
    """
    if path is not None and path.is_file():
        _map_text(path, field)
        return [path]
    root = path or Path(sysconfig.get_path("stdlib"))
    files = list[Path]()
    for folder, folders, names in root.walk():
        if path is None:
            folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
            names = [
                name
                for name in names
                if name.endswith(".py") and not name.startswith(_SKIPPED_MODULES)
            ]
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [folder / name for name in names if not name.startswith(".")]
    files = [file for file in files if file.is_file() and file.stat().st_size]
    if not files:
        raise InputError(f"{field} must hold text: the folder {root} has no file that is not empty")
    for file in files:
        _map_text(file, field)
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _map_text(path: Path, field: str) -> np.ndarray:
    tokens = np.memmap(path, np.uint8, "r")
    if not tokens[:4096].all():
        raise InputError(
            f"{field} must be text, or tokens in a .npy or .bin file: {path} holds a zero byte"
        )
    return tokens


def _map_tokens(path: Path, dtype: np.dtype, field: str) -> np.ndarray:
    """Maps a .npy file, or a .bin file of tokens of the given type."""
    if path.suffix == ".bin":
        if path.stat().st_size % dtype.itemsize:
            raise InputError(
                f"{field} must hold whole tokens: {path} has {path.stat().st_size} bytes, which is "
                f"no multiple of the {dtype.itemsize} bytes of a {dtype}; set data.token_dtype to "
                "what the file was written with"
            )
        return np.memmap(path, dtype, "r")
    try:
        tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{field} must be a .npy file of tokens: {path} cannot be read: {error}"
        ) from error
    if tokens.ndim != 1 or tokens.dtype not in _TOKEN_DTYPES:
        raise InputError(
            f"{field} must hold a one-dimensional array of uint8, uint16 or uint32: {path} is "
            f"{tokens.dtype} {list(tokens.shape)}"
        )
    return tokens


def _check_tokens(tokens: np.ndarray, name: str, vocab_size: int, field: str) -> None:
    """Checks every token, one chunk at a time, unless no value of the type can leave the
    vocabulary.
    """
    if tokens.size == 0:
        raise InputError(f"{field} must hold data: {name} has no tokens")
    if np.iinfo(tokens.dtype).max < vocab_size:
        return
    for start in range(0, tokens.size, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        if chunk.max() >= vocab_size:
            index = int(np.argmax(chunk >= vocab_size))
            raise InputError(
                f"token ids must be below model.vocab_size={vocab_size}: token {start + index} of "
                f"{name} is {chunk[index]}; raise model.vocab_size, or check data.token_dtype"
            )
