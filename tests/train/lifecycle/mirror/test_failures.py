"""Tests of train/lifecycle/mirror.py with stores that fail, hang or refuse, and with runs that end with an error."""

import re
import threading
import time

import pytest

from tests.train.lifecycle.mirror.store import STORE, checkpoint, in_store, save, upload, wait
from train.lifecycle.errors import InputError, StorageError
from train.lifecycle.mirror import Mirror, open_mirror


def test_a_store_that_fails_is_tried_again(open_copy, location, tmp_path, before_put):
    here, warnings, refused = tmp_path / "here", list[str](), list[str]()
    mirror = open_copy(here, warn=warnings.append)
    save(here, 5)

    def fail_once(target: str) -> None:
        if not refused and target.endswith("array"):
            refused.append(target)
            raise ConnectionError("the network is down")

    before_put(fail_once)
    upload(mirror)
    assert ".incomplete/5" in in_store(location)
    assert len(warnings) == 1
    assert "could not be written: ConnectionError: the network is down; it is tried again" in warnings[0]
    mirror.close(seconds=0)
    assert in_store(location) == checkpoint(5)


def test_a_store_that_fails_for_long_ends_the_run_and_names_the_working_copy(open_copy, tmp_path, before_put):
    here = tmp_path / "here"
    mirror = open_copy(here)
    save(here, 5)

    def fail(target: str) -> None:
        raise ConnectionError("the network is down")

    before_put(fail)
    with pytest.raises(StorageError, match=rf"Nothing is lost: the working copy is {re.escape(str(here))}"):
        mirror.close(seconds=0.5)


def test_a_store_that_hangs_ends_the_run(open_copy, tmp_path, before_put, monkeypatch):
    here, released = tmp_path / "here", threading.Event()
    mirror = open_copy(here)
    save(here, 5)
    before_put(lambda target: released.wait())
    monkeypatch.setattr("train.lifecycle.mirror.LONGEST_OBJECT", 0.2)
    with pytest.raises(StorageError, match="the upload was not finished in time"):
        mirror.close(seconds=0)
    released.set()
    wait(mirror)


@pytest.fixture
def run_that_raises(location, tmp_path):
    """A function (error, steps, warn) that trains and raises an error, with all steps saved and none uploaded."""

    def run(error: BaseException, steps: int, warn) -> None:
        with open_mirror(location, tmp_path, seconds=0.5, say=print, warn=warn) as mirror:
            mirror.take_over()
            for step in range(steps):
                save(tmp_path, step)
            raise error

    return run


def test_the_end_after_an_error_is_bounded_and_tells_the_error_first(run_that_raises, location, before_put):
    warnings = list[str]()
    before_put(lambda target: time.sleep(0.3))
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        run_that_raises(ZeroDivisionError("the cause"), 10, warnings.append)
    assert time.monotonic() - began < 2.5
    assert "the run ends (ZeroDivisionError: the cause) after an upload of at most 0.5 s" in warnings[0]
    assert "the upload was not finished in time" in warnings[1]
    time.sleep(0.5)
    assert len([name for name in in_store(location) if "checkpoints" in name]) < 20


def test_a_second_interrupt_ends_without_an_upload(run_that_raises, location):
    with pytest.raises(KeyboardInterrupt):
        run_that_raises(KeyboardInterrupt(), 1, pytest.fail)
    assert in_store(location) == set()


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (PermissionError("no rights"), InputError, "cannot be used: PermissionError: no rights"),
        (OSError("Forbidden: bucket"), InputError, "cannot be used: OSError: Forbidden: bucket"),
        (FileNotFoundError("bucket"), InputError, "cannot be used: FileNotFoundError: bucket"),
        (ConnectionError("reset"), StorageError, "did not answer: ConnectionError: reset, in attempts over 0 s"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_store_that_cannot_be_opened(error, expected, message, open_copy, tmp_path, monkeypatch):
    def refuse(self, *arguments, **options):
        raise error

    monkeypatch.setattr(type(STORE), "find", refuse)
    with pytest.raises(expected, match=message):
        open_copy(tmp_path)


def test_a_store_that_answers_late_is_opened(location, tmp_path, monkeypatch):
    find, refused = type(STORE).find, list[str]()

    def refuse_once(self, path, **options):
        if not refused:
            refused.append(path)
            raise ConnectionError("reset")
        return find(self, path, **options)

    monkeypatch.setattr("train.data.remote.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(type(STORE), "find", refuse_once)
    Mirror(location, tmp_path, seconds=1, say=print, warn=pytest.fail).take_over()
