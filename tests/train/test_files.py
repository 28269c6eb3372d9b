"""Tests of train/files.py: several processes may replace one file, and an incomplete last line is never continued."""

import os

import pytest

from train import files
from train.files import LineFile, read_lines, write_atomically


def test_two_processes_replace_one_file_at_once(tmp_path, monkeypatch):
    """The second process writes the whole file between the write and the rename of the first one."""
    path, fsync, own = tmp_path / "corpus.json", os.fsync, os.getpid()

    def other_writes(file):
        monkeypatch.setattr(files.os, "fsync", fsync)
        monkeypatch.setattr(files.os, "getpid", lambda: own + 1)
        write_atomically(path, "other")
        assert path.read_text() == "other"

    monkeypatch.setattr(files.os, "fsync", other_writes)
    write_atomically(path, "own")
    assert path.read_text() == "own"
    assert list(tmp_path.iterdir()) == [path]
