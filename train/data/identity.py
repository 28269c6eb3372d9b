"""The identity of training data, which a checkpoint records: its position has no meaning in other data."""

import concurrent.futures
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from train.data.corpus import Corpus
from train.lifecycle.files import write_atomically

CHUNK_BYTES = 1 << 24  # threads hash chunks of this size
CACHED_BYTES = 1 << 26  # files of at least this size are not hashed again unless they were modified


def identify(corpus: Corpus, tokenizer: str | None, cache: Path) -> dict[str, Any]:
    """Returns the number of tokens, their type, the name of their tokenizer and the hash of all of them, as JSON data.

    Args:
      corpus: The tokens.
      tokenizer: The name that the configuration gives to the tokenizer of a file of tokens.
      cache: A file with the hashes of large files, which hold for one size and one time of modification.
    """
    if corpus.tokenizer:
        tokenizer = corpus.tokenizer.name
    return {
        "tokens": corpus.tokens.size,
        "dtype": str(corpus.tokens.dtype),
        "tokenizer": tokenizer or ("bytes" if corpus.is_text else "unnamed"),
        "content_hash": _cached_hash(corpus, cache),
    }


def hash_all(tokens: np.ndarray) -> str:
    """Hashes the hashes of all chunks, which threads compute side by side."""
    each = CHUNK_BYTES // tokens.dtype.itemsize
    starts = range(0, tokens.size, each)
    digest = hashlib.blake2b(digest_size=16)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for part in pool.map(lambda start: hashlib.blake2b(tokens[start : start + each].tobytes()).digest(), starts):
            digest.update(part)
    return digest.hexdigest()


def _cached_hash(corpus: Corpus, cache: Path) -> str:
    if corpus.file is None or corpus.tokens.nbytes < CACHED_BYTES:
        return hash_all(corpus.tokens)
    status = corpus.file.stat()
    version = [str(corpus.tokens.dtype), status.st_size, status.st_mtime_ns]
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(cache.read_text()))
    entry = known.get(str(corpus.file))
    if not isinstance(entry, dict) or entry.get("version") != version:
        entry = {"version": version, "hash": hash_all(corpus.tokens)}
        with contextlib.suppress(OSError):  # without the cache, the file is hashed again at the next start
            write_atomically(cache, json.dumps(known | {str(corpus.file): entry}, indent=2) + "\n")
    return str(entry["hash"])
