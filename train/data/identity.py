"""The identity of the training data: its size, its type, its tokenizer, and a hash of samples and of all tokens.

A checkpoint records it, because the saved position in the data has no meaning in other data. The hash of samples is
computed at every start. So is the hash of all tokens, except for large files that have not been modified since it was
computed: `HashCache` keeps it in the workdir.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from train.data.corpus import Corpus
from train.lifecycle.files import write_atomically

SAMPLES, SAMPLE_TOKENS = 64, 4096  # the hash of samples reads this many places, and this many tokens at each
CHUNK_BYTES = 1 << 24  # threads hash chunks of this size
CACHED_BYTES = 1 << 26  # files of at least this size are not hashed again unless they were modified


@dataclasses.dataclass(frozen=True)
class Identity:
    """What is known of the tokens of one data source.

    Attributes:
      tokens: Number of tokens.
      dtype: Type of the tokens as they are stored.
      tokenizer: Name of the tokenizer, "bytes" for text, or "unnamed".
      sampled: Hash of samples that are spread evenly over the tokens.
      whole: Hash of all tokens.
    """

    tokens: int
    dtype: str
    tokenizer: str
    sampled: str
    whole: str


class HashCache:
    """Hashes of large files by path, with the size and the modification time for which they hold."""

    def __init__(self, path: Path):
        self._path = path

    def whole(self, corpus: Corpus) -> str:
        """Returns the hash of all tokens of a corpus, from the cache if its file is large and was not modified."""
        if corpus.file is None or corpus.tokens.nbytes < CACHED_BYTES:
            return hash_all(corpus.tokens)
        status = os.stat(corpus.file)
        version = {"size": status.st_size, "modified_ns": status.st_mtime_ns, "dtype": str(corpus.tokens.dtype)}
        known = self._read()
        entry = known.get(str(corpus.file), {})
        if not isinstance(entry, dict) or {name: entry.get(name) for name in version} != version:
            entry = version | {"whole": hash_all(corpus.tokens)}
            with contextlib.suppress(OSError):  # without the cache, the file is hashed again at the next start
                write_atomically(self._path, json.dumps(known | {str(corpus.file): entry}, indent=2) + "\n")
        return str(entry["whole"])

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def identify(corpus: Corpus, tokenizer: str | None, cache: HashCache) -> Identity:
    """Computes the identity of a corpus."""
    return Identity(
        tokens=corpus.tokens.size,
        dtype=str(corpus.tokens.dtype),
        tokenizer=corpus.tokenizer.name
        if corpus.tokenizer
        else tokenizer or ("bytes" if corpus.is_text else "unnamed"),
        sampled=hash_samples(corpus.tokens),
        whole=cache.whole(corpus),
    )


def differences(saved: dict[str, dict[str, Any]], now: dict[str, Identity]) -> list[str]:
    """Says how the data of this start differ from those of a checkpoint.

    Args:
      saved: Identity of each source by its name, as a checkpoint records it.
      now: Identity of each source by its name.

    Returns:
      One phrase for each source that differs.
    """
    found = []
    for name in dict.fromkeys([*now, *saved]):
        if name not in saved or name not in now:
            found.append(f"source {name} is {'only here' if name in now else 'only there'}")
            continue
        new, old = dataclasses.asdict(now[name]), saved[name]
        changed = [field for field in new if new[field] != old.get(field)]
        facts = [f"{field} was {old.get(field)} and is {new[field]}" for field in changed if field in _READABLE]
        if changed and not facts:
            facts = ["it has as many tokens, and other ones"]
        if facts:
            found.append(f"source {name}: {', '.join(facts)}")
    return found


def hash_samples(tokens: np.ndarray) -> str:
    """Hashes samples that are spread evenly over the tokens, the first and the last ones among them."""
    digest = hashlib.blake2b(digest_size=16)
    for start in np.linspace(0, max(tokens.size - SAMPLE_TOKENS, 0), SAMPLES).astype(np.int64):
        digest.update(np.ascontiguousarray(tokens[start : start + SAMPLE_TOKENS]).tobytes())
    return digest.hexdigest()


def hash_all(tokens: np.ndarray) -> str:
    """Hashes the hashes of all chunks, which threads compute side by side."""
    each = CHUNK_BYTES // tokens.dtype.itemsize
    starts = range(0, tokens.size, each)
    digest = hashlib.blake2b(digest_size=16)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for part in pool.map(lambda start: hashlib.blake2b(tokens[start : start + each].tobytes()).digest(), starts):
            digest.update(part)
    return digest.hexdigest()


_READABLE = frozenset({"tokens", "dtype", "tokenizer"})
