"""Tests of train/lifecycle/mirror.py: what a store has at each moment, and who may write there."""

import os
import shutil

import pytest

from tests.train.lifecycle.mirror.store import (
    STORE,
    checkpoint,
    in_copy,
    in_store,
    path_in,
    put,
    save,
    set_aside,
    upload,
)
from train.lifecycle.errors import InputError, RestartError
from train.lifecycle.mirror import Mirror, open_mirror
from train.lifecycle.working_copy import working_copy


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


def test_a_local_workdir_has_no_mirror(tmp_path):
    assert working_copy(str(tmp_path)) == tmp_path
    with open_mirror(str(tmp_path), tmp_path, seconds=0, say=print, warn=print) as mirror:
        assert mirror is None
