"""Tests of train/lifecycle/workdir.py: the folder is locked and belongs to one run."""

import dataclasses
import json

import pytest

from train.config import MeshConfig
from train.lifecycle.errors import InputError
from train.lifecycle.workdir import Workdir, architecture


@pytest.fixture
def work(config, tmp_path):
    work = Workdir(tmp_path / "run")
    with work.locked():
        yield work


def test_a_new_or_unchanged_run_has_no_changes(work, config):
    assert work.changes(config) == []
    work.begin(config)
    assert work.changes(config) == []
    assert json.loads(work.config.read_text())["model"]["layers"] == 2


def test_another_architecture_is_refused_field_by_field(work, config, replace):
    work.begin(config)
    with pytest.raises(InputError) as error:
        work.changes(replace(config, model={"layers": 3, "mlp_width": 64}))
    message = str(error.value)
    assert (
        "another architecture: model.layers is 2 there and 3 here; model.mlp_width is 32 there and 64 here." in message
    )
    assert "\n" not in message
    assert "model.width" not in message


def test_permitted_changes_are_listed(work, config, replace):
    work.begin(config)
    changed = replace(config, model={"remat": "layer"}, optimizer={"learning_rate": 0.5})
    changed = dataclasses.replace(changed, steps=40, mesh=MeshConfig(data=1, model=8), workdir="elsewhere")
    assert work.changes(changed) == [
        "steps was 20 and is 40",
        "mesh.data was 2 and is 1",
        "mesh.model was 4 and is 8",
        "model.remat was none and is layer",
        "optimizer.learning_rate was 300.0 and is 0.5",
    ]


def test_a_missing_field_is_named(work, config):
    work.begin(config)
    saved = json.loads(work.config.read_text())
    del saved["model"]["rope_theta"]
    work.config.write_text(json.dumps(saved))
    with pytest.raises(InputError, match=r"model.rope_theta is absent there and 10000.0 here"):
        work.changes(config)


def test_a_run_from_before_an_option_existed_has_its_default(work, config, replace):
    work.begin(config)
    saved = json.loads(work.config.read_text())
    del saved["model"]["qk_norm"]
    work.config.write_text(json.dumps(saved))
    assert work.changes(config) == []
    with pytest.raises(InputError, match=r"model.qk_norm is False there and True here"):
        work.changes(replace(config, model={"qk_norm": True}))


def test_temporary_files_of_killed_processes_are_removed(work, config):
    (work.root / ".metrics.jsonl.elsewhere.7.tmp").write_text("")
    work.begin(config)
    assert sorted(path.name for path in work.root.iterdir()) == [".lock", "config.json"]


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_an_unreadable_configuration_is_refused(content, work, config):
    work.config.write_text(content)
    with pytest.raises(InputError, match=r"config.json cannot be read .*, so it is not known which run is there"):
        work.changes(config)


def test_two_runs_do_not_share_a_folder(work):
    with pytest.raises(InputError, match="is in use by another run"), work.locked():
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="workdir must be a folder that can be written"),
        Workdir(tmp_path / "file").locked(),
    ):
        pass


def test_the_architecture_does_not_depend_on_how_the_model_is_computed(config, replace):
    free = {"dtype": "bfloat16", "remat": "dots", "fsdp_overlap": "prefetch"}
    assert architecture(config) == architecture(replace(config, model=free))
    assert architecture(config)["model.kv_heads"] == 8
    others = {name for name in architecture(config) if not name.startswith("model.")}
    assert others == {"optimizer.master_copies"}
