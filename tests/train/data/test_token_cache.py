"""Tests of train/data/token_cache.py: whatever happens to a file of tokens, a run gets the right
ones or is refused.
"""

import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.train.data.test_tokenizer import train_tokenizer
from train.config import DataConfig
from train.data import token_cache
from train.data.corpus import open_corpora
from train.lifecycle.errors import exit_code

SEED = 45


class Cache:
    """A text and its file of tokens, as the first run has left them."""

    def __init__(self, folder: Path):
        self.folder, self.text, self.tokenizer = folder, folder / "a.txt", folder / "tokenizer.json"

    def open(self) -> np.ndarray:
        config = DataConfig(path=str(self.text), tokenizer=str(self.tokenizer), separator=1)
        return np.array(open_corpora(config, vocab_size=300)["data"].tokens)

    def file(self, suffix: str) -> Path:
        (found,) = (self.folder / "tokens").glob(f"*{suffix}")
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory, text) -> tuple[Path, np.ndarray]:
    """The folder of a cache, which no test changes, and the right tokens."""
    folder = tmp_path_factory.mktemp("cache")
    shutil.copy(text, folder / "a.txt")
    train_tokenizer(folder / "tokenizer.json", text)
    return folder, Cache(folder).open()


@pytest.fixture
def expected(made) -> np.ndarray:
    return made[1]


@pytest.fixture
def cache(made, tmp_path) -> Cache:
    return Cache(Path(shutil.copytree(made[0], tmp_path / "cache")))


@pytest.mark.parametrize(
    "left", [0.25, 0.5, 0, 2], ids=["a quarter", "half a token more", "nothing", "twice"]
)
def test_a_file_of_another_size_is_made_again(left, cache, expected, capsys):
    content = cache.file(".bin").read_bytes()
    size = int(len(content) * left) + (2 if left == 0.5 else 0)
    cache.file(".bin").write_bytes((content * 2)[:size])
    np.testing.assert_array_equal(cache.open(), expected)
    assert capsys.readouterr().err.endswith(
        ".bin was not the file of tokens that had been written; it was made again\n"
    )
    np.testing.assert_array_equal(cache.open(), expected)
    assert capsys.readouterr().err == ""


def test_one_other_token_is_noticed_although_the_time_of_the_file_is_kept(cache, expected):
    path = cache.file(".bin")
    before, content = path.stat(), bytearray(path.read_bytes())
    content[400] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    np.testing.assert_array_equal(cache.open(), expected)


def test_a_text_that_was_edited_with_its_time_kept_has_other_tokens(cache, expected):
    before, content = cache.text.stat(), cache.text.read_bytes()
    cache.text.write_bytes(content.replace(b"brown", b"green"))
    os.utime(cache.text, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = cache.open()
    assert not np.array_equal(other, expected)
    cache.text.write_bytes(content)
    np.testing.assert_array_equal(cache.open(), expected)


def test_a_text_that_was_moved_keeps_its_tokens(cache, expected, capsys):
    cache.text = cache.text.rename(cache.folder / "b.txt")
    np.testing.assert_array_equal(cache.open(), expected)
    assert capsys.readouterr() == ("", "")


def test_a_text_that_changes_while_it_becomes_tokens_is_refused(cache, monkeypatch, capsys):
    shutil.rmtree(cache.folder / "tokens")
    write = token_cache.write_tokens

    def write_late(*arguments, **options):
        write(*arguments, **options)
        cache.text.write_bytes(b"another text")

    monkeypatch.setattr(token_cache, "write_tokens", write_late)
    assert exit_code(lambda: cache.open() is None, outcome="", memory_advice="") == 2
    assert "data must stay as they are while they become tokens" in capsys.readouterr().err
    assert not list((cache.folder / "tokens").glob("*.bin"))


def damage(cache: Cache, draw: random.Random) -> str:
    """Damages a cache in a random way, and returns what was done."""
    suffix = draw.choice([".bin", ".bin", ".json"])
    path = cache.file(suffix)
    content = bytearray(path.read_bytes())
    position = draw.randrange(len(content))
    kinds: dict[str, Callable[[], object]] = {
        "cut": lambda: os.truncate(path, position),
        "cut to whole tokens": lambda: os.truncate(path, position // 4 * 4),
        "grown": lambda: path.write_bytes(content + draw.randbytes(draw.randrange(1, 9000))),
        "grown to 2 TiB": lambda: os.truncate(path, 1 << 41),
        "a bit flipped": lambda: path.write_bytes(_flipped(content, position, draw)),
        "a range zeroed": lambda: path.write_bytes(
            content[:position] + bytes(len(content) - position)
        ),
        "other bytes": lambda: path.write_bytes(draw.randbytes(len(content))),
        "swapped halves": lambda: path.write_bytes(content[position:] + content[:position]),
        "removed": path.unlink,
        "a folder": lambda: (path.unlink(), path.mkdir()),
        "a pipe": lambda: (path.unlink(), os.mkfifo(path)),
        "a link to nothing": lambda: (path.unlink(), path.symlink_to("nothing")),
        "a link to itself": lambda: (path.unlink(), path.symlink_to(path.name)),
        "a link to zeros": lambda: (path.unlink(), path.symlink_to("/dev/zero")),
        "a link to the text": lambda: (path.unlink(), path.symlink_to(cache.text)),
        "another record": lambda: path.with_suffix(".json").write_text(
            draw.choice(
                [
                    "[" * 9999,
                    '{"bytes": 4}',
                    '{"bytes": "9", "hash": 1}',
                    "[]",
                    "9" * 5000,
                    '{"bytes": true}',
                ]
            )
        ),
        "a record of other tokens": lambda: _write_whole(
            cache.file(".bin"), content[: position // 4 * 4 or 4], draw
        ),
        "a lock that is a folder": lambda: (
            path.with_suffix(".lock").unlink(),
            path.with_suffix(".lock").mkdir(),
        ),
        "what a killed process left": lambda: path.with_suffix(".tmp").write_bytes(
            content[:position]
        ),
        "no folder": lambda: shutil.rmtree(path.parent),
        "a file for a folder": lambda: (shutil.rmtree(path.parent), path.parent.write_text("")),
    }
    kind = draw.choice(sorted(kinds))
    kinds[kind]()
    return f"{suffix}: {kind} at {position}"


def _flipped(content: bytearray, position: int, draw: random.Random) -> bytearray:
    return (
        content[:position]
        + bytes([content[position] ^ 1 << draw.randrange(8)])
        + content[position + 1 :]
    )


def _write_whole(path: Path, content: bytes, draw: random.Random) -> None:
    """Writes tokens of another size and a record of this size, with a hash that is not theirs."""
    path.write_bytes(content)
    path.with_suffix(".json").write_text(
        json.dumps({"bytes": len(content), "hash": draw.randbytes(16).hex()})
    )


@pytest.mark.slow
def test_after_random_damages_the_tokens_are_right_or_refused(made, tmp_path, capsys):
    """Each takes less than 20 s and 2 GiB. DAMAGES of the environment sets how many are tried."""
    draw = random.Random(SEED)
    outcomes, right = {0: 0, 2: 0}, made[1]
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(int(os.environ.get("DAMAGES", "60"))):
        cache = Cache(Path(shutil.copytree(made[0], tmp_path / str(number))))
        done = damage(cache, draw)
        tokens = list[np.ndarray]()
        began = time.monotonic()
        code = exit_code(
            lambda cache=cache, tokens=tokens: tokens.append(cache.open()),
            outcome="",
            memory_advice="",
        )
        assert time.monotonic() - began < 20, done
        said = capsys.readouterr().err
        if code == 0:
            np.testing.assert_array_equal(tokens[0], right, err_msg=done)
        else:
            assert code == 2, done
            assert said.startswith("error: "), done
            assert said.count("\n") == 1, done
        outcomes[code] += 1
        shutil.rmtree(cache.folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 2 << 20
    assert outcomes[0] > 2 * outcomes[2] > 0
