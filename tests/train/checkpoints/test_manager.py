"""Tests of train/checkpoints/manager.py: a checkpoint is restored bit by bit, on any mesh, or
reported as damaged.
"""

import dataclasses
import errno
import gc
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from train.checkpoints import manager as checkpoint
from train.checkpoints.manager import Checkpoints
from train.checkpoints.record import fingerprint, identify_run
from train.config import MeshConfig
from train.lifecycle.errors import InputError, StorageError
from train.step.mesh import make_mesh

# When one of orbax's concurrent reads fails, the others warn when they are garbage-collected, and
# pytest would turn these warnings into errors.
ignore_abandoned_reads = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
POSITION = {"sequences": 56}


@pytest.fixture
def identity(config):
    return identify_run(config, {})


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept") / "checkpoints"


@pytest.fixture
def folder(identity, trainer, kept, tmp_path) -> Path:
    """A folder with the checkpoints of steps 5 and 10, whose states differ."""
    if not kept.exists():
        state = trainer.init()
        with Checkpoints(kept, keep=3) as checkpoints:
            for step in (5, 10):
                state = dataclasses.replace(state, step=state.step + 5)
                checkpoints.save(step, state, data=POSITION, tokens=0, identity=identity)
    return shutil.copytree(kept, tmp_path / "checkpoints")


def assert_equal(state, other):
    assert jax.tree.structure(state) == jax.tree.structure(other)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(np.asarray, state),
        jax.tree.map(np.asarray, other),
    )


@pytest.mark.parametrize("sizes", [
    {"data": 2, "fsdp": 2, "model": 2},
    pytest.param({"data": 4, "model": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_state_is_restored_bit_by_bit_onto_any_mesh(
    sizes, config, identity, trainer, trainer_of, folder
):
    expected = jax.tree.map(np.asarray, trainer.init().params)
    other = make_mesh(MeshConfig(**sizes))
    with jax.set_mesh(other), Checkpoints(folder, keep=3) as checkpoints:
        abstract = trainer_of(config, other).abstract_state()
        state, record, _ = checkpoints.restore(10, abstract, identity)
    assert record.data == POSITION
    assert_equal(state.params, expected)
    assert int(state.step) == 10
    for leaf, target in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)


@pytest.mark.slow
def test_training_does_not_change_a_state_that_is_being_saved(identity, trainer, tmp_path):
    """The next step reuses the buffers of the state once `save` has returned, while the copy is
    still being written.
    """
    step, batch = trainer.train_step, trainer.abstract_batch()[0]
    tokens = jax.device_put(np.ones(batch.shape, np.int32), batch.sharding)
    state = trainer.init()
    with Checkpoints(tmp_path / "checkpoints", keep=8) as checkpoints:
        saved = {}
        for count in range(1, 4):
            state, _ = step(state, tokens, tokens)
            saved[count] = jax.tree.map(np.array, state)
            checkpoints.save(count, state, data=POSITION, tokens=0, identity=identity)
        checkpoints.wait()
        for count, expected in saved.items():
            restored, *_ = checkpoints.restore(count, trainer.abstract_state(), identity)
            assert_equal(restored, expected)


def test_only_the_newest_checkpoints_are_kept(identity, trainer, tmp_path):
    state = trainer.init()
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state, data=POSITION, tokens=0, identity=identity)
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4]


def test_a_write_that_fails_while_orbax_still_writes_is_a_write_error(folder, monkeypatch):
    half_written = folder / "15.orbax-checkpoint-tmp" / "state" / "ocdbt.process_0"
    half_written.mkdir(parents=True)
    remove = os.rmdir

    def refuse(path, **options):
        # another thread of orbax has just written a file there
        if Path(path).name == half_written.name:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        remove(path, **options)

    with Checkpoints(folder, keep=3) as checkpoints:
        half_written.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(os, "rmdir", refuse)
        failure = checkpoints._failure(OSError(errno.EFBIG, "File too large"))
        monkeypatch.undo()
    assert isinstance(failure, StorageError)


def test_what_orbax_says_of_files_that_disappeared_is_a_write_error_and_other_errors_are_not(
    folder,
):
    with Checkpoints(folder, keep=3) as checkpoints:
        failure = checkpoints._failure(
            ValueError("Save failed: 11/11 params are missing .zarray in checkpoint")
        )
        assert isinstance(failure, StorageError)
        with pytest.raises(ValueError, match="a defect"):
            checkpoints._failure(ValueError("a defect"))


def test_the_newest_complete_checkpoint_or_the_requested_one_is_chosen(folder):
    half_written = shutil.copytree(folder / "10", folder / "15.orbax-checkpoint-tmp")
    with Checkpoints(folder, keep=3) as checkpoints:
        assert not half_written.exists(), "what a killed process leaves is removed"
        assert checkpoints.choose(None) == 10
        assert checkpoints.choose(5) == 5
        for step in (7, 0):
            with pytest.raises(
                InputError,
                match=rf"the step must be one that is in {folder}: got {step}, there are 5, 10",
            ):
                checkpoints.choose(step)


@pytest.mark.parametrize("how", ["moved", "linked", "copied", "swapped"])
def test_a_checkpoint_in_the_folder_of_another_step_is_refused(how, identity, trainer, folder):
    wrong = folder / "20"
    if how == "moved":
        (folder / "10").rename(wrong)
    elif how == "linked":
        wrong.symlink_to("10")
    elif how == "copied":
        shutil.copytree(folder / "10", wrong)
    else:
        (folder / "10").rename(folder / "aside")
        (folder / "5").rename(folder / "10")
        (folder / "aside").rename(folder / "5")
        wrong = folder / "10"
    held = 5 if how == "swapped" else 10
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.choose(None) == int(wrong.name)
        with pytest.raises(
            InputError,
            match=rf"checkpoint of step {wrong.name}, {wrong}, holds step {held}: its folder",
        ):
            checkpoints.restore(int(wrong.name), trainer.abstract_state(), identity)
    assert wrong.exists()
    if how == "moved":
        wrong.rename(folder / "10")
        with Checkpoints(folder, keep=3) as checkpoints:
            assert checkpoints.record(checkpoints.choose(None)).step == 10


@pytest.mark.parametrize("part", ["state", "record"])
def test_a_part_of_another_step_is_damage(part, identity, trainer, folder):
    shutil.rmtree(folder / "10" / part)
    shutil.copytree(folder / "5" / part, folder / "10" / part)
    with (
        Checkpoints(folder, keep=3) as checkpoints,
        pytest.raises(InputError, match=r"step is not what|holds step 5"),
    ):
        checkpoints.restore(10, trainer.abstract_state(), identity)


@pytest.mark.parametrize("content", [None, b"[" * 9999 + b"]" * 9999, b"\xff", b"[1]", b"9" * 5000])
def test_a_record_that_is_no_json_or_no_file_is_damage(content, folder):
    record = folder / "10" / "record" / "metadata"
    record.unlink()
    if content is None:
        os.mkfifo(record)  # without a writer it would block whoever opens it
    else:
        record.write_bytes(content)
    with (
        Checkpoints(folder, keep=3) as checkpoints,
        pytest.raises(InputError, match=r"step 10, .* is damaged"),
    ):
        checkpoints.record(10)


def test_a_folder_that_cannot_take_checkpoints_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/checkpoints"):
        with pytest.raises(
            InputError, match=r"checkpoint.folder must be a folder that can be written: "
        ):
            Checkpoints(folder)


def test_folders_that_are_no_steps_are_left_alone(folder):
    for name in ("\u00b2", "\u0663", "007", "notes"):
        shutil.copytree(folder / "5", folder / name)
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.steps() == [5, 10]
    assert checkpoint._find(folder / "10") == (folder, 10)
    with pytest.raises(InputError, match=r"must be the workdir .* there is no checkpoint in it"):
        checkpoint._find(folder / "\u00b2")


def test_a_folder_of_checkpoints_in_the_home_folder_is_found(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text('{"checkpoint": {"folder": "~/checkpoints"}}')
    assert checkpoint._find(workdir) == (folder, None)


def test_a_command_that_reads_a_damaged_checkpoint_is_told_the_one_before_it(folder):
    shutil.rmtree(folder / "10" / "record")
    with (
        Checkpoints(folder, read_only=True) as checkpoints,
        pytest.raises(
            InputError, match=rf"deleted\. The one before it is of step 5, {folder}/5\.$"
        ),
    ):
        checkpoints.record(10)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGE = {
    "emptied": lambda path: path.write_bytes(b""),
    "a bit flipped": flip,
    "removed": lambda path: path.unlink(),
}


@pytest.fixture
def reads_abandoned():
    """Collects the reads that orbax abandons within the test, where their warnings are ignored."""
    yield
    gc.collect()


@ignore_abandoned_reads
@pytest.mark.usefixtures("reads_abandoned")
@pytest.mark.parametrize("damage", [
    pytest.param(damage, marks=[] if damage is flip else pytest.mark.slow, id=name)
    for name, damage in DAMAGE.items()
])  # fmt: skip
def test_damage_to_any_file_is_reported_or_harmless(damage, identity, trainer, folder, tmp_path):
    """After damage to any one file of the newest checkpoint, restoring reports the damage or gives
    the same state.
    """
    # Restoring onto eight devices takes many more reads.
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    sharding, messages = jax.NamedSharding(one, jax.P()), []
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        trainer.abstract_state(),
    )
    expected = jax.tree.map(np.asarray, dataclasses.replace(trainer.init(), step=np.int32(10)))
    for file in files_of(folder / "10"):
        copy = tmp_path / "damaged"
        shutil.copytree(folder, copy)
        damage(copy / file.relative_to(folder))
        before = files_of(copy)
        with jax.set_mesh(one), Checkpoints(copy, keep=3) as checkpoints:
            try:
                assert checkpoints.choose(None) == 10
                state, record, _ = checkpoints.restore(10, abstract, identity)
            except InputError as error:
                messages.append(str(error))
            else:
                assert_equal(state, expected)
                assert record.data == POSITION
        assert files_of(copy) == before, "something was deleted"
        shutil.rmtree(copy)
    assert len(messages) > 3
    for message in messages:
        assert f"the checkpoint of step 10, {copy / '10'}, is damaged (" in message
        assert "Run again with --resume 5 to continue from there" in message


@ignore_abandoned_reads
@pytest.mark.usefixtures("reads_abandoned")
def test_a_damaged_checkpoint_without_an_earlier_one_suggests_another_workdir(
    identity, trainer, folder
):
    shutil.rmtree(folder / "5")
    shutil.rmtree(folder / "10" / "state")
    with (
        Checkpoints(folder, keep=3) as checkpoints,
        pytest.raises(InputError, match="none before it: choose another"),
    ):
        checkpoints.restore(10, trainer.abstract_state(), identity)


def test_readable_values_that_were_not_saved_are_reported_as_damage(
    identity, trainer, tmp_path, monkeypatch
):
    with (
        monkeypatch.context() as patch,
        Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints,
    ):
        patch.setattr(checkpoint, "fingerprint", lambda state: fingerprint(state) | {"step": 1})
        checkpoints.save(10, trainer.init(), data=POSITION, tokens=0, identity=identity)
    with (
        Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints,
        pytest.raises(InputError, match=r"step 10, .* is damaged \(step is not what was saved\)"),
    ):
        checkpoints.restore(10, trainer.abstract_state(), identity)


def test_later_checkpoints_are_moved_aside_and_kept(identity, trainer, folder, tmp_path):
    for expected in ("10", "10-1"):
        with Checkpoints(folder, keep=3) as checkpoints:
            assert checkpoints.set_aside(5, tmp_path / "aside") == [10]
            assert checkpoints.steps() == [5]
            checkpoints.save(10, trainer.init(), data=POSITION, tokens=0, identity=identity)
        assert (tmp_path / "aside" / expected / "state").is_dir()
