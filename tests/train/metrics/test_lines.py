"""Tests of train/metrics/lines.py and output.py: each step has one line whatever happened, and no
line takes others.

The last test is about what is recorded of the code of a run.
"""

import errno
import json
import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.lifecycle.errors import StorageError
from train.metrics import lines, output
from train.metrics.lines import Events, MetricsFile, read_events, read_metrics, repair
from train.metrics.output import write_atomically


def fill(path, steps):
    path.write_text(
        "".join(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in steps)
    )
    return path


def steps_in(path):
    return [line["step"] for line in read_metrics(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@given(done=st.integers(0, 30), restored=st.integers(0, 30), cut=st.integers(0, 25))
def test_each_step_has_one_line_after_a_restart(done, restored, cut, tmp_path_factory):
    """One process is killed while it writes the file, then another one continues from a
    checkpoint.
    """
    path = fill(tmp_path_factory.mktemp("metrics") / "metrics.jsonl", range(1, done + 1))
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    restored = min(restored, len(read_metrics(path)))
    file = MetricsFile(path, start=restored)
    file.write([{"step": step, "loss": 1.0 / step} for step in range(restored + 1, 41)])
    file.close()
    assert read_metrics(path) == [{"step": step, "loss": 1.0 / step} for step in range(1, 41)]


@pytest.mark.parametrize(
    "broken", [b"garbage\n", b"[1]\n", b'{"loss": 1}\n', b"\0\0\0\n", b'{"step": 3, "loss\n']
)
@pytest.mark.parametrize("where", [0, 2, 4])
def test_an_invalid_line_is_moved_aside_and_takes_no_other_with_it(broken, where, path, capsys):
    valid = fill(path, [1, 2, 4, 5]).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*valid[:where], broken, *valid[where:]]))
    repair(path, start=100)
    assert steps_in(path) == [1, 2, 4, 5]
    aside = path.with_name("metrics.invalid.jsonl")
    assert aside.exists()
    said = capsys.readouterr().err
    assert f"{path} had 1 invalid lines, which were moved to {aside}" in said
    assert (
        f"{path} lacks 96 of the 100 steps that were done before; they may still be in tensorboard/"
        in said
    )


def test_an_incomplete_last_line_is_dropped_silently_because_its_step_is_repeated(path, capsys):
    with open(fill(path, [1, 2]), "a") as file:
        file.write('{"step": 3, "loss')
    repair(path, start=2)
    assert (steps_in(path), capsys.readouterr().err) == ([1, 2], "")
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_the_last_line_of_a_step_counts(path):
    path.write_text('{"step": 2, "loss": 1}\n{"step": 1, "loss": 1}\n{"step": 2, "loss": 3}\n')
    assert read_metrics(path) == [{"step": 1, "loss": 1}, {"step": 2, "loss": 3}]


@pytest.mark.parametrize(("content", "kept"), [
    (b"", 0),
    (b'{"event": "', 0),
    (b'{"event": "a"}\n', 1),
    (b'{"event": "a"}\n{"event": "b"}\n{"eve', 2),
    (b'{"event": "a"}\n' + b"x" * 9999, 1),
])  # fmt: skip
def test_an_incomplete_event_is_removed_before_another_one_is_appended(content, kept, path):
    path.write_bytes(content)
    events = Events(path)
    events.add("start", step=3)
    events.close()
    assert len(read_events(path)) == len(path.read_bytes().splitlines()) == kept + 1
    assert (read_events(path)[-1]["event"], read_events(path)[-1]["step"]) == ("start", 3)


def test_what_a_full_disk_does_not_take_is_written_later_and_said_once(path, capsys, monkeypatch):
    """The disk takes three bytes of the first line, and no more until there is room."""
    write, room = os.write, [3]

    def little_room(number, content):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(number, content[: room[0]])
        room[0] -= taken
        return taken

    file = MetricsFile(path, start=0)
    monkeypatch.setattr(lines.os, "write", little_room)
    for step in (1, 2):
        file.write([{"step": step}])
    assert capsys.readouterr().err == (
        f"warning: {path} cannot be written: No space left on device; what it lacks waits in "
        "memory\n"
    )
    with pytest.raises(StorageError, match="could not be written: No space left on device"):
        file.flush()
    room[0] = 1000
    file.flush()
    assert steps_in(path) == [1, 2]
    room[0] = 0
    file.write([{"step": 3}])
    file.close()
    assert f"{path} lacks its last 12 bytes" in capsys.readouterr().err


def test_two_processes_replace_one_file_at_once(path, monkeypatch):
    """The second process writes the whole file between the write and the rename of the first
    one.
    """
    fsync, own = os.fsync, os.getpid()

    def other_writes(file):
        monkeypatch.setattr(output.os, "fsync", fsync)
        monkeypatch.setattr(output.os, "getpid", lambda: own + 1)
        write_atomically(path, "other")
        assert path.read_text() == "other"

    monkeypatch.setattr(output.os, "fsync", other_writes)
    write_atomically(path, "own")
    assert path.read_text() == "own"
    assert list(path.parent.iterdir()) == [path]


def test_the_version_of_the_code_is_read_without_writing_to_the_repository(tmp_path, monkeypatch):
    def git(*arguments):
        settings = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", tmp_path, *settings, *arguments], capture_output=True, check=True
        ).stdout

    git("init")
    file, index = tmp_path / "code.py", tmp_path / ".git" / "index"
    file.write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "-m", "code")
    os.utime(file, (10**9, 10**9))  # the index is out of date, and git would refresh it
    before = index.read_bytes()
    monkeypatch.setattr(lines, "__file__", str(file))
    assert lines.code_version() == git("rev-parse", "HEAD").decode().strip()
    assert index.read_bytes() == before
    git("status")
    assert index.read_bytes() != before, (
        "git did not want to refresh the index, so that the test shows nothing"
    )
    file.write_text("x = 22\n")
    assert lines.code_version().endswith("+changes")
