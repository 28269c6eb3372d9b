"""Tests of train/mirror.py: what a store has at each moment, who may write there, and whole runs on a server of S3."""

import json
import os
import re
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path

import fsspec
import pytest

from train.errors import InputError, RestartError, StorageError
from train.mirror import Mirror, open_mirror
from train.working_copy import working_copy

STORE = fsspec.filesystem("memory")


@pytest.fixture
def location() -> str:
    return f"memory://bucket/{uuid.uuid4().hex}"


@pytest.fixture
def open_copy(location):
    """A function (folder) -> the mirror of the store whose working copy is that folder, as a start on a machine."""

    def start(folder: Path, *, warn=pytest.fail, say=lambda text: None, trains: bool = True) -> Mirror:
        folder.mkdir(exist_ok=True)
        mirror = Mirror(location, folder, seconds=0, say=say, warn=warn)
        if trains:
            mirror.take_over()
        return mirror

    return start


@pytest.fixture
def before_put(monkeypatch):
    """A function (act) that has `act(target)` called before every upload of a file."""
    put = type(STORE).put_file

    def install(act) -> None:
        def act_and_put(self, source, target, **options):
            act(target)
            put(self, source, target, **options)

        monkeypatch.setattr(type(STORE), "put_file", act_and_put)

    return install


def save(folder: Path, step: int, content: str = "") -> None:
    path = folder / "checkpoints" / str(step) / "state"
    path.mkdir(parents=True)
    (path / "array").write_text(f"array of {step}{content}")
    (path.parent / "record").write_text(f"record of {step}{content}")


def upload(mirror: Mirror) -> None:
    mirror.start_upload()
    wait(mirror)


def wait(mirror: Mirror) -> None:
    if (worker := mirror._worker) is not None:
        worker.join()


def path_in(location: str, name: str) -> str:
    return f"{location.removeprefix('memory:/')}/{name}"


def put(location: str, name: str, content: bytes = b"content") -> None:
    STORE.pipe_file(path_in(location, name), content)


def in_store(location: str) -> set[str]:
    return {name.removeprefix(path_in(location, "")) for name in STORE.find(path_in(location, "").rstrip("/"))} - {
        ".owner.json"
    }


def in_copy(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".mirror.json"}


def checkpoint(step: int) -> set[str]:
    return {f"checkpoints/{step}/state/array", f"checkpoints/{step}/record"}


def set_aside(folder: Path) -> list[Path]:
    return list(folder.parent.glob(f"{folder.name}-*"))


def test_the_store_has_the_files_of_the_workdir_and_loses_what_is_deleted_there(open_copy, location, tmp_path):
    here = tmp_path / "here"
    mirror = open_copy(here)
    save(here, 5)
    (here / "metrics.jsonl").write_text("one\n")
    (here / ".lock").write_text("")
    (here / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
    (here / "checkpoints" / "10.orbax-checkpoint-tmp" / "array").write_text("half")
    upload(mirror)
    assert in_store(location) == {"metrics.jsonl"} | checkpoint(5)
    save(here, 10)
    shutil.rmtree(here / "checkpoints" / "5")
    (here / "metrics.jsonl").write_text("one\ntwo\n")
    mirror.close(seconds=0)
    assert in_store(location) == {"metrics.jsonl"} | checkpoint(10)
    assert STORE.cat_file(path_in(location, "metrics.jsonl")) == b"one\ntwo\n"


def test_another_machine_begins_with_the_complete_checkpoints(open_copy, location, tmp_path, before_put):
    here, there, warnings = tmp_path / "here", tmp_path / "there", list[str]()
    mirror = open_copy(here, warn=lambda text: None)
    save(here, 5)
    (here / "set_aside").mkdir()
    (here / "set_aside" / "metrics.jsonl").write_text("old\n")
    (here / "metrics.jsonl").write_text("one\n")
    upload(mirror)
    save(here, 10)

    def fail(target: str) -> None:
        if target.endswith("10/state/array"):
            raise ConnectionError("the network is down")

    before_put(fail)
    upload(mirror)
    assert {".incomplete/10", "checkpoints/10/record"} < in_store(location)
    second = open_copy(there, warn=warnings.append)
    assert in_copy(there) == {"metrics.jsonl"} | checkpoint(5)
    assert len(warnings) == 1
    assert "the checkpoints of steps 10 in" in warnings[0]
    second.close(seconds=0)
    # What was set aside was not copied, and is not deleted either; what was left of step 10 is.
    assert in_store(location) == {"metrics.jsonl", "set_aside/metrics.jsonl"} | checkpoint(5)


def test_a_workdir_that_was_copied_to_the_store_by_hand_is_continued(open_copy, location, tmp_path):
    put(location, "metrics.jsonl")
    for name in checkpoint(5):
        put(location, name)
    mirror = open_copy(tmp_path / "here")
    assert in_copy(tmp_path / "here") == {"metrics.jsonl"} | checkpoint(5)
    mirror.close(seconds=0)
    assert checkpoint(5) < in_store(location)


def test_a_start_that_does_not_train_changes_nothing_in_the_store(open_copy, location, tmp_path):
    mirror = open_copy(tmp_path / "here")
    save(tmp_path / "here", 5)
    upload(mirror)
    refused = open_copy(tmp_path / "there", trains=False)
    refused.close(seconds=0)
    save(tmp_path / "here", 10)
    upload(mirror)
    mirror.require_owner()
    assert in_store(location) == checkpoint(5) | checkpoint(10)
    with pytest.raises(RestartError, match=r"another start wrote to memory://.* while this one was reading it"):
        refused.take_over()
    mirror.require_owner()


def test_a_start_on_the_same_machine_keeps_what_was_not_uploaded(open_copy, tmp_path):
    here = tmp_path / "here"
    upload(open_copy(here))
    save(here, 5)  # the process was killed before the upload
    again = open_copy(here)
    assert checkpoint(5) == in_copy(here)
    again.close(seconds=0)


def test_what_another_machine_did_since_replaces_the_working_copy(open_copy, tmp_path):
    here, there, warnings = tmp_path / "here", tmp_path / "there", list[str]()
    mirror = open_copy(here)
    save(here, 5)
    mirror.close(seconds=0)
    other = open_copy(there)
    save(there, 10)
    other.close(seconds=0)
    open_copy(here)
    assert in_copy(here) == checkpoint(5) | checkpoint(10)
    assert not set_aside(here)
    last = open_copy(there)
    last.close(seconds=0)
    save(here, 15)  # what only this machine has
    open_copy(here, warn=warnings.append)
    assert in_copy(here) == checkpoint(5) | checkpoint(10)
    (aside,) = set_aside(here)
    assert checkpoint(15) < in_copy(aside)
    assert (
        f"had 2 files that were not uploaded, such as checkpoints/15/record, but process {os.getpid()}" in warnings[0]
    )
    assert f"the working copy was moved to {aside}" in warnings[0]


def test_a_store_that_was_emptied_is_filled_again(open_copy, location, tmp_path):
    here, said = tmp_path / "here", list[str]()
    mirror = open_copy(here)
    save(here, 5)
    upload(mirror)
    STORE.rm(path_in(location, ""), recursive=True)
    save(here, 10)
    upload(mirror)
    with pytest.raises(InputError, match=r"\.owner\.json was removed while the run was going on"):
        mirror.require_owner()
    again = open_copy(here, say=said.append)
    assert "has no .owner.json: the working copy" in said[0]
    again.close(seconds=0)
    assert in_store(location) == in_copy(here) == checkpoint(5) | checkpoint(10)


def test_it_must_be_clear_which_copy_is_newer(open_copy, location, tmp_path):
    here = tmp_path / "here"
    mirror = open_copy(here)
    save(here, 5)
    mirror.close(seconds=0)
    STORE.rm_file(path_in(location, ".owner.json"))
    put(location, "checkpoints/7/record")
    with pytest.raises(
        InputError, match=r"lacks the checkpoints of steps 7\. Remove the working copy to continue from"
    ):
        open_copy(here)


def test_an_emptied_working_copy_does_not_empty_the_store(open_copy, tmp_path):
    here = tmp_path / "here"
    mirror = open_copy(here)
    save(here, 5)
    mirror.close(seconds=0)
    shutil.rmtree(here / "checkpoints")
    open_copy(here)
    assert in_copy(here) == checkpoint(5)


def test_a_start_that_was_overtaken_writes_nothing_and_ends(open_copy, location, tmp_path):
    here = tmp_path / "here"
    mirror = open_copy(here)
    mirror.require_owner()
    open_copy(tmp_path / "there")
    save(here, 5)
    upload(mirror)
    assert in_store(location) == set()
    with pytest.raises(InputError, match=r"was taken over by another start, process \d+ on "):
        mirror.require_owner()
    with pytest.raises(InputError, match="was taken over"):
        mirror.close(seconds=0)


def test_a_start_that_is_overtaken_during_an_upload_goes_no_further(open_copy, location, tmp_path, before_put):
    here, there = tmp_path / "here", tmp_path / "there"
    mirror = open_copy(here)
    save(here, 5)
    upload(mirror)
    save(here, 10)
    shutil.rmtree(here / "checkpoints" / "5")
    others = list[Mirror]()

    def overtake(target: str) -> None:
        if not others:
            others.append(open_copy(there, warn=lambda text: None))

    before_put(overtake)
    upload(mirror)
    with pytest.raises(InputError, match="was taken over"):
        mirror.require_owner()
    # The object that was on its way has arrived. Nothing else was uploaded or deleted, and step 10 is not read.
    assert in_store(location) == checkpoint(5) | {"checkpoints/10/record", ".incomplete/10"}
    assert in_copy(there) == checkpoint(5)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_checkpoint_that_is_written_again_is_not_read_in_between(
    interrupted, open_copy, location, tmp_path, before_put
):
    here, there = tmp_path / "here", tmp_path / "there"
    mirror = open_copy(here, warn=lambda text: None)
    save(here, 5)
    save(here, 10, " old")
    upload(mirror)
    shutil.rmtree(here / "checkpoints" / "10")
    save(here, 10, " another")

    def fail(target: str) -> None:
        if interrupted and target.endswith("array"):
            raise ConnectionError("the network is down")

    before_put(fail)
    upload(mirror)
    open_copy(there, warn=lambda text: None)
    assert in_copy(there) == (checkpoint(5) if interrupted else checkpoint(5) | checkpoint(10))


def test_what_the_run_went_back_from_is_not_read(open_copy, location, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    mirror = open_copy(here)
    for step in (5, 10):
        save(here, step)
    mirror.close(seconds=0)
    again = open_copy(here, trains=False)
    aside = here / "set_aside" / again.start_name
    aside.mkdir(parents=True)
    (here / "checkpoints" / "10").rename(aside / "10")
    again.take_over()  # and then the machine is lost
    open_copy(there, warn=lambda text: None)
    assert in_copy(there) == checkpoint(5)


def test_a_run_that_began_anew_keeps_its_working_copy(open_copy, tmp_path):
    here = tmp_path / "here"
    mirror = open_copy(here)
    save(here, 5)
    mirror.close(seconds=0)
    again = open_copy(here, trains=False)
    (here / "checkpoints").rename(here / "set_aside")
    again.take_over()  # and then the process is killed before its first checkpoint
    open_copy(here)
    assert in_copy(here) == {name.replace("checkpoints", "set_aside") for name in checkpoint(5)}


def test_a_store_has_a_complete_checkpoint_while_the_only_one_is_replaced(open_copy, location, tmp_path, before_put):
    here = tmp_path / "here"
    mirror = open_copy(here)
    save(here, 5)
    upload(mirror)
    save(here, 10)
    shutil.rmtree(here / "checkpoints" / "5")
    seen = list[set[str]]()
    before_put(lambda target: seen.append(in_store(location)))
    upload(mirror)
    assert seen
    assert all(checkpoint(5) < names and ".incomplete/5" not in names for names in seen)
    assert in_store(location) == checkpoint(10)


def test_a_checkpoint_that_ends_during_an_upload_is_uploaded_next(open_copy, location, tmp_path, before_put):
    here = tmp_path / "here"
    mirror = open_copy(here)
    save(here, 5)

    def save_another(target: str) -> None:
        if not (here / "checkpoints" / "10").exists():
            save(here, 10)
            mirror.start_upload()

    before_put(save_another)
    upload(mirror)
    assert in_store(location) == checkpoint(5) | checkpoint(10)


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
    monkeypatch.setattr("train.mirror.LONGEST_OBJECT", 0.2)
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

    monkeypatch.setattr("train.remote.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(type(STORE), "find", refuse_once)
    Mirror(location, tmp_path, seconds=1, say=print, warn=pytest.fail).take_over()


def test_a_local_workdir_has_no_mirror(tmp_path):
    assert working_copy(str(tmp_path)) == tmp_path
    with open_mirror(str(tmp_path), tmp_path, seconds=0, say=print, warn=print) as mirror:
        assert mirror is None


@pytest.fixture
def server(monkeypatch):
    """A server of the S3 protocol with a bucket, and the environment with which a run reaches it."""
    from moto.server import ThreadedMotoServer  # imported here, because only the slow tests need it

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    store.mkdir("bucket")
    yield store, environment
    server.stop()


@pytest.mark.slow
def test_a_run_on_a_server_continues_on_another_machine(server, start, tmp_path, text):
    store, environment = server
    store.put_file(str(text), "bucket/data/text.txt")
    command = ("--workdir", "s3://bucket/run", "--data.path", "s3://bucket/data/text.txt", "--eval.every", 0)

    def finish(machine: str, *options: object, after: int | None = None) -> tuple[int, str, str]:
        process = start(*command, *options, XDG_CACHE_HOME=str(tmp_path / machine), **environment)
        if after is not None:
            for line in process.stdout:
                if line.startswith(f"step {after}/"):
                    break
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    code, out, err = finish("first", "--steps", 30, after=10)
    assert (code, err) == (75, ""), out + err
    step = int(re.search(r"after step (\d+), saved in", out)[1])
    assert store.find(f"bucket/run/checkpoints/{step}")
    assert not store.find("bucket/run/.incomplete")
    code, out, err = finish("second", "--steps", 30)
    assert (code, err) == (0, ""), out + err
    assert "stored     s3://bucket/run" in out
    lines = [json.loads(line) for line in store.cat_file("bucket/run/metrics.jsonl").splitlines()]
    plain = start("--steps", 30, "--workdir", tmp_path / "plain", "--eval.every", 0)
    assert plain.communicate(timeout=240)[1] == ""
    expected = [json.loads(line) for line in (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected]
    code, out, err = finish("third", "--steps", 30)
    assert code == 0, err
    assert "the run is complete: step 30 of 30" in out
    assert not (Path.cwd() / "s3:").exists()
    assert os.listdir(tmp_path / "third" / "flaxasync" / "workdirs")
