"""Tests of train/lifecycle/workdir.py: the folder is locked, and says what changed since the last
start.
"""

import dataclasses
import json
import os

import pytest

from train.config import MeshConfig
from train.lifecycle.errors import InputError, StorageError
from train.lifecycle.workdir import open_workdir


@pytest.fixture
def work(tmp_path):
    with open_workdir(tmp_path / "run") as work:
        yield work


def test_changes_since_the_last_start_are_listed(work, config, replace):
    assert work.changes(config) == []
    (work.root / ".metrics.jsonl.elsewhere.7.tmp").write_text("")  # of a process that was killed
    work.begin(config)
    assert sorted(path.name for path in work.root.iterdir()) == [".lock", "config.json"]
    assert work.changes(config) == []
    changed = replace(config, model={"remat": "layer"}, checkpoint={"folder": "elsewhere"})
    changed = dataclasses.replace(
        changed, steps=40, mesh=MeshConfig(data=1, model=4), workdir="elsewhere"
    )
    assert work.changes(changed) == [
        "steps was 20 and is 40",
        "mesh.data was 2 and is 1",
        "model.remat was None and is layer",
        "checkpoint.folder was None and is elsewhere",
    ]


def test_a_run_from_before_an_option_existed_has_its_default(work, config, replace):
    work.begin(config)
    saved = json.loads(work.config.read_text())
    del saved["model"]["qk_norm"]
    work.config.write_text(json.dumps(saved))
    assert work.changes(config) == []
    assert work.changes(replace(config, model={"qk_norm": True})) == [
        "model.qk_norm was False and is True"
    ]


def test_two_runs_do_not_share_a_folder(work):
    says = (
        r"is in use by another run \(process \d+ on .*\): wait for it to end, or choose "
        r"another --workdir"
    )
    with pytest.raises(InputError, match=says), open_workdir(work.root):
        pass


def test_a_lock_that_was_removed_is_noticed(work):
    work.require_lock()
    (work.root / ".lock").unlink()
    with pytest.raises(
        StorageError, match=r"its file .lock was removed or replaced while the run was going on"
    ):
        work.require_lock()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="workdir must be a folder that can be written"),
        open_workdir(tmp_path / "file"),
    ):
        pass


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "events.jsonl", "loss.png", "tensorboard", "checkpoints"]
)
def test_what_the_run_writes_later_is_checked_first(name, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    is_file = "." in name
    if is_file:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_text("")
    kind = "file" if is_file else "folder"
    with (
        pytest.raises(InputError, match=f"must have a {kind}, or nothing, called {name}"),
        open_workdir(folder),
    ):
        pass


def test_a_configuration_that_is_no_json_says_nothing(work, config):
    for content in (b"[" * 9999, b"\xff", b"[]", b"{"):
        work.config.write_bytes(content)
        assert work.changes(config) == []
