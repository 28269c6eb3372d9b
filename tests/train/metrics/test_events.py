"""Tests of train/metrics/events.py: what is recorded of the code of a run."""

import os
import subprocess

from train.metrics import lines as events


def test_the_version_of_the_code_is_read_without_writing_to_the_repository(tmp_path, monkeypatch):
    def git(*arguments):
        settings = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", "-C", tmp_path, *settings, *arguments], capture_output=True, check=True).stdout

    git("init")
    file, index = tmp_path / "code.py", tmp_path / ".git" / "index"
    file.write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "-m", "code")
    os.utime(file, (10**9, 10**9))  # the index is out of date, and git would refresh it
    before = index.read_bytes()
    monkeypatch.setattr(events, "__file__", str(file))
    assert events.code_version() == git("rev-parse", "HEAD").decode().strip()
    assert index.read_bytes() == before
    git("status")
    assert index.read_bytes() != before, "git did not want to refresh the index, so that the test shows nothing"
    file.write_text("x = 22\n")
    assert events.code_version().endswith("+changes")
