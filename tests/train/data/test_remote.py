"""Tests of train/data/remote.py: data at a URL are fetched once for each version; and which URLs are refused."""

import importlib.util
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest

from train.config import DataConfig
from train.config.command import DEFAULT_PRESET, parse
from train.data.corpus import open_source
from train.data.remote import fetch
from train.lifecycle.errors import InputError, StorageError

STORE = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flaxasync" / "data"


@pytest.fixture
def location() -> str:
    return f"memory://bucket/{uuid.uuid4().hex}"


def write(location: str, content: bytes) -> None:
    STORE.pipe_file(location.removeprefix("memory:/"), content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workdir", "gs://bucket/run"], "workdir must be a folder of this machine, .*--checkpoint.folder may be gs"),
        (["--checkpoint.folder", "s3://bucket/run"], "checkpoint.folder must be .*, or gs://bucket/folder: got 's3://"),
        (["--checkpoint.folder", "gs://bucket"], "checkpoint.folder must be .*, or gs://bucket/folder: got 'gs://buck"),
        (["--init_from", "gs://bucket/run"], "init_from=gs://bucket/run needs the package gcsfs"),
    ],
)
def test_a_folder_that_cannot_be_opened_is_refused(options, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=message):
        parse([str(DEFAULT_PRESET), *options])


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


def test_a_folder_is_fetched_with_its_subfolders(location):
    write(f"{location}/texts/a.txt", b"a")
    write(f"{location}/texts/more/b.txt", b"b")
    folder = fetch(f"{location}/texts/", "data.path")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.txt")} == {"a.txt", "more/b.txt"}


def test_a_fetch_that_is_cut_off_is_not_taken_for_the_data(location, cache, monkeypatch):
    write(f"{location}/texts/a.txt", b"a")
    write(f"{location}/texts/b.txt", b"b")
    get = type(STORE).get_file

    def refuse(self, name, path, **options):
        if name.endswith("b.txt"):
            raise ConnectionError("the network is down")
        get(self, name, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(STORE), "get_file", refuse)
        with pytest.raises(StorageError, match="did not answer: ConnectionError: the network is down"):
            open_source(f"{location}/texts", DataConfig(), vocab_size=256)
    assert not list(cache.iterdir())
    assert len(list(fetch(f"{location}/texts", "data.path").iterdir())) == 2


def test_data_that_may_not_be_read_are_a_mistake_of_the_person(location, monkeypatch):
    def refuse(self, *arguments, **options):
        raise PermissionError("no rights")

    write(f"{location}/a.txt", b"a")
    monkeypatch.setattr(type(STORE), "get_file", refuse)
    with pytest.raises(InputError, match=r"data.path=memory://.* cannot be read: PermissionError: no rights"):
        fetch(f"{location}/a.txt", "data.path")


def test_a_corpus_at_a_url_is_read_as_a_local_one(location):
    write(f"{location}/tokens.bin", np.arange(100, dtype=np.uint16).tobytes())
    corpus = open_source(f"{location}/tokens.bin", DataConfig(), vocab_size=100)
    assert (corpus.name, corpus.is_text, corpus.tokens.tolist()) == (f"{location}/tokens.bin", False, list(range(100)))
    with pytest.raises(InputError, match=f"there is no {location}/nothing"):
        open_source(f"{location}/nothing", DataConfig(), vocab_size=100)
