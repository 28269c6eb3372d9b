"""Tests of train/data/mapped_files.py: a file that changes while a run reads it is noticed before
anything is saved.
"""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from train.data.mapped_files import MappedFile, hash_file
from train.lifecycle.errors import InputError


def rewrite(path: Path, content: bytes) -> None:
    """Writes a file in place."""
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(200)))
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture
def mapped(path) -> MappedFile:
    return MappedFile(path, lambda path: np.memmap(path, np.uint8, "r"))


def overwrite(path):
    rewrite(path, bytes(200))


def grow(path):
    with open(path, "ab") as file:
        file.write(b"more")


def overwrite_and_restore(path):
    content = path.read_bytes()
    rewrite(path, bytes(200))
    rewrite(path, content)


def overwrite_and_set_the_time_back(path):
    before = path.stat()
    rewrite(path, bytes(200))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def write_through_a_map(path):
    shared = np.memmap(path, np.uint8, "r+")
    shared[7] = 0
    shared.flush()


CHANGES = (
    overwrite,
    grow,
    overwrite_and_restore,
    overwrite_and_set_the_time_back,
    write_through_a_map,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_was_written_is_refused(change, mapped, path):
    mapped.require_unchanged("data.path")
    change(path)
    says = (
        rf"^data.path: {path} must stay as it is while a run reads it: it had .*200 bytes, "
        rf"written on 2001-09-09 at "
    )
    with pytest.raises(InputError, match=says):
        mapped.require_unchanged("data.path")


def test_what_does_not_change_the_content_is_allowed(mapped, path, tmp_path):
    """Others may rename, link or protect the file, and put another one in its place, which the map
    is not of.
    """
    first = mapped.tokens.copy()
    for change in (
        lambda: path.chmod(0o400),
        lambda: os.link(path, tmp_path / "link"),
        lambda: os.utime(path, ns=(1, path.stat().st_mtime_ns)),
        lambda: path.rename(tmp_path / "moved"),
        lambda: path.write_bytes(b"another"),
        lambda: path.unlink(),
    ):
        time.sleep(0.01)  # longer than the clock of the file system ticks
        change()
        mapped.require_unchanged("data.path")
    np.testing.assert_array_equal(mapped.tokens, first)
    assert mapped.content_hash == hash_file(tmp_path / "moved")


def test_an_empty_file_has_a_hash(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"b")
    assert hash_file(tmp_path / "a") != hash_file(tmp_path / "b")
