"""Tests of train/lifecycle/files.py: several processes may replace a file; incomplete lines are not continued."""

import os

import pytest

from train.lifecycle import files
from train.lifecycle.files import LineFile, read_lines, write_atomically


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


@pytest.mark.parametrize(
    ("content", "kept"),
    [(b"", 0), (b'{"a": 1', 0), (b'{"a": 1}\n', 1), (b'{"a": 1}\n{"a": 2}\n{"a": 3', 2), (b"{}\n" + b"x" * 9999, 1)],
)
def test_an_incomplete_last_line_is_removed_before_lines_are_appended(content, kept, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    file = LineFile(path, pytest.fail)
    file.append([{"event": "start"}])
    file.close()
    lines, bad = read_lines(path)
    assert (len(lines), lines[-1], bad) == (kept + 1, {"event": "start"}, [])
