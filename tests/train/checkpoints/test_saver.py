"""Tests of train/checkpoints/saver.py: what it does when a checkpoint cannot be written."""

import dataclasses
import errno
from unittest import mock

import pytest

from train.checkpoints.saver import Saver
from train.lifecycle.errors import StorageError
from train.lifecycle.stopping import Watchdog
from train.metrics.lines import Events

FAILURES = {
    "no room for metrics": (OSError(errno.ENOSPC, "No space left on device"), True),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
    "input/output": (OSError(errno.EIO, "Input/output error"), False),
    "read-only": (OSError(errno.EROFS, "Read-only file system"), False),
    "no room for a checkpoint": (
        StorageError("step 5 could not be written: INTERNAL: No space left on device"),
        True,
    ),
    "checkpoint, input/output": (
        StorageError("step 5 could not be written: Input/output error"),
        False,
    ),
}


@pytest.fixture
def checkpoints():
    checkpoints = mock.MagicMock()
    checkpoints.wait.return_value = None
    checkpoints.free_space.return_value = []
    return checkpoints


@pytest.fixture
def saver(config, checkpoints, tmp_path):
    config = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, retry_seconds=0.1)
    )
    return Saver(
        config, checkpoints, mock.MagicMock(), mock.MagicMock(), Events(None), mock.MagicMock(),
        Watchdog(0, tmp_path / "s"), lambda: None,
    )  # fmt: skip


def test_a_step_that_is_saved_instead_of_an_earlier_one_is_saved_once(saver, checkpoints):
    checkpoints.poll.side_effect = StorageError(
        "step 5 could not be written: INTERNAL: No space left on device"
    )
    saver.poll(10, mock.MagicMock())
    saver.save(10, mock.MagicMock())  # the step was due, too
    assert [call.args[0] for call in checkpoints.save.call_args_list] == [10]
    saver.save(15, mock.MagicMock())
    assert [call.args[0] for call in checkpoints.save.call_args_list] == [10, 15]


@pytest.mark.parametrize("failure", FAILURES)
def test_only_a_full_disk_deletes_older_checkpoints(failure, saver, checkpoints):
    error, deletes = FAILURES[failure]
    checkpoints.save.side_effect = error
    with pytest.raises(StorageError, match=r"in attempts over 0\.1 s, so the run ends"):
        saver.save(5, mock.MagicMock())
    assert checkpoints.free_space.called == deletes
