"""Tests of train/saver.py: older checkpoints are deleted only if the disk is full."""

import dataclasses
import errno
import os
from unittest import mock

import pytest

from train.checkpoint import WriteError
from train.errors import StorageError
from train.events import Events
from train.saver import Saver
from train.watchdog import Watchdog

FAILURES = {
    "no room for metrics": (OSError(errno.ENOSPC, "No space left on device"), True),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
    "input/output": (OSError(errno.EIO, "Input/output error"), False),
    "read-only": (OSError(errno.EROFS, "Read-only file system"), False),
    "no room for a checkpoint": (WriteError(5, OSError("INTERNAL: No space left on device")), True),
    "checkpoint, input/output": (WriteError(5, OSError(errno.EIO, os.strerror(errno.EIO))), False),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_only_a_full_disk_deletes_older_checkpoints(failure, config, tmp_path):
    error, deletes = FAILURES[failure]
    checkpoints, recorder = mock.MagicMock(), mock.MagicMock()
    checkpoints.wait.return_value = None
    checkpoints.save.side_effect = error
    checkpoints.free_space.return_value = []
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, retry_seconds=0.1))
    saver = Saver(
        config, checkpoints, mock.MagicMock(), recorder, Events(None), mock.MagicMock(), Watchdog(0, tmp_path / "s"),
        warn=lambda text: None,
    )  # fmt: skip
    with pytest.raises(StorageError, match="could not be written"):
        saver.save(5, mock.MagicMock())
    assert checkpoints.free_space.called == deletes
