"""Tests of train/data/remote.py: which locations are understood, and that data are fetched once for each version."""

import importlib.util
import os
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest

from train.config import DataConfig
from train.config.command import DEFAULT_PRESET, parse
from train.data.corpus import open_source
from train.data.remote import fetch, list_objects, open_store, require_usable
from train.lifecycle.errors import InputError, StorageError

STORE = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flaxasync" / "data"


@pytest.fixture
def location() -> str:
    return f"memory://bucket/{uuid.uuid4().hex}"


@pytest.fixture
def installed(monkeypatch):
    """A function that makes a set of packages the ones that are installed."""

    def install(*packages: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found" if name in packages else None)

    return install


def write(location: str, content: bytes) -> None:
    STORE.pipe_file(location.removeprefix("memory:/"), content)


@pytest.mark.parametrize(
    ("location", "package"), [("gs://bucket/run", "gcsfs"), ("s3://bucket/run", "s3fs")], ids=["gs", "s3"]
)
def test_a_store_needs_its_client(location, package, installed):
    installed(package)
    require_usable(location, "workdir")
    installed()
    with pytest.raises(InputError, match=rf"workdir={location} needs the package {package}, which is not installed"):
        require_usable(location, "workdir")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh.distributed", "True"], "workdir must be a folder that all processes see where mesh.distributed is"),
        (["--dry-run", "--topology", "v5e:2x4"], "the workdir of a dry run must be a path of this machine: got s3:"),
    ],
    ids=["several processes", "dry run"],
)
def test_what_needs_a_local_workdir_refuses_another_one(options, message, installed):
    installed("s3fs")
    with pytest.raises(InputError, match=message):
        parse([str(DEFAULT_PRESET), "--workdir", "s3://bucket/run", *options])


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


def test_a_fetch_that_is_cut_off_is_not_taken_for_the_data(location, monkeypatch):
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
            fetch(f"{location}/texts", "data.path", retry_seconds=0)
    assert len(list(fetch(f"{location}/texts", "data.path").iterdir())) == 2


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")], ids=["gone", "cut"]
)
def test_a_copy_that_was_damaged_is_made_again(location, damage, cache):
    write(f"{location}/texts/a.txt", b"a")
    write(f"{location}/texts/b.txt", b"b")
    damage(fetch(f"{location}/texts", "data.path") / "b.txt")
    folder = fetch(f"{location}/texts", "data.path")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.txt": b"a", "b.txt": b"b"}
    assert len(list(cache.iterdir())) == 1


def test_data_that_may_not_be_read_are_a_mistake_of_the_person(location, monkeypatch):
    def refuse(self, *arguments, **options):
        raise PermissionError("no rights")

    write(f"{location}/a.txt", b"a")
    monkeypatch.setattr(type(STORE), "get_file", refuse)
    with pytest.raises(InputError, match=r"data.path=memory://.* cannot be used: PermissionError: no rights"):
        fetch(f"{location}/a.txt", "data.path")


def test_objects_that_mark_folders_are_left_out(location, monkeypatch):
    write(f"{location}/texts/a.txt", b"a")
    find = type(STORE).find

    def find_with_mark(self, path, **options):
        return {f"{path}/more/": {"size": 0, "type": "file"}} | find(self, path, **options)

    monkeypatch.setattr(type(STORE), "find", find_with_mark)  # this store cannot hold such an object
    assert list(list_objects(*open_store(f"{location}/texts"))) == ["a.txt"]
    assert [path.name for path in fetch(f"{location}/texts", "data.path").iterdir()] == ["a.txt"]


def test_unfinished_copies_of_killed_processes_are_removed(location, cache):
    old, recent = cache / "a.host.1.tmp", cache / "b.host.1.tmp"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    write(f"{location}/a.txt", b"a")
    fetch(f"{location}/a.txt", "data.path")
    assert not old.exists()
    assert recent.exists()


def test_a_corpus_in_a_store_is_read_as_a_local_one(location):
    write(f"{location}/tokens.bin", np.arange(100, dtype=np.uint16).tobytes())
    corpus = open_source(f"{location}/tokens.bin", DataConfig(), vocab_size=100)
    assert (corpus.name, corpus.is_text, corpus.tokens.tolist()) == (f"{location}/tokens.bin", False, list(range(100)))
    with pytest.raises(InputError, match=f"data.path must be a file or a folder: there is no {location}/nothing"):
        open_source(f"{location}/nothing", DataConfig(), vocab_size=100)
