"""The files of tokens that texts become, once: in tokens/ beside the tokenizer, each with a record
of what it holds.

```
tokens/KEY.bin    the tokens, uint32; KEY is a hash of the texts' content, of the tokenizer and of the separator
tokens/KEY.json   {"bytes": its size, "hash": the hash of its tokens}
tokens/KEY.lock   is locked by the process that makes them
```

A file that is not what its record says is made again. So are the tokens of a text that has changed,
whatever the times of its file are.
"""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

import filelock
import numpy as np

from flaxasync.foreign_json import JsonError, read_json
from train.data.mapped_files import FileState, MappedFile, hash_file
from train.data.tokenizer import VERSION, Tokenizer, write_tokens
from train.lifecycle.errors import InputError
from train.metrics.output import warn, write_atomically


def open_tokens(files: list[Path], tokenizer: Tokenizer, *, separator: int | None) -> MappedFile:
    """Returns the tokens of some text files, which are made unless they are there.

    If several processes need them at once, one makes them and the others wait.
    """
    before = [FileState.of(file) for file in files]
    texts = [
        (file.suffix, state.size, hash_file(file))
        for file, state in zip(files, before, strict=True)
    ]
    key = json.dumps([VERSION, tokenizer.name, separator, texts])
    folder = tokenizer.path.parent / "tokens"
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.bin"
    if tokens := _open_if_whole(path):
        return tokens
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        if tokens := _open_if_whole(path):  # another process was faster
            return tokens
        was_there = path.exists()
        _write(path, files, tokenizer, separator, total=sum(state.size for state in before))
        for file, state in zip(files, before, strict=True):
            if FileState.of(file) != state:
                path.unlink()
                raise InputError(
                    f"data must stay as they are while they become tokens: {file} was changed; "
                    "start again"
                )
        tokens = MappedFile(path, _map)
        write_atomically(
            _record_of(path),
            json.dumps({"bytes": tokens.tokens.nbytes, "hash": tokens.content_hash}),
        )
        if was_there:
            warn(f"{path} was not the file of tokens that had been written; it was made again")
    return tokens


def _open_if_whole(path: Path) -> MappedFile | None:
    """Opens a file of tokens if it is what its record says."""
    try:
        record = read_json(_record_of(path))
    except JsonError:
        return None
    if (
        not isinstance(record, dict)
        or not path.is_file()
        or path.stat().st_size != record.get("bytes")
    ):
        return None
    if not record["bytes"] or record["bytes"] % np.dtype(np.uint32).itemsize:
        return None
    tokens = MappedFile(path, _map)
    return tokens if tokens.content_hash == record.get("hash") else None


def _write(
    path: Path, files: list[Path], tokenizer: Tokenizer, separator: int | None, *, total: int
) -> None:
    temporary = path.with_suffix(".tmp")
    remove_unfinished(path.parent, keep=temporary)
    try:
        with open(temporary, "wb") as out:
            write_tokens(out, files, tokenizer, separator, total=max(total, 1))
            out.flush()
            os.fsync(out.fileno())
        if not temporary.stat().st_size:
            raise InputError(
                f"data must hold text: {files[0]} becomes no token of {tokenizer.path}"
            )
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)  # what a bad file or Ctrl-C has left may be large


def remove_unfinished(folder: Path, *, keep: Path | None = None) -> None:
    """Removes the files and folders that killed processes left in a folder of the user's cache; one
    that is being written is locked, by this process if it is the one to `keep`.
    """
    for left in folder.glob("*.tmp"):
        if left == keep:
            continue
        with (
            contextlib.suppress(filelock.Timeout),
            filelock.FileLock(left.with_suffix(".lock"), timeout=0),
        ):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _record_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _map(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint32, "r")
