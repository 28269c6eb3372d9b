"""Tests of train/data/corpus.py: the sources of tokens, the data that is refused, and data at a
URL.
"""

import os
import re
import uuid
from pathlib import Path

import filelock
import fsspec
import numpy as np
import pytest

from train.config import DataConfig
from train.data import corpus
from train.data.corpus import fetch, open_source
from train.lifecycle.errors import InputError, StorageError

STORE = fsspec.filesystem("memory")


def open_path(path, *, vocab_size=256, token_dtype="uint16"):
    location = None if path is None else str(path)
    return open_source(location, DataConfig(token_dtype=token_dtype), vocab_size=vocab_size)


def test_the_standard_library_is_large_and_read_the_same_each_time():
    first, second = (open_path(None) for _ in range(2))
    assert first.tokens.size > 4_000_000
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert b"def dataclass(" in first.tokens.tobytes()


def test_a_text_file_is_mapped_as_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes("héllo".encode())
    opened = open_path(tmp_path / "a.txt")
    assert isinstance(opened.tokens, np.memmap)
    assert opened.is_text
    assert opened.tokens.tobytes().decode() == "héllo"


def test_the_files_of_a_folder_are_joined_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    for name, content in {
        "b/x.md": "2",
        "c.txt": "3",
        "a.txt": "1",
        ".hidden": "no",
        "empty.txt": "",
    }.items():
        (tmp_path / name).write_text(content)
    assert open_path(tmp_path).tokens.tobytes() == b"1\n2\n3"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_mapped_not_loaded(dtype, tmp_path):
    tokens = np.arange(1000, dtype=dtype)
    np.save(tmp_path / "a.npy", tokens)
    tokens.tofile(tmp_path / "a.bin")
    for name in ("a.npy", "a.bin"):
        opened = open_path(tmp_path / name, vocab_size=1000, token_dtype=dtype)
        assert isinstance(opened.tokens, np.memmap)
        assert not opened.is_text
        np.testing.assert_array_equal(opened.tokens, tokens)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("missing.txt", None, "there is no .*missing.txt"),
    ("empty.txt", b"", "empty.txt is empty"),
    ("empty.bin", b"", "empty.bin is empty"),
    ("picture.png", b"\x89PNG\0\0", "holds a zero byte"),
    ("odd.bin", b"123", "has 3 bytes, which is no multiple of the 2 bytes of a uint16"),
    ("torn.npy", b"\x93NUMPY\x01", "torn.npy cannot be read"),
    ("a.npy", np.zeros((2, 3), np.uint16), "must hold a one-dimensional array of uint8, uint16 or uint32"),
    ("a.npy", np.zeros(6, np.int64), "must hold a one-dimensional array of uint8, uint16 or uint32"),
    ("a.npy", np.zeros(0, np.uint16), "has no tokens"),
    ("a.npy", np.array([{}], object), "cannot be read"),  # pickled objects are never loaded
    ("", None, "has no file that is not empty"),
])  # fmt: skip
def test_a_bad_file_is_refused(name, content, message, tmp_path):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content, allow_pickle=True)
    with pytest.raises(InputError, match=message):
        open_path(tmp_path / name)


@pytest.mark.parametrize("index", [0, 99, 100, 250, 999])
def test_a_token_outside_the_vocabulary_is_found_in_any_chunk(index, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK_TOKENS", 100)
    tokens = np.zeros(1000, np.uint16)
    tokens[index] = 500
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(InputError, match=f"below model.vocab_size=500: token {index} of .* is 500"):
        open_path(tmp_path / "a.bin", vocab_size=500)
    open_path(tmp_path / "a.bin", vocab_size=501)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flaxasync" / "data"


@pytest.fixture
def location() -> str:
    return f"memory://bucket/{uuid.uuid4().hex}"


def write(location: str, content: bytes) -> None:
    STORE.pipe_file(location.removeprefix("memory:/"), content)


def test_a_file_is_fetched_once_for_each_version(location, cache):
    write(f"{location}/text.txt", b"first")
    path = fetch(f"{location}/text.txt", "data.path")
    assert (path.name, path.read_bytes()) == ("text.txt", b"first")
    modified = path.stat().st_mtime_ns
    assert fetch(f"{location}/text.txt", "data.path") == path
    assert path.stat().st_mtime_ns == modified
    write(f"{location}/text.txt", b"another version")
    assert fetch(f"{location}/text.txt", "data.path").read_bytes() == b"another version"
    assert not list(cache.glob("*.tmp"))


def test_files_in_the_cache_that_are_not_what_was_fetched_are_fetched_again(
    location, cache, capsys
):
    content = {"a.txt": b"a" * 100, "more/b.txt": b"b", "empty.txt": b""}
    for name, text in content.items():
        write(f"{location}/{name}", text)
    folder = fetch(location, "data.path")

    def set_back(path):
        path.write_bytes(b"c" * 100)
        os.utime(path, ns=(0, 0))

    for change in (
        lambda: os.truncate(folder / "a.txt", 25),
        lambda: set_back(folder / "a.txt"),
        lambda: (folder / "more" / "b.txt").unlink(),
        lambda: (folder / "more" / "c.txt").write_text("more"),
        lambda: (folder.parent / ".fetched.json").write_bytes(b"[" * 9999),
        lambda: (folder.parent / ".fetched.json").unlink(),
    ):
        change()
        assert fetch(location, "data.path") == folder
        found = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.txt")
        }
        assert found == content
        assert re.fullmatch(
            r"warning: \S+ was not what was fetched from \S+; it was fetched again\n",
            capsys.readouterr().err,
        )
        fetch(location, "data.path")
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["../../evil", "a/../../../evil", "..", "a\0b"])
def test_an_object_of_a_store_that_leads_out_of_the_cache_is_refused(name, location, cache):
    store, root = fsspec.core.url_to_fs(f"{location}/texts")
    store.pipe(f"{root}/a.txt", b"text")
    store.store[f"{root}/{name}"] = store.store[f"{root}/a.txt"]
    before = sorted(cache.rglob("*"))
    with pytest.raises(
        InputError,
        match=r"data.path=memory://.* cannot be read: ValueError: it has an object with a",
    ):
        fetch(f"{location}/texts", "data.path")
    assert sorted(cache.rglob("*")) == before


def test_a_fetch_that_is_cut_off_is_not_taken_for_the_data(location, cache, monkeypatch):
    write(f"{location}/texts/a.txt", b"a")
    write(f"{location}/texts/more/b.txt", b"b")
    get, errors = (
        type(STORE).get_file,
        [ConnectionError("the network is down"), PermissionError("no rights")],
    )

    def refuse(self, name, path, **options):
        if name.endswith("b.txt") and errors:
            raise errors.pop(0)
        get(self, name, path, **options)

    monkeypatch.setattr(type(STORE), "get_file", refuse)
    with pytest.raises(StorageError, match="did not answer: ConnectionError: the network is down"):
        fetch(f"{location}/texts/", "data.path")
    with pytest.raises(
        InputError, match=r"data.path=memory://.* cannot be read: PermissionError: no rights"
    ):
        fetch(f"{location}/texts/", "data.path")
    assert all(path.suffix == ".lock" for path in cache.iterdir())
    folder = fetch(f"{location}/texts/", "data.path")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.txt")} == {
        "a.txt",
        "more/b.txt",
    }


def test_what_a_killed_fetch_left_is_removed_and_what_another_process_fetches_stays(
    location, cache
):
    write(f"{location}/a.txt", b"a")
    left = cache / "0123.tmp"
    fetched_elsewhere = cache / "4567.tmp"
    for folder in (left, fetched_elsewhere):
        (folder / "texts").mkdir(parents=True)
        (folder / "texts" / "half.txt").write_text("ha")
    with filelock.FileLock(fetched_elsewhere.with_suffix(".lock")):
        fetch(f"{location}/a.txt", "data.path")
    assert not left.exists()
    assert fetched_elsewhere.exists()


def test_a_corpus_at_a_url_is_read_as_a_local_one(location):
    write(f"{location}/tokens.bin", np.arange(100, dtype=np.uint16).tobytes())
    opened = open_source(f"{location}/tokens.bin", DataConfig(), vocab_size=100)
    assert (opened.name, opened.is_text, opened.tokens.tolist()) == (
        f"{location}/tokens.bin",
        False,
        list(range(100)),
    )
    with pytest.raises(InputError, match=f"there is no {location}/nothing"):
        open_source(f"{location}/nothing", DataConfig(), vocab_size=100)
