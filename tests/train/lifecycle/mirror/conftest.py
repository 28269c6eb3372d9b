"""Fixtures of the tests of mirrors."""

import uuid
from pathlib import Path

import pytest

from tests.train.lifecycle.mirror.store import STORE
from train.lifecycle.mirror import Mirror


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
